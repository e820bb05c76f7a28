"""`--dotted.key value` overrides of a configuration file."""

import copy
import itertools
from collections.abc import Mapping
from typing import Any

from trainers.config.model import Settings, Tree, child_model
from trainers.config.yaml import DEEPEST, MOST_VALUES
from trainers.errors import MISSING, ConfigError

# A sweep's own file holds two of these, in each other.
_DEEPEST = DEEPEST - 16
_MOST_VALUES = MOST_VALUES // 2


def set_key(tree: Tree, dotted: str, value: Any) -> None:
    """Set `dotted` in a nested mapping, in place, making the mappings on the way."""
    *path, last = dotted.split(".")
    node = tree
    for part in path:
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            rule = f"cannot go below `{part}`, which is not a mapping"
            raise ConfigError(dotted, value, rule, f"set `{part}` whole")
    node[last] = value


def override(model: type[Settings], tree: Tree, overrides: Mapping[str, Any]) -> Tree:
    """Return a copy of `tree` with dotted overrides applied.

    Setting one key of an exclusive group drops the others.

    Raises ConfigError for what could not be read again from the file that a run keeps
    of it.
    """
    result = copy.deepcopy(tree)
    for dotted, value in overrides.items():
        *path, leaf = dotted.split(".")
        owner: type[Settings] | None = model
        node: Any = result
        for part in path:
            owner = child_model(owner, part)
            node = node.get(part) if isinstance(node, dict) else None
        groups = owner.exclusive if owner and isinstance(node, dict) else ()
        for other in itertools.chain(*(group for group in groups if leaf in group)):
            # Where both were asked for: an error to come.
            if ".".join([*path, other]) not in overrides:
                node.pop(other, None)
        set_key(result, dotted, value)
    _check_size(result)
    return result


def _check_size(tree: Tree) -> None:
    layer: list[Any] = [tree]
    levels = 0
    values = 0
    while layer:
        parts: list[Any] = []
        for node in layer:
            parts += node.values() if isinstance(node, dict) else node
        layer = [part for part in parts if isinstance(part, dict | list)]
        levels += 1
        values += len(parts)
        if levels > _DEEPEST or values > _MOST_VALUES:
            rule = f"is nested deeper than {_DEEPEST} levels, or has more than {_MOST_VALUES} values"
            fix = "keep it in a file that the task reads"
            raise ConfigError("the configuration", MISSING, rule, fix)
