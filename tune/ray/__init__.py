"""Ray's Tuner and TorchTrainer over lanes: the same names, arguments and results, from another import (Ray)."""

from tune.ray.trainer import TorchTrainer
from tune.ray.tuner import Tuner

__all__ = ["TorchTrainer", "Tuner"]
