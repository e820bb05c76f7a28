"""Spot machines: the notice of their end, and on-demand machines where spot is refused."""
