"""One folder per example: task.py, train.yaml, sweep.yaml and a README."""
