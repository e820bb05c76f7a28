"""Many training runs: sweep batch size, precision and any other configuration key.

`sweep` runs a sweep, `extend` continues one, and `steer` changes a running
one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tune.sweeps.steer import steer
    from tune.sweeps.sweep import extend, sweep

__all__ = ["extend", "steer", "sweep"]


def __getattr__(name: str) -> Any:
    """Import a public name only when it is used, so that `import tune` imports no Ray."""
    if name in __all__:
        module = "steer" if name == "steer" else "sweep"
        return getattr(importlib.import_module(f"tune.sweeps.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
