"""Use what was trained: evaluate, predict, export."""
