"""Trials run in forks of a warm parent process; each node has one, its zygote.

The zygote has already imported torch and the user's module.

The entry points are `Zygote` (client.py), the client of a node's zygote, and
`Zygote.fork`, which starts a process.
"""
