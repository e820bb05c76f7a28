"""What makes a cluster file unsafe, slow or unable to start.

The doors are `findings` (clusters.py) and `slurm_findings` (slurm.py).
"""
