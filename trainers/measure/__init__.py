"""Clocks, logs and profiles of a run."""
