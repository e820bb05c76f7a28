"""Many training runs: sweeps over batch size, precision and any other configuration key."""
