"""The types of those parts of a cluster file that are read here and that no schema checks before: rules see typed data.

A shape is a mapping of keys to shapes ("*": any key), a list of the one shape of its items, a tuple of a shape of
which there may be one or a list, or a name of `_LEAVES`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from cluster.files.cluster_file import join
from trainers.errors import ConfigError

Shape = Mapping[str, "Shape"] | list["Shape"] | tuple["Shape"] | str

MOST_NODES = 100_000
"""Of one node type, and of a cluster: far beyond what Ray runs, and still cheap to count."""
_LEAVES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text": (lambda value: isinstance(value, str), "must be text"),
    "flag": (lambda value: isinstance(value, bool), "must be true or false"),
    "whole": (lambda value: type(value) is int, "must be a whole number"),
    # What is below 0 has a sentence of its own in a `ray up` file.
    "nodes": (lambda value: type(value) is int and value <= MOST_NODES, f"must be a whole number up to {MOST_NODES}"),
    "count": (
        lambda value: type(value) is int and 0 <= value <= MOST_NODES,
        f"must be a whole number of at least 0 and at most {MOST_NODES}",
    ),
    "quantity": (
        lambda value: re.fullmatch(r"\d{1,7}(?:\.\d{1,6})?m?", str(value)) is not None,
        "must be a number of CPUs or GPUs",
    ),
    "scalar": (lambda value: not isinstance(value, dict | list), "must be a single value"),
}


def check_shape(value: Any, shape: Shape, field: str, how_to_write: str, source: str | None = None) -> None:
    """Raise ConfigError for the first part that is of another type; what is null, or not there, passes."""
    if value is None:
        return
    if isinstance(shape, tuple):
        check_shape(value, [shape[0]] if isinstance(value, list) else shape[0], field, how_to_write, source)
        return
    parts: list[tuple[Any, Any, Shape]] = []
    if isinstance(shape, str):
        fits, rule = _LEAVES[shape]
    elif isinstance(shape, list):
        fits, rule = (lambda value: isinstance(value, list) and None not in value), "must be a list without gaps"
        parts = [(index, part, shape[0]) for index, part in enumerate(value)] if isinstance(value, list) else []
    else:
        assert isinstance(shape, Mapping)
        fits, rule, rest = (lambda value: isinstance(value, dict)), "must be a mapping", shape.get("*")
        found = value.items() if isinstance(value, dict) else ()
        parts = [(key, part, known) for key, part in found if (known := shape.get(key, rest)) is not None]
    if not fits(value):
        raise ConfigError(field or "the file", value, rule, how_to_write, source)
    for key, part, known in parts:
        check_shape(part, known, join(field, key), how_to_write, source)
