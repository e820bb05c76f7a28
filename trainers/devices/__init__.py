"""One rank's hardware, and the group of ranks."""
