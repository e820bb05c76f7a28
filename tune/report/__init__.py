"""The result of a sweep: the answer, and the files that show it.

The entry points are `answer` (answer.py) and `write_report` (write.py).
"""
