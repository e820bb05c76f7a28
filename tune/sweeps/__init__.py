"""Plan, run and watch a sweep."""
