"""Cluster files as Ray reads them, what they can hold and cost, and what is wrong there.

The doors are `load_cluster` (ray_up.py), `findings` (rules.py) and `slurm_findings`
(slurm.py).
"""
