"""Views of sweeps that others run."""
