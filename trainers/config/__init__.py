"""Configuration: YAML to a checked model, and the reference of its keys."""

from trainers.config.train import TrainConfig

__all__ = ["TrainConfig"]
