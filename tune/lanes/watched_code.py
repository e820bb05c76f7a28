"""Functions, methods and classes of torch, numpy, Python and our own that a trial must not have exchanged."""

import contextlib
import sys
import types
from typing import Any

from tune.lanes.module_state import by_torch, is_code, is_of_strangers
from tune.lanes.snapshots import Snapshots

_MODULES = frozenset(
    [
        *("builtins", "collections", "contextlib", "copy", "functools", "itertools", "json", "math", "operator", "os"),
        *("os.path", "pickle", "random", "statistics", "subprocess", "threading", "time", "warnings"),
        *("numpy", "numpy.random", "numpy.linalg", "numpy.fft"),
        *("torch", "torch.functional", "torch.random", "torch.serialization", "torch.storage"),
    ]
)
_PACKAGES = (
    *("torch.amp", "torch.autograd", "torch.cuda", "torch.distributed", "torch.fft", "torch.linalg", "torch.nn"),
    *("torch.optim", "torch.special", "torch.utils.checkpoint", "torch.utils.data", "trainers"),
)
"""These, with all public modules below them that were imported."""
_NOT_BELOW = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.elastic",
    "torch.distributed.rpc",
)
_CONSTANTS = (int, float, complex, str, bytes)
_MISSING = object()


class WatchedCode:
    """What the namespaces of these modules, and of their classes, held at first."""

    def __init__(self) -> None:
        self._owners = _owners()
        self._snapshots = Snapshots()
        for owner in self._owners:
            self._snapshots.add(vars(owner))

    def read(self) -> dict[int, dict[str, Any]]:
        """Copies of what is not as it was."""
        return self._snapshots.changes()

    def absorb(self, before: dict[int, dict[str, Any]]) -> None:
        """What has changed since `before` (as `read` gave it) was done by an import, and stays."""
        self._snapshots.absorb(before)

    def restore(self) -> list[str]:
        """Put back what was exchanged, and take away what was added; returns what cannot be, in words."""
        left = []
        for index in self._snapshots.differing():
            owner, now, kept = self._owners[index], self._snapshots.now[index], self._snapshots.kept[index]
            for name in _spoilt(owner, now, kept):
                with contextlib.suppress(AttributeError, TypeError):
                    if name in kept:
                        setattr(owner, name, kept[name])
                    else:
                        delattr(owner, name)
            left += [f"{owner.__name__}.{name} is another" for name in _spoilt(owner, now, kept)]
            self._snapshots.kept[index] = dict(now)  # what torch itself has set since
        return left


def _owners() -> list[Any]:
    modules = [module for name, module in list(sys.modules.items()) if _is_watched(name) and module is not None]
    classes = {
        value: None
        for module in modules
        for value in list(vars(module).values())
        if issubclass(type(value), type) and value.__module__.partition(".")[0] in ("torch", "trainers")
    }
    return [*modules, *classes]


def _is_watched(name: str) -> bool:
    if name in _MODULES:
        return True
    is_below = any(name == package or name.startswith(f"{package}.") for package in _PACKAGES)
    return is_below and "._" not in name and not name.startswith(_NOT_BELOW)


def _spoilt(owner: Any, now: Any, kept: dict[str, Any]) -> list[str]:
    """Names whose code is not what it was, constants that have another value, and what strangers have added."""
    is_class = issubclass(type(owner), type)
    changed = [
        name
        for name, value in kept.items()
        if now.get(name, _MISSING) is not value and not by_torch(name, now.get(name)) and _is_fixed(name, value, now)
    ]
    for name, value in now.items():
        if name in kept or by_torch(name, value):
            continue
        if is_class:
            is_data = not is_code(value) and not name.startswith("_")
            changed += [name] if is_data or type(value) is types.FunctionType or is_of_strangers(value) else []
        elif not issubclass(type(value), types.ModuleType) and (not is_code(value) or is_of_strangers(value)):
            changed.append(name)
    return changed


def _is_fixed(name: str, value: Any, now: Any) -> bool:
    """Whether nobody but a stranger changes it: torch itself keeps flags and caches, which begin with `_`."""
    return is_code(value) or (type(value) in _CONSTANTS and not name.startswith("_") and now.get(name) != value)
