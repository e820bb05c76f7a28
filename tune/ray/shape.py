"""What the workers of a lane are like, and a guess at it before the trial that says so
runs.
"""

import ast
import contextlib
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
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


def makes_trainer(driver: Callable[..., Any]) -> bool:
    """Whether a trial's function, or one that it names, names a TorchTrainer; else it
    trains in the trial's process.
    """
    pending = [driver]
    seen = set[int]()
    while pending:
        one: Any = inspect.unwrap(pending.pop())
        one = getattr(one, "func", one)  # of a partial
        if isinstance(one, type) and one.__name__ == "TorchTrainer":
            return True
        code = getattr(one, "__code__", None)
        outside = getattr(one, "__globals__", {})
        if not isinstance(code, types.CodeType) or id(one) in seen:
            continue
        seen.add(id(one))
        names = set(_names(code))
        if "TorchTrainer" in names:
            return True
        found = [outside[name] for name in names & outside.keys()]
        for cell in getattr(one, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # it is empty
                found.append(cell.cell_contents)
        # Without asking modules that import what they are asked for.
        of_modules = [
            vars(each).get(name)
            for each in found
            if inspect.ismodule(each)
            for name in names
        ]
        pending += filter(callable, [*found, *of_modules])
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    """All names that code uses, and that of functions inside it."""
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def likely_scaling(driver: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of the ScalingConfig that a trial's function makes, read
    from its source without running it.

    Returns: Empty where the source makes none, or where an argument is neither a
        literal nor a name from outside.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(driver)))
        outside = inspect.getclosurevars(driver)
    except (
        OSError,
        TypeError,
        SyntaxError,
        ValueError,
    ):  # there is no source, or an empty cell
        return {}
    names = {**outside.globals, **outside.nonlocals}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] == "ScalingConfig"
        ):
            return _arguments(node, names)
    return {}


def _arguments(call: ast.Call, names: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        try:
            value = (
                names[keyword.value.id]
                if isinstance(keyword.value, ast.Name)
                else ast.literal_eval(keyword.value)
            )
        except (KeyError, ValueError):
            return {}
        if keyword.arg is None:
            found.update(value)  # **SCALING
        else:
            found[keyword.arg] = value
    return found
