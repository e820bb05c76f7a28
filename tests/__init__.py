"""The suite: unit, distributed (real gloo processes), ray, and what a user types."""
