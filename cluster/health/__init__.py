"""Examine nodes, and judge the results.

The entry points are `check` and `require_sound` (check.py), and `check_local`
(probes.py).
"""
