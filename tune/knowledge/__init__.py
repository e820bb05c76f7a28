"""What earlier sweeps have found, kept beside them: nothing is learned twice."""
