"""Clusters: files for `ray up`, KubeRay and Slurm, live nodes, and spot machines.

The door is `python -m cluster` (cluster/__main__.py).
"""
