"""Train one PyTorch task: `from trainers import Task, train`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.config import TrainConfig
    from trainers.start import train
    from trainers.task import Task

__all__ = ["Task", "TrainConfig", "train"]

_HOMES = {
    "Task": "trainers.task",
    "TrainConfig": "trainers.config",
    "train": "trainers.start",
}


def __getattr__(name: str) -> Any:
    """Import a public name only when it is used: `import trainers` loads no torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
