"""Cluster files, read as Ray reads them: their capacity, cost and errors.

The entry points are `load_cluster` (ray_up.py) and `findings` (rules.py).
"""
