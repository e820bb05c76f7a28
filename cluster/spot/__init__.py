"""Spot machines: on which a job with a deadline runs, how often it writes a checkpoint, and the notice of their end."""
