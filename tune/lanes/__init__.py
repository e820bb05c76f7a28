"""Warm worker groups that run trial after trial (Ray)."""

import trainers.on_ray  # noqa: F401 (sets what Ray reads from the environment at import)
