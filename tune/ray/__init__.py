"""Ray's Tuner and TorchTrainer over lanes (Ray).

The same names, arguments and results, from another import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tune.ray.trainer import TorchTrainer
    from tune.ray.tuner import Tuner

__all__ = ["TorchTrainer", "Tuner"]


def __getattr__(name: str) -> Any:
    """Import the names when they are used: the pool's process needs no torch."""
    if name in __all__:
        return getattr(
            importlib.import_module(
                f"tune.ray.{'trainer' if name == 'TorchTrainer' else 'tuner'}"
            ),
            name,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
