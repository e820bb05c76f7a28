"""A job with a deadline on spot machines: which machines it runs on, and how often it writes a checkpoint."""
