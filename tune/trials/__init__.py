"""Trial records, what trials reveal about memory, and the actions of users.

The entry points are `Journal` (journal.py) and `make_record` (record.py).
"""
