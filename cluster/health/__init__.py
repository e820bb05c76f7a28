"""Examine nodes, and judge what was measured.

The doors are `check` and `require_sound` (check.py), and `check_local` (probes.py).
"""
