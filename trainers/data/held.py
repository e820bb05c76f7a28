"""What an object holds: whether it has changed since another process got its copy."""

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

_DEEPEST = 6
"""Objects in objects: a subset, its dataset, its transforms, one of them, its settings.
"""
_MOST = 10_000
_MOST_OF_ONE = 100
_SMALL_BYTES = 1 << 20
_PLAIN = (bool, int, float, str, bytes)


def held_by(*things: Any) -> list[Any]:
    """Return the things, their attributes and items, and those of these; and of tensors
    how often they were written to.

    Of models, classes and modules nothing but themselves; nothing of what a function or
    a large array holds.
    """
    return list(
        islice(chain.from_iterable(_held(thing, _DEEPEST) for thing in things), _MOST)
    )


def are_same(before: list[Any], now: list[Any]) -> bool:
    """Whether nothing of what `held_by` gave has changed."""
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(
        a is b or (isinstance(a, _PLAIN) and a == b) for a, b in pairs
    )


def _held(thing: Any, deeper: int) -> Iterator[Any]:
    yield thing
    if isinstance(thing, Tensor) and not thing.is_inference():
        yield thing._version
    if isinstance(thing, np.ndarray) and thing.nbytes <= _SMALL_BYTES:
        yield hash(thing.tobytes())
    if not deeper or isinstance(thing, (*_PLAIN, Tensor, nn.Module, type, ModuleType)):
        return
    items: Any = (
        thing.__self__.__dict__
        if inspect.ismethod(thing)
        else getattr(thing, "__dict__", ())
    )
    if isinstance(thing, (list, tuple, dict)):
        items = thing
        with contextlib.suppress(Exception):  # where something in it is not hashable
            yield hash((*thing.items(),) if isinstance(thing, dict) else (*thing,))
    if isinstance(items, Mapping):
        items = items.values()
    for part in islice(items, _MOST_OF_ONE):
        yield from _held(part, deeper - 1)
