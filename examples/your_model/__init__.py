"""From an existing training script to a task."""
