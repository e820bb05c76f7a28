"""Records of trials, what they teach about memory, and what users want done.

The doors are `Journal` (journal.py) and `make_record` (record.py).
"""
