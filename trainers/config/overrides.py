"""`--dotted.key value` overrides of a configuration file."""

import copy
from collections.abc import Mapping
from typing import Any

from trainers.config.model import Settings, Tree, child_model
from trainers.errors import ConfigError


def set_key(tree: Tree, dotted: str, value: Any) -> None:
    """Set `dotted` in a nested mapping, in place, making the mappings on the way."""
    *path, last = dotted.split(".")
    node = tree
    for part in path:
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise ConfigError(dotted, value, f"cannot go below `{part}`, which is not a mapping", f"set `{part}` whole")
    node[last] = value


def override(model: type[Settings], tree: Tree, overrides: Mapping[str, Any]) -> Tree:
    """A copy of `tree` with dotted overrides applied; setting one key of an exclusive group drops the others."""
    result = copy.deepcopy(tree)
    for dotted, value in overrides.items():
        *path, leaf = dotted.split(".")
        owner: type[Settings] | None = model
        node: Any = result
        for part in path:
            owner = child_model(owner, part)
            node = node.get(part) if isinstance(node, dict) else None
        for group in owner.exclusive if owner else ():
            for other in group if leaf in group else ():
                given = ".".join([*path, other]) in overrides  # both were asked for: an error to come
                if isinstance(node, dict) and not given:
                    node.pop(other, None)
        set_key(result, dotted, value)
    return result
