"""Read JSON back, whoever wrote it: as a type, within limits."""

import functools
import json
import math
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from trainers.errors import CheckpointError, first_line

T = TypeVar("T")

_MOST_DEPTH = 100  # what copies or writes it again recurses


def parse_json(data: bytes, kind: type[T], finite: bool = True) -> T:
    """What JSON holds, as `kind`; `finite`: neither NaN nor an infinity.

    Raises CheckpointError. A dataclass takes no keys but its own.
    """
    numbers: dict[str, Any] = (
        {"parse_float": _finite, "parse_constant": _finite} if finite else {}
    )
    try:
        tree = json.loads(data.decode(), parse_int=_whole, **numbers)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is no JSON ({first_line(error)})") from None
    level = [tree]
    depth = 0
    while level:
        depth += 1
        if depth > _MOST_DEPTH:
            raise CheckpointError(f"it is nested more than {_MOST_DEPTH} deep")
        inner = (
            one.values() if isinstance(one, dict) else one
            for one in level
            if isinstance(one, (dict, list))
        )
        level = [
            child
            for children in inner
            for child in children
            if isinstance(child, (dict, list))
        ]
    known = {one.name for one in fields(kind)} if is_dataclass(kind) else set()
    if known and isinstance(tree, dict) and (unknown := sorted(tree.keys() - known)):
        raise CheckpointError(f"it has an unknown key, {unknown[0][:80]!r}")
    return validated(tree, kind)


def validated(value: Any, kind: type[T]) -> T:
    """Return plain data as `kind`; CheckpointError names the first wrong part."""
    try:
        found: T = _adapter(kind).validate_python(value)  # type: ignore[arg-type]
    except ValidationError as error:
        problem = error.errors(
            include_url=False, include_input=False, include_context=False
        )[0]
        where = ".".join(map(str, problem["loc"])) or "it"
        raise CheckpointError(
            f"{where[:80]!r}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"
        ) from None
    return found


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _whole(text: str) -> int:
    if len(text) > 300:
        raise ValueError("a whole number in it is larger than any float")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no number of JSON")
    return value
