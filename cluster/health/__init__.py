"""Examine live nodes, and judge what was measured."""

import trainers.on_ray  # noqa: F401 (sets what Ray reads from the environment at import)
