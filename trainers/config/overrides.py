"""`--dotted.key value` overrides of a configuration file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from trainers.config.model import Settings, Tree, child_model
from trainers.config.yaml import parse_yaml
from trainers.errors import MISSING, ConfigError


def parse_overrides(args: Sequence[str]) -> dict[str, Any]:
    """`--a.b value` and `--a.b=value` as {"a.b": value}; values are YAML, so lists and mappings work too."""
    overrides: dict[str, Any] = {}
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--") or len(arg) == 2:
            raise ConfigError(arg, MISSING, "is not an option", "write `--dotted.key value`", "command line")
        key, equals, text = arg[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(key, MISSING, "needs a value", f"write `--{key} VALUE`", "command line")
            text = rest.pop(0)
        overrides[key] = parse_yaml(text, f"command line, --{key}")
    return overrides


def set_key(tree: Tree, dotted: str, value: Any) -> None:
    """Set `dotted` in a nested mapping, in place, making the mappings on the way."""
    *path, last = dotted.split(".")
    node = tree
    for part in path:
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        elif not isinstance(child, dict):
            raise ConfigError(dotted, value, f"cannot go below `{part}`, which is not a mapping", f"set `{part}` whole")
        node = child
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
