"""Configuration: from YAML to validated settings, with a description of each key."""

from trainers.config.train import TrainConfig

__all__ = ["TrainConfig"]
