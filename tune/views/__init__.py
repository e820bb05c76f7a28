"""Views of sweeps that others run: the page of one that is running, and several side by side."""
