"""YAML 1.2 documents of plain data; PyYAML by itself knows 1.1, where `off` is false and `1e-3` a word."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from trainers.errors import MISSING, ConfigError

# https://yaml.org/spec/1.2.2/#103-core-schema
_CORE_SCHEMA = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the YAML 1.2 core schema; a key that stands twice is an error."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML copies it)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (dict, list)):
                raise yaml.constructor.ConstructorError(None, None, "a key must be one word", key_node.start_mark)
            if key in seen:
                problem = f"the key `{key}` stands twice in one mapping"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_core_int(self, node: yaml.ScalarNode) -> int:
        """`017` is 17, other than in YAML 1.1."""
        text = str(self.construct_scalar(node))
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


for _tag, _pattern in _CORE_SCHEMA.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), None)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_core_int)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads: quotes the words that its schema would take for something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _load(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)


def parse_yaml(text: str, source: str, load: Callable[[str], Any] = _load) -> Any:
    """Read one YAML 1.2 document of plain data, or what `load` reads; `ConfigError` names file, line and problem."""
    try:
        return load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the file"
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(line, MISSING, f"is not YAML ({problem})", "fix the syntax there", source) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # a tag such as !!int on what is none
        raise ConfigError("the file", MISSING, f"is not YAML ({error})", "fix or remove the tag", source) from error


def parse_mapping(text: str, source: str) -> dict[str, Any]:
    """Read a YAML document that must be a mapping of names."""
    tree = parse_yaml(text, source)
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError("the file", tree, "must be a mapping of names to values", "write `key: value` lines", source)
    return tree


def dump_yaml(tree: Mapping[str, Any]) -> str:
    """Plain data as YAML 1.2 in the order given."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def dump_inline(value: Any) -> str:
    """Plain data as YAML 1.2 in flow style, for a sentence."""
    return yaml.dump(value, Dumper=_Dumper, default_flow_style=True).removesuffix("...\n").strip()
