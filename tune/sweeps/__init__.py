"""A sweep from its file to its answer.

The door is `run_to_answer` (sweep.py), behind the command and `from tune import sweep`.
"""
