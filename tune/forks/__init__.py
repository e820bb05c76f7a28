"""Trials are forks of a warm parent, a zygote a node.

It has imported torch and the user's module.

Its door: `Zygote` (client.py) gives a node's zygote, and `Zygote.fork` a process of it.
"""
