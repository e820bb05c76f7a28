"""Examine nodes, and judge what is found.

The entry points are `check` and `require_sound` (check.py), and `check_local`
(probes.py).
"""
