"""Experiment trackers: a process of its own reads what a run leaves on storage, and
sends it.
"""
