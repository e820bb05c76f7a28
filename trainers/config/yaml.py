"""Read and write YAML of plain data, within limits that make any file safe to read.

Our files are YAML 1.2, Ray's are 1.1. PyYAML's own loader reads only 1.1,
where `off` is false and `1e-3` is text, and expands every alias.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from trainers.errors import MISSING, ConfigError, did_you_mean, first_line

LONGEST = 2**19
"""The most characters of a text."""
MOST_VALUES = 12_000
"""The most values of a text. An alias counts as all that it stands for, and
every 64 characters of a scalar as one more value.
"""
DEEPEST = 64
"""The most levels of nested mappings and lists, aliases included."""
_YAML = "tag:yaml.org,2002:"

# https://yaml.org/spec/1.2.2/#103-core-schema, and the merge key of YAML 1.1
_SCHEMA = {
    "merge": "<<",
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}


class _Loader1_1(yaml.SafeLoader):  # noqa: N801
    """PyYAML's safe loader with limits, which refuses duplicate keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._seen: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # Check before PyYAML adds the keys of a merge: a key that is written
        # here may replace a merged one.
        if id(node) not in self._seen:
            self._seen.add(id(node))
            self._check_keys(node)
        super().flatten_mapping(node)
        if len(node.value) > MOST_VALUES:
            _refuse(
                node, f"merges more than {MOST_VALUES} keys", "write fewer"
            )

    def _check_keys(self, node: yaml.MappingNode) -> None:
        keys = set()
        for key_node, _ in node.value:
            if key_node.tag == f"{_YAML}merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                rule = f"repeats the key `{key}` of the same mapping"
                _refuse(key_node, rule, "remove one of the two")
            keys.add(key)


class _Loader1_2(_Loader1_1):  # noqa: N801
    """PyYAML's safe loader with limits, the YAML 1.2 core schema, and merge keys."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML copies it)

    def construct_whole(self, node: yaml.ScalarNode) -> int:
        """Read `017` as 17, unlike YAML 1.1."""
        text = str(self.construct_scalar(node))
        if text[:2] in ("0o", "0x"):
            return int(text, 0)
        return int(text)


def _refused(
    rule: str, fix: str, source: str | None = None, where: str = "the file"
) -> ConfigError:
    return ConfigError(where, MISSING, rule, fix, source)


def _refuse(node: Any, rule: str, fix: str) -> NoReturn:
    raise _refused(rule, fix, where=_place(node.start_mark))


def _place(mark: Any) -> str:
    return (
        f"line {mark.line + 1}, column {mark.column + 1}"
        if mark
        else "the file"
    )


for _kind, _pattern in _SCHEMA.items():
    _written = re.compile(rf"^(?:{_pattern})$")
    _Loader1_2.add_implicit_resolver(f"{_YAML}{_kind}", _written, None)
_SAFE = yaml.SafeLoader.yaml_constructors
_PLAIN = ("null", "bool", "float", "str", "seq", "map")
_Loader1_2.yaml_constructors = {
    **{f"{_YAML}{_kind}": _SAFE[f"{_YAML}{_kind}"] for _kind in _PLAIN},
    None: _SAFE[None],  # refuses any other tag
    f"{_YAML}int": _Loader1_2.construct_whole,
}
_Loader1_1.yaml_constructors = {
    **_Loader1_2.yaml_constructors,
    **{
        f"{_YAML}{_kind}": _SAFE[f"{_YAML}{_kind}"]
        for _kind in ("int", "timestamp")
    },
}
# `<<` is text unless it is a key.
_Loader1_2.add_constructor(f"{_YAML}merge", _SAFE[f"{_YAML}str"])


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader1_2` reads: quotes text that would be read as another value."""

    yaml_implicit_resolvers = _Loader1_2.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def parse_yaml(text: str, source: str) -> Any:
    """Read one YAML 1.2 document of plain data.

    ConfigError names file, line and problem.
    """
    return _parse(_Loader1_2, _Loader1_2.get_single_data, text, source)


def parse_typed(text: str, source: str) -> Any:
    """Read a command-line value; ConfigError if YAML takes its end for a comment."""
    value = parse_yaml(text, source)
    kept = "" if value is None else value
    typed = text.strip()
    if isinstance(kept, str) and typed.startswith(kept):
        rest = typed.removeprefix(kept).lstrip()
        if rest.startswith("#"):
            rule = "has a `#`, where a comment begins in YAML"
            fix = f"put quotes inside the shell's: '\"{typed}\"'"
            raise _refused(rule, fix, source, where=typed)
    return value


def parse_documents(text: str, source: str) -> list[Any]:
    """Read all YAML 1.1 documents of a text, as Ray does.

    ConfigError as in parse_yaml.
    """
    documents: list[Any] = _parse(_Loader1_1, _all_documents, text, source)
    return documents


def _all_documents(loader: _Loader1_1) -> list[Any]:
    documents = []
    while loader.check_data():  # type: ignore[no-untyped-call]
        documents.append(loader.get_data())
    return documents


_OF_TAGS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
)
"""What PyYAML raises for a wrong tag, such as `!!int` in front of text."""


def _parse(
    loader: type[_Loader1_1],
    read: Callable[[Any], Any],
    text: str,
    source: str,
) -> Any:
    if len(text) > LONGEST:
        rule = f"is longer than {LONGEST} characters"
        raise _refused(rule, "shorten the file", source)
    try:
        tree = read(loader(text))
        check_size(tree)
        return tree
    except RecursionError as error:
        raise _refused("is nested too deeply", "flatten it", source) from error
    except ConfigError as error:
        raise error.at(source) from None
    except (yaml.YAMLError, *_OF_TAGS) as error:
        where = _place(getattr(error, "problem_mark", None))
        problem = getattr(error, "problem", None) or first_line(error)
        fix = "fix the syntax or the tag there"
        raise _refused(
            f"is not YAML ({problem})", fix, source, where
        ) from error


def check_size(tree: Any) -> None:
    """Raise ConfigError for plain data that is too large or too deep for a file."""
    waiting = [(tree, 0)]
    count = 0
    while waiting:
        value, level = waiting.pop()
        count += 1
        inner: Iterable[Any] = ()
        if isinstance(value, str):
            count += len(value) // 64
        elif isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, list):
            inner = value
        if level > DEEPEST or count > MOST_VALUES:
            rule = f"is nested deeper than {DEEPEST} levels, or has more than {MOST_VALUES} values"
            raise _refused(
                f"{rule} (an alias counts as all that it stands for)",
                "move long values to a separate file",
            )
        waiting += [(part, level + 1) for part in inner]


def read_text(path: Path, source: str) -> str:
    """Read a local text file, up to one character more than a file may have.

    Raises ConfigError if it does not exist, cannot be read or is not text.
    """
    rule = "is not there"
    fix = "name another"
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(LONGEST + 1)
    except FileNotFoundError:
        beside = [file.name for file in path.parent.glob("*.y*ml")]
        fix = did_you_mean(
            path.name, beside, fix, lambda near: str(path.parent / near)
        )
    except (OSError, ValueError) as error:
        rule = f"cannot be read ({error})"
    raise _refused(rule, fix, source)


def parse_mapping(text: str, source: str) -> dict[str, Any]:
    """Read a YAML document that must be a mapping of names."""
    tree = parse_yaml(text, source)
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return tree
    rule = "must be a mapping of names to values"
    raise _refused(rule, "write `key: value` lines", source)


def dump_yaml(tree: Mapping[str, Any]) -> str:
    """Return plain data as YAML 1.2 in the order given.

    Raises ConfigError if it is too long to be read again.
    """
    text: str = yaml.dump(
        dict(tree),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=110,
    )
    if len(text) > LONGEST:
        rule = f"would fill a file of more than {LONGEST} characters"
        fix = "move long values to a file that the task reads"
        raise _refused(rule, fix, where="the configuration")
    return text


def is_plain_text(text: str) -> bool:
    """Return whether YAML 1.2 reads this as text even without quotes.

    It reads `1`, `true`, `~`, `<<` and the empty text in other ways.
    """
    patterns = _SCHEMA.values()
    return not any(re.fullmatch(pattern, text) for pattern in patterns)


def dump_inline(value: Any) -> str:
    """Return plain data as YAML 1.2 in flow style, for use in a sentence."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True)
    return text.removesuffix("...\n").strip()
