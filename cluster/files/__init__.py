"""Cluster files as Ray and KubeRay read them, what they can hold, and prices.

The door is `load_cluster` (ray_up.py).
"""
