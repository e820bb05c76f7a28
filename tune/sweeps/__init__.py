"""Plan, run and watch a sweep."""

from trainers.on_ray.environment import set_sweep_environment  # with what Ray reads from the environment at import

set_sweep_environment()
