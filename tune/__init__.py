"""Many training runs: `from tune import sweep` sweeps batch size, precision and any other configuration key."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tune.sweeps.sweep import sweep

__all__ = ["sweep"]


def __getattr__(name: str) -> Any:
    """Import the public name only when it is used: `import tune` alone imports no Ray."""
    if name in __all__:
        return getattr(importlib.import_module("tune.sweeps.sweep"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
