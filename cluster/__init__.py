"""Clusters: files for `ray up` and Slurm, live nodes, and spot machines.

The entry point is `python -m cluster` (cluster/__main__.py).
"""
