"""What a sweep says: the answer, and the files that show it.

The doors are `answer` (answer.py) and `write_report` (write.py).
"""
