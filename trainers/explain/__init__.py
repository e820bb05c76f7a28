"""Where the time of a run goes, and which lines of its configuration may change that."""
