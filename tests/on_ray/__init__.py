"""On the session's Ray cluster."""
