"""What the workers of a lane are like, and whether a trial needs any."""

import contextlib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """What the workers of a lane are; trials with the same one may share it."""

    num_workers: int
    resources: tuple[tuple[str, float], ...]
    """Of each worker."""
    strategy: str
    """Of their placement."""
    labels: tuple[tuple[tuple[str, str], ...], ...]
    """Labels that the node of each worker must have; empty: none."""
    runtime_env: str
    """As JSON: their runtime environment."""


def makes_trainer(driver: Any) -> bool:
    """Whether a trial's function, or one that it names, names a TorchTrainer.

    Else it trains in the trial's process.
    """
    pending = [driver]
    seen = set[int]()
    while pending:
        found: Any = inspect.unwrap(pending.pop())
        function = getattr(found, "func", found)  # of a partial
        if isinstance(function, type) and function.__name__ == "TorchTrainer":
            return True
        code = getattr(function, "__code__", None)
        outside = getattr(function, "__globals__", {})
        if not isinstance(code, types.CodeType) or id(function) in seen:
            continue
        seen.add(id(function))
        names = set(_names(code))
        if "TorchTrainer" in names:
            return True
        used = [outside[name] for name in names & outside.keys()]
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # it is empty
                used.append(cell.cell_contents)
        for module in filter(inspect.ismodule, list(used)):
            # Without asking those that import what they are asked for.
            used += [vars(module).get(name) for name in names]
        pending += filter(callable, used)
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    """All names that code uses, and that of functions inside it."""
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
