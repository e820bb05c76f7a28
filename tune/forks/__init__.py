"""Trials run in forks of the zygote, a process on each node.

The zygote has already imported torch and the user's module.

The entry points are the class `Zygote` (client.py), which is the client of a
node's zygote, and its method `fork`, which starts a process.
"""
