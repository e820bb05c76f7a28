"""The journal of a sweep, and what trials teach about memory and time."""
