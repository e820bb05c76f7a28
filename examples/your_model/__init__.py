"""A training script, and the same training as a task."""
