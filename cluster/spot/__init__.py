"""Spot machines: their notices, and another node type where the cloud refuses one.

The doors are `watch` (watch.py) and `autoscale` (autoscaler.py).
"""
