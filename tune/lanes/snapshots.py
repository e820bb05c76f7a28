"""Shallow copies of namespaces and containers, and which of these are no longer as they were.

CPython gives every dict a number that changes whenever the dict does (PEP 509; Python 3.11 and 3.12 have it). Between
two trials some thousand dicts are looked at through it: their 50,000 values would have to come from memory otherwise,
which takes milliseconds. Where a Python has no such number, all are compared.
"""

import collections
import ctypes
import gc
import operator
import types
from typing import Any

CONTAINERS = (
    *(list, dict, set),
    *(collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter),
)
"""The kinds that are copied; not their subclasses, whose methods may do anything."""
_VERSION_OFFSET = 3 * ctypes.sizeof(ctypes.c_void_p)  # behind the reference count, the type and the number of items


class Snapshots:
    """`now` are the objects themselves (dicts, mapping proxies, lists, sets, deques), `kept` are their copies."""

    def __init__(self) -> None:
        self.now: list[Any] = []
        self.kept: list[Any] = []
        self._with_version: list[int] = []
        self._cells: list[ctypes.c_uint64] = []
        self._versions: list[int] = []
        self._compared: list[int] = []

    def add(self, now: Any) -> None:
        """Take a copy of what is there now."""
        index = len(self.now)
        self.now.append(now)
        self.kept.append(copy(now))
        if _HAS_VERSIONS and (cell := _version_of(now)) is not None:
            self._with_version.append(index)
            self._cells.append(cell)
            self._versions.append(cell.value)
        else:
            self._compared.append(index)

    def differing(self) -> list[int]:
        """Indices at which the object is not what was kept of it."""
        found = []
        versions = [cell.value for cell in self._cells]
        if versions != self._versions:
            for place, version in enumerate(versions):
                if version != self._versions[place]:
                    index = self._with_version[place]
                    if _equal(self.now[index], self.kept[index]):
                        self._versions[place] = version
                    else:
                        found.append(index)
        now, kept = [self.now[index] for index in self._compared], [self.kept[index] for index in self._compared]
        try:
            same = list(map(operator.eq, now, kept))
        except Exception:  # an array, say, took the place of another: these have no truth value
            same = list(map(_equal, now, kept))
        return found + [index for index, is_same in zip(self._compared, same, strict=True) if not is_same]

    def changes(self) -> dict[int, Any]:
        """Copies of the objects at those indices."""
        return {index: copy(self.now[index]) for index in self.differing()}

    def absorb(self, before: dict[int, Any]) -> list[int]:
        """Keep what has changed since `before` (as `changes` gave it) as if it had been so at first; returns where."""
        changed = self.differing()
        for index in changed:
            kept = self.kept[index]
            self.kept[index] = with_changes(kept, before.get(index, kept), self.now[index])
        return changed


def copy(now: Any) -> Any:
    """A shallow copy; of a mapping proxy, as a dict."""
    return dict(now) if isinstance(now, types.MappingProxyType) else now.copy()


def with_changes(kept: Any, before: Any, now: Any) -> Any:
    """`kept`, a copy, with all that has changed from `before` to `now`."""
    if isinstance(now, set):
        return (kept | (now - before)) - (before - now)
    if isinstance(now, (list, collections.deque)):
        if len(kept) == len(before) and all(map(operator.is_, kept, before)):
            return now.copy()
        merged = kept.copy()
        if len(now) >= len(before) and all(map(operator.is_, now, before)):
            merged.extend(list(now)[len(before) :])
        return merged
    merged = kept.copy()
    merged.update({key: value for key, value in now.items() if key not in before or before[key] is not value})
    for key in before:
        if key not in now:
            merged.pop(key, None)
    return merged


def _equal(now: Any, kept: Any) -> bool:
    try:
        return bool(now == kept)
    except Exception:
        return False


def _version_of(now: Any) -> ctypes.c_uint64 | None:
    if isinstance(now, types.MappingProxyType):
        [now] = gc.get_referents(now)
    return ctypes.c_uint64.from_address(id(now) + _VERSION_OFFSET) if isinstance(now, dict) else None


def _has_versions() -> bool:
    """Whether the number is where it is looked for."""
    one: dict[str, int] = {"a": 1}
    cell = _version_of(one)
    assert cell is not None
    seen = [cell.value, cell.value]
    one["a"] = 2
    seen.append(cell.value)
    one["b"] = 2
    seen.append(cell.value)
    del one["b"]
    seen.append(cell.value)
    return seen[0] == seen[1] and len(set(seen)) == 4


_HAS_VERSIONS = _has_versions()
