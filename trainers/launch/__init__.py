"""The specification of a run, and the launchers without Ray."""
