"""Experiment trackers: a process of its own reads a run from storage and sends it."""
