"""A sweep from its file to its answer.

The entry point is `run_to_answer` (sweep.py), which the command and
`tune.sweep` call.
"""
