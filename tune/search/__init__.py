"""Choose the next trial, and which of the best trials are repeated.

The entry points are `searcher` (ray_search.py) and `repeats_to_run`
(finalists.py).
"""
