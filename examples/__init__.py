"""One folder a story: task.py, train.yaml, sweep.yaml and a README with output."""
