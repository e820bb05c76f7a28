"""Remember what Python objects hold, to find out later what has changed."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    np.generic,
    torch.dtype,
    torch.device,
    torch.Size,
)

Read = Callable[[Any], dict[Any, Any]]


@dataclass(frozen=True)
class _Held:
    """The items that one object had, and the function that reads its present ones."""

    name: str
    owner: Any
    read: Read
    before: dict[Any, Any]
    beside: bool


class Changes:
    """Remembers the items of objects, and names the first that has changed."""

    def __init__(self) -> None:
        self._held: list[_Held] = []

    def hold(
        self, name: str, owner: Any, read: Read, beside: bool
    ) -> dict[Any, Any]:
        """Remember what `read` returns for the owner now, and return it.

        `beside` marks what no step reads: random generators, data, metrics and
        schedulers.
        """
        before = read(owner)
        self._held.append(_Held(name, owner, read, before, beside))
        return before

    def first(self, for_step: bool = False) -> str | None:
        """Name the first change, or return None.

        With `for_step`, items marked `beside` are skipped: they change between
        steps, but a step reads only the batches and learning rates that they
        give.
        """
        for held in self._held:
            if for_step and held.beside:
                continue
            now = held.read(held.owner)
            if is_same(now, held.before):
                continue
            for key in held.before.keys() | now.keys():
                old = held.before.get(key)
                new = now.get(key)
                is_plain = isinstance(old, PLAIN) and isinstance(new, PLAIN)
                if old is not new and not (is_plain and old == new):
                    return path_of(held.name, key).replace("._modules.", ".")
        return None


def path_of(name: str, key: Any) -> str:
    """Return an item's name; only text and integer keys become part of it."""
    is_named = key != "" and isinstance(key, str | int)
    return f"{name}.{key}" if is_named else name


def is_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether both have the same keys in the same order, with the same objects."""
    if not now and not before:  # as for most of a module's dicts of hooks
        return True
    is_alike = list(now) == list(before)
    return is_alike and all(map(operator.is_, now.values(), before.values()))
