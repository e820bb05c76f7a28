"""The answer of a sweep, and the files that show it."""
