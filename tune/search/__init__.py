"""Which trial comes next."""
