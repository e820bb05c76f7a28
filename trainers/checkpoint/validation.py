"""Check the types, shapes and ranges of a loaded state before any of it is applied.

Checksums prove that a checkpoint is what was written; these checks, that what was
written fits. torch itself checks a model's names and shapes when it loads them, but not
an optimizer's: fused steps read moments by address, and a moment of another shape than
its parameter would crash the process.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from numbers import Real
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from trainers.devices.device import get_rng_state, set_rng_state
from trainers.errors import CheckpointError, first_line
from trainers.model.optimizer import optimizers_of
from trainers.storage import validated

_SECTIONS = {"model", "optimizer", "scaler", "task", "position"}
_OPTIONAL = {"beside", "ema", "frozen", "schedule", "switched"}
_MOST_DEPTH = 100
_MOST_PARTS = 4_000_000
State = dict[str, Any]
"""A state_dict, or a part of one."""
Place = tuple[Any, ...]
"""The keys that lead to a part of nested data."""
_Count = Annotated[int, Field(ge=0, lt=10**12)]
_MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}
)
"""Moments that fused steps read by address: each must have its parameter's shape."""


@dataclass(frozen=True)
class StreamPlace:
    """A stream's own state, from which trainers/data/stream.py can resume."""

    row: _Count
    passes: _Count
    in_pass: _Count
    state: Any
    next: list[str]
    trail: str = ""
    """Digest of the samples before `row`."""


@dataclass(frozen=True)
class Position:
    """Where a run was when it wrote a checkpoint."""

    step: _Count
    global_batch_size: Annotated[int, Field(ge=1)]
    train_samples: Annotated[int, Field(ge=0)]
    """0 for a stream, whose length is unknown."""
    train_time_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    metrics: dict[str, float]
    """Values may be non-finite: an evaluation may have diverged."""
    evaluated_step: Annotated[int, Field(ge=-1, lt=10**12)]
    total_steps: _Count = 0
    order: str = ""
    """The name of the order of samples in its epoch."""
    samples: str = ""
    """Digest of a few training samples."""
    held_back: str = ""
    """Digest of a few validation samples."""
    stopping: dict[str, int | float | str | None] = field(default_factory=dict)
    """The state of early stopping; empty in runs without it."""
    stream: StreamPlace | None = None
    """A stream's own state, if it has an exact one."""
    stream_mark: tuple[_Count, str] | None = None
    """Digest of a stream's samples up to a row."""
    batch_sizes: list[
        tuple[Annotated[int, Field(ge=1)] | None, Annotated[int, Field(ge=1)]]
    ] = field(default_factory=list)
    """The sizes of a batch schedule; empty if the size does not change."""
    reported: list[dict[str, float]] = field(default_factory=list)
    """Evaluations of a run that stores nothing else."""
    window: dict[str, tuple[float, _Count]] = field(default_factory=dict)
    """Sums of losses since the last window of the log, each with its number of steps;
    empty if a regular window ended here.
    """


def check_state(state: State, name: str, has_rows: bool = False) -> Position:
    """Check the state of checkpoint `name`, and return its position.

    Raises CheckpointError if it is not the state of a run.

    The task's own part is left to the task. With `has_rows`, tensors on the meta device
    stand for tensors in other files.
    """
    if wrong := sorted(_SECTIONS ^ (set(map(str, state)) - _OPTIONAL)):
        raise CheckpointError(
            f"it is no checkpoint of ours: it has {'no' if wrong[0] in _SECTIONS else 'a'} {wrong[0][:80]}"
        )
    for section in sorted(set(state) - {"task"}):
        if not isinstance(state[section], dict):
            raise CheckpointError(f"its {section} is no mapping")
        check_plain(state[section], section, has_rows)
    position = validated(state["position"], Position)
    if name != f"step-{position.step:012d}":
        raise CheckpointError(f"its position is step {position.step}")
    return position


def check_plain(tree: Any, what: str, has_rows: bool = False) -> None:
    """Raise CheckpointError if a tensor in nested data is not dense and on the host.

    With `has_rows`, tensors on the meta device are accepted too.
    """
    for _, tensor in tensors_in(tree, what):
        here = tensor.device.type == "cpu" or (tensor.is_meta and has_rows)
        if not here or not is_dense(tensor):
            raise CheckpointError(f"its {what} holds a tensor that is not a dense one")


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is neither sparse, quantized nor of a class of its own."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized
    return plain and type(tensor) in (Tensor, torch.nn.Parameter)


def tensors_in(tree: Any, what: str) -> Iterator[tuple[Place, Tensor]]:
    """Yield the tensors of nested data with their places in it, in order.

    Raises CheckpointError if the nesting is too deep or too large.
    """
    waiting: list[tuple[Place, Any]] = [((), tree)]
    parts = 0
    while waiting:
        path, value = waiting.pop()
        parts += 1
        if len(path) > _MOST_DEPTH or parts > _MOST_PARTS:
            raise CheckpointError(f"its {what} is nested without end")
        if isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, (dict, list, tuple)):
            inner = [*(value.items() if isinstance(value, dict) else enumerate(value))]
            nested = [
                ((*path, key), item)
                for key, item in inner
                if isinstance(item, (Tensor, dict, list, tuple))
            ]
            waiting += reversed(nested)


def map_tree(
    function: Callable[[Tensor, Place], Any],
    tree: Any,
    path: Place = (),
    leaf: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Return the same nesting with each tensor replaced.

    Args:
        function: Takes a tensor and its place, and returns what replaces it.
        tree: Nested data.
        path: The place of `tree` in a larger one.
        leaf: What becomes of anything else.
    """
    if isinstance(tree, Tensor):
        return function(tree, path)
    if isinstance(tree, dict):
        # With its attributes: a state_dict carries versions of its modules in one.
        copied = copy.copy(tree)
        for key, value in tree.items():
            copied[key] = map_tree(function, value, (*path, key), leaf)
        return copied
    if type(tree) in (list, tuple):
        return type(tree)(
            map_tree(function, value, (*path, index), leaf)
            for index, value in enumerate(tree)
        )
    return leaf(tree)


def plain_numbers(tree: Any) -> Any:
    """Return the same nesting with Python's numbers in place of numpy's.

    A checkpoint that holds numpy's cannot be loaded.
    """

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, np.generic) else value

    return map_tree(lambda tensor, _: tensor, tree, leaf=plain)


def check_dtypes(saved: State, now: State) -> None:
    """Raise CheckpointError if a model's tensor changed its kind of number.

    Another width is accepted: a model may be evaluated in another precision than it was
    trained in.
    """
    for name, ours in now.items():
        theirs = saved.get(name)
        if not isinstance(ours, Tensor) or theirs is None:
            continue
        saved_kind = _kind(theirs)
        if saved_kind != _kind(ours):
            words = f"{name} is {saved_kind}, not {_kind(ours)}"
            raise CheckpointError(f"it does not fit this model: {words}")


def check_optimizer(saved: State, optimizer: Optimizer) -> None:
    """Raise CheckpointError unless `saved` is a valid state for this optimizer."""
    groups: Any = saved.get("param_groups")
    state: Any = saved.get("state")
    count = len(optimizer.param_groups)
    is_state = isinstance(groups, list) and isinstance(state, dict)
    if not is_state or len(groups) != count:
        words = f"it does not fit this optimizer, which has {count} groups"
        raise CheckpointError(words)
    parameters: dict[int, Tensor] = {}
    of_torch: set[int] = set()
    for theirs, (owner, ours) in zip(groups, _owned(optimizer), strict=True):
        numbers = theirs.get("params") if isinstance(theirs, dict) else None
        first = len(parameters)
        if numbers != list(range(first, first + len(ours["params"]))):
            raise CheckpointError(
                "it does not fit this model: its optimizer is one of other parameters"
            )
        for name, value in ours.items():
            if (
                name != "params"
                and name in theirs
                and not _is_like(theirs[name], value)
            ):
                raise CheckpointError(
                    f"it does not fit this optimizer: its {name} is {_shown(theirs[name])}"
                )
        parameters |= dict(zip(numbers, ours["params"], strict=True))
        if _is_torchs(
            owner
        ):  # what others keep, and in which shape, only their code knows
            of_torch |= set(numbers)
    for number, entries in state.items():
        if (
            type(number) is not int
            or number not in parameters
            or not isinstance(entries, dict)
        ):
            raise CheckpointError(
                f"it does not fit this optimizer: {_shown(number)} is none of its parameters"
            )
        if number in of_torch:
            _check_moments(entries, parameters[number], number)


def _owned(optimizer: Optimizer) -> Iterator[tuple[Optimizer, Any]]:
    """Yield each optimizer with each of its groups."""
    for owner in optimizers_of(optimizer):
        for group in owner.param_groups:
            yield owner, group


def _is_torchs(optimizer: Optimizer) -> bool:
    kinds = (kind for kind in type(optimizer).__mro__ if kind is not Optimizer)
    return any(kind.__module__.startswith("torch.optim.") for kind in kinds)


def _check_moments(entries: State, parameter: Tensor, number: int) -> None:
    """Raise CheckpointError for moments that a fused step would read out of bounds."""
    where = f"it does not fit this optimizer: parameter {number}"
    if "step" in entries and _number(entries["step"]) is None:
        raise CheckpointError(f"{where} has the step {_shown(entries['step'])}")
    for name in _MOMENTS & entries.keys():
        value = entries[name]
        if value is None:  # of SGD without momentum
            continue
        is_like = isinstance(value, Tensor) and value.shape == parameter.shape
        if not is_like or value.is_complex() != parameter.is_complex():
            found = list(value.shape) if isinstance(value, Tensor) else _shown(value)
            raise CheckpointError(
                f"{where} has {name} of {found}, not {list(parameter.shape)}"
            )


def check_scaler(saved: State, now: State) -> None:
    """Raise CheckpointError unless `saved` is a valid state for this loss scaler.

    `now` is the scaler's present state.
    """
    for name in saved.keys() | now.keys():
        theirs = saved.get(name)
        ours = now.get(name)
        value = _number(theirs) if type(theirs) is type(ours) else None
        least = 0 if name == "_growth_tracker" else sys.float_info.min
        if value is None or not least <= value < math.inf:
            raise CheckpointError(
                f"it does not fit this loss scaler: {_shown(name)} is {_shown(theirs)}"
            )


def check_rng_state(saved: State, device: torch.device) -> None:
    """Raise CheckpointError unless the random generators here accept `saved`.

    They are tried, and restored afterwards.
    """
    check_plain(saved, "random state")
    before = get_rng_state(device)
    try:
        if (
            not 0 <= saved["numpy"]["pos"] <= 624
        ):  # numpy itself would read beyond its state
            raise ValueError("the position in numpy's state is beyond its end")
        set_rng_state(dict(saved), device)
    except Exception as error:
        raise CheckpointError(
            f"its random state is none: {first_line(error)}"
        ) from None
    finally:
        set_rng_state(before, device)


def _is_like(theirs: Any, ours: Any) -> bool:
    """Whether a saved option of a group is valid in place of the present one."""
    if isinstance(ours, (list, tuple)):
        are = isinstance(theirs, (list, tuple)) and len(theirs) == len(ours)
        return are and all(map(_is_like, theirs, ours))
    if ours is None or isinstance(ours, bool):
        return ours is None or theirs is None or isinstance(theirs, bool)
    if (now := _number(ours)) is not None:
        return (value := _number(theirs)) is not None and (
            math.isfinite(value) or not math.isfinite(now)
        )
    return isinstance(theirs, type(ours))


def _shown(value: Any) -> str:
    """Return an untrusted value as short text for a message."""
    try:
        return " ".join(str(value).split())[:80]
    except ValueError:  # a whole number of thousands of digits
        return type(value).__name__


def _number(value: Any) -> float | None:
    """Return a real number, or a scalar tensor's, as float; None for anything else."""
    is_real = isinstance(value, Real) or (
        isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex()
    )
    try:
        if is_real:
            return float(value)
        return None
    except OverflowError:
        return math.inf


def _kind(value: Any) -> str:
    """Return the kind of a tensor's numbers; all floating-point widths are one kind."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.dtype.is_floating_point:
        return "floating-point"
    return str(value.dtype).removeprefix("torch.")
