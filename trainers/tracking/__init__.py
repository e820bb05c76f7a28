"""Experiment trackers: a separate process reads a run from storage and sends it."""
