"""Check the parts and the position of a loaded state before any of it is applied.

Checksums prove that a checkpoint is what was written; these checks prove that
what was written is a run's state.
"""

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.errors import MISSING, CheckpointError, ConfigError
from trainers.model.sharding import is_shard
from trainers.storage import validated

_SECTIONS = {"model", "optimizer", "scaler", "task", "position"}
_OPTIONAL = {"beside", "ema", "frozen", "schedule", "switched"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, dict)
State = dict[str, Any]
"""A state_dict, or a part of one."""
Place = tuple[Any, ...]
"""The keys that lead to a part of nested data."""


@dataclass(frozen=True)
class StreamPlace:
    """A stream's own state, from which trainers/data/stream.py can resume."""

    row: int
    passes: int
    in_pass: int
    state: Any
    next: list[str]
    trail: str = ""
    """Digest of the samples before `row`."""


@dataclass(frozen=True)
class Position:
    """Where a run was when it wrote a checkpoint."""

    step: int
    global_batch_size: int
    train_samples: int
    """0 for a stream, whose length is unknown."""
    train_time_s: float
    metrics: dict[str, float]
    """Values may be non-finite: an evaluation may have diverged."""
    evaluated_step: int
    total_steps: int = 0
    order: str = ""
    """The name of the order of samples in the epoch of `step`."""
    samples: str = ""
    """Digest of a few training samples."""
    held_back: str = ""
    """Digest of a few validation samples."""
    stopping: dict[str, int | float | str | None] = field(default_factory=dict)
    """The state of early stopping; empty in runs without it."""
    stream: StreamPlace | None = None
    """A stream's own state, if it has an exact one."""
    stream_mark: tuple[int, str] | None = None
    """A Mark of a stream (trainers/data/stream.py)."""
    batch_sizes: list[tuple[int | None, int]] = field(default_factory=list)
    """The sizes of a batch schedule; empty if the size does not change."""
    reported: list[dict[str, float]] = field(default_factory=list)
    """Evaluations of a run that stores nothing else."""
    window: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Sums of losses since the last window of the log, each with its number of
    steps; empty if a regular window ended here.
    """


def check_state(state: State, name: str) -> Position:
    """Check the state of checkpoint `name`, and return its position.

    Raises CheckpointError if it is not the state of a run.

    The task's own part is not checked.
    """
    if wrong := sorted(_SECTIONS ^ (set(map(str, state)) - _OPTIONAL)):
        raise CheckpointError(
            f"it is not a Paceline checkpoint: its state {'lacks' if wrong[0] in _SECTIONS else 'has'} `{wrong[0][:80]}`"
        )
    for section in sorted(set(state) - {"task"}):
        if not isinstance(state[section], dict):
            raise CheckpointError(f"its {section} is not a mapping")
        check_plain(state[section], section)
    position = validated(state["position"], Position)
    if name != f"step-{position.step:012d}":
        raise CheckpointError(
            f"it holds step {position.step}, not the step of its name"
        )
    return position


def check_plain(tree: Any, what: str) -> None:
    """Raise CheckpointError unless every tensor in nested data is dense and on the host.

    Tensors on the meta device are accepted: they stand for tensors in other
    files.
    """
    try:
        for _, tensor in tensors_in(tree):
            if tensor.device.type not in ("cpu", "meta") or not is_dense(
                tensor
            ):
                raise CheckpointError(
                    f"its {what} holds a tensor that is not a dense CPU tensor"
                )
    except RecursionError:
        raise CheckpointError(f"its {what} is nested too deeply") from None


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is neither sparse nor quantized nor of a library's subclass."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized
    return plain and type(tensor) in (Tensor, torch.nn.Parameter)


def tensors_in(tree: Any, path: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """Yield the tensors of nested data in order, each with its place."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors_in(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from tensors_in(value, (*path, index))


def map_tree(
    function: Callable[[Tensor, Place], Any],
    tree: Any,
    path: Place = (),
    leaf: Callable[[Any, Place], Any] = lambda value, _: value,
) -> Any:
    """Return the same nesting with each tensor replaced.

    Args:
        function: Takes a tensor and its place, and returns what replaces it.
        tree: Nested data.
        path: The place of `tree` in a larger nesting.
        leaf: Takes any other value (also a key, or an emptied dict) and its
            place, and returns what replaces it.
    """
    if isinstance(tree, Tensor):
        return function(tree, path)
    if isinstance(tree, dict):
        # A copy keeps attributes; one of a state_dict's attributes contains
        # the versions of modules.
        copied = copy.copy(tree)
        copied.clear()
        copied = leaf(copied, path)
        for key, value in tree.items():
            place = (*path, key)
            kept = map_tree(function, key, place, leaf)
            copied[kept] = map_tree(function, value, place, leaf)
        return copied
    if type(tree) in (list, tuple):
        return type(tree)(
            map_tree(function, value, (*path, index), leaf)
            for index, value in enumerate(tree)
        )
    return leaf(tree, path)


def loadable(tree: Any, owner: str) -> Any:
    """Return the same nesting with Python's numbers in place of numpy's.

    Raises ConfigError for what could not be loaded from a checkpoint.
    """

    def plain(value: Any, path: Place) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if not _loads(value):
            raise ConfigError(
                owner,
                MISSING,
                f"holds `{'.'.join(map(str, path))}` ({type(value).__name__}), which is neither plain data nor a dense tensor, and could not be loaded safely",
                "use numbers, text, lists, dicts and dense tensors, and register a buffer that model() computes anew with `persistent=False`",
            )
        return value

    return map_tree(plain, tree, leaf=plain)


def _loads(value: Any) -> bool:
    if isinstance(value, Tensor):
        return is_dense(value) or is_shard(value)
    if type(value) in _PLAIN:
        return True
    data = io.BytesIO()
    try:
        torch.save(value, data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception:
        return False
    return True


def check_dtypes(saved: State, now: State) -> None:
    """Raise CheckpointError if a model's tensor was saved as another kind of number.

    Another width is accepted: a model may be evaluated in another precision
    than it was trained in.
    """
    for name, ours in now.items():
        theirs = saved.get(name)
        if not isinstance(ours, Tensor) or theirs is None:
            continue
        saved_kind = _kind(theirs)
        if saved_kind != _kind(ours):
            words = f"{name} is {saved_kind}, not {_kind(ours)}"
            raise CheckpointError(f"it does not fit this model: {words}")


def _kind(value: Any) -> str:
    """Return the kind of a tensor's numbers; all floating-point widths are one kind."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.dtype.is_floating_point:
        return "floating-point"
    return str(value.dtype).removeprefix("torch.")
