"""Functions as users write them, for Ray Train and for Tune alone; `table` lists them.

They know nothing of Paceline, and say nothing of where they run.
"""
