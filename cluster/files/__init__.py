"""Cluster files: reading them as Ray does, their capacity and cost, and their errors.

The entry points are `load_cluster` (ray_up.py) and `findings` (rules.py).
"""
