"""The shape of a lane's workers, and whether a trial needs a lane at all."""

import contextlib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """What defines a lane's workers; trials of the same shape may share a lane."""

    num_workers: int
    resources: tuple[tuple[str, float], ...]
    """Resources of each worker."""
    strategy: str
    """Placement strategy of the lane's placement group."""
    labels: tuple[tuple[tuple[str, str], ...], ...]
    """Labels that each worker's node must have; empty if there are none."""
    runtime_env: str
    """The workers' runtime environment, as JSON."""


def makes_trainer(driver: Any) -> bool:
    """Return whether a trial's function, or one that it uses, refers to a TorchTrainer.

    If not, the function needs no lane: it trains in the trial's own process.
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
            # Not by `getattr`, because some modules import what they are asked for.
            used += [vars(module).get(name) for name in names]
        pending += filter(callable, used)
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield all names that a code object and the functions inside it use."""
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
