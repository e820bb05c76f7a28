"""The machines: cluster files, capacity and pre-flight checks."""
