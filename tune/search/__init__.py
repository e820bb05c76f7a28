"""Which trial comes next, and which of the first are run again.

The doors are `searcher` (ray_search.py) and `repeats_to_run` (finalists.py).
"""
