"""Everything of trainers that imports Ray. Importing it sets what Ray reads from the environment, before Ray."""

from trainers.on_ray.environment import set_environment

set_environment()
