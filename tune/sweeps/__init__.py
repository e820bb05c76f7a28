"""Plan, run and watch a sweep."""

import trainers.on_ray  # noqa: F401 (sets what Ray reads from the environment at import)
