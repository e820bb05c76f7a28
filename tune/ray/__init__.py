"""Drop-in replacements for Ray's Tuner and TorchTrainer that use lanes (Ray).

Only the import changes: names, arguments and results are the same.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tune.ray.trainer import TorchTrainer
    from tune.ray.tuner import Tuner

__all__ = ["TorchTrainer", "Tuner"]


def __getattr__(name: str) -> Any:
    """Import a name only when it is used: the pool's process needs no torch."""
    if name in __all__:
        return getattr(
            importlib.import_module(
                f"tune.ray.{'trainer' if name == 'TorchTrainer' else 'tuner'}"
            ),
            name,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
