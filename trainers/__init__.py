"""One training run: the shared per-worker loop and everything that it needs."""
