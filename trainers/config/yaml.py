"""Read and write YAML of plain data, within limits, whoever wrote it.

1.2 for our own files, 1.1 for those of Ray.

PyYAML by itself knows 1.1, where `off` is false and `1e-3` a word, and follows every
alias.
"""

import math
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from trainers.errors import MISSING, ConfigError, first_line

LONGEST = 2**19
"""Bytes of a file, and characters of a text."""
MOST_VALUES = 12_000
"""Values of a text, each alias counted as all that it stands for; every 64 characters
of a scalar are one more.
"""
DEEPEST = 64
"""Levels of mappings and lists in each other, through aliases as well."""
_MOST_DIGITS = 40
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_YAML = "tag:yaml.org,2002:"

# https://yaml.org/spec/1.2.2/#103-core-schema
_CORE_SCHEMA = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}


class _Loader1_1(yaml.SafeLoader):  # noqa: N801
    """PyYAML's safe loader with limits, which refuses a key that stands twice."""

    keys: tuple[type, ...] = (str,)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = self._depth = self._reached = 0
        self._anchored: dict[str, tuple[int, int]] = {}
        self._seen: set[int] = set()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        anchor = event.anchor
        outer = self._reached
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if anchor not in self._anchored:
                rule = f"is inside of what its alias *{anchor} stands for, without end"
                _refuse(event, rule, "write out what is meant there")
            values, levels = self._anchored[anchor]
            self._count(event, values, levels)
            return node
        self._anchored.pop(anchor, None)  # one of an earlier document
        if isinstance(event, yaml.ScalarEvent) and _NO_TEXT.search(event.value):
            _refuse(
                event,
                "holds a character that is no text (NUL, or half of a pair)",
                "remove it",
            )
        before = self._values
        self._reached = self._depth
        self._count(event, 1 + len(getattr(event, "value", "")) // 64, 1)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if anchor is not None:
            self._anchored[anchor] = self._values - before, self._reached - self._depth
        self._reached = max(self._reached, outer)
        return node

    def _count(self, event: Any, values: int, levels: int) -> None:
        self._values += values
        self._reached = max(self._reached, self._depth + levels)
        if self._reached > DEEPEST:
            _refuse(event, f"is nested deeper than {DEEPEST} levels", "flatten it")
        if self._values > MOST_VALUES:
            rule = f"is beyond the {MOST_VALUES} values of a file (an alias counts as all that it stands for)"
            _refuse(event, rule, "keep what is long in a file of its own")

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # Before it brings in the keys of a merge, which those written here replace.
        if id(node) not in self._seen:
            self._seen.add(id(node))
            keys = set()
            for key_node, _ in node.value:
                if key_node.tag != f"{_YAML}merge":
                    key = self.construct_object(key_node, deep=True)
                    if not isinstance(key, self.keys):
                        _refuse(
                            key_node, "is a key that is no word", "write it in quotes"
                        )
                    if key in keys:
                        _refuse(
                            key_node,
                            f"is the key `{key}`, which stands twice in one mapping",
                            "remove one",
                        )
                    keys.add(key)
        super().flatten_mapping(node)

    def construct_whole(self, node: yaml.ScalarNode) -> int:
        """An integer that any consumer can write out again."""
        value = (
            self.construct_yaml_int(node)
            if len(node.value) <= 4 * _MOST_DIGITS
            else math.inf
        )
        if not abs(value) < 10**_MOST_DIGITS:
            _refuse(
                node,
                f"is a whole number of more than {_MOST_DIGITS} digits",
                "write a smaller number, or text",
            )
        return int(value)

    def construct_number(self, node: yaml.ScalarNode) -> float:
        """A float; infinity only where it is written."""
        value = self.construct_yaml_float(node)
        if math.isinf(value) and "inf" not in node.value.lower():
            _refuse(
                node,
                "is larger than any number here can be",
                "write a smaller number, or .inf",
            )
        return value


class _Loader1_2(_Loader1_1):  # noqa: N801
    """The same with the YAML 1.2 core schema."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML copies it)
    keys = (str, int, float, type(None))  # of a user's own mapping

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """`017` is 17, other than in YAML 1.1."""
        text = str(self.construct_scalar(node))
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _refuse(where: Any, rule: str, fix: str) -> NoReturn:
    mark = where.start_mark
    raise ConfigError(
        f"line {mark.line + 1}, column {mark.column + 1}", MISSING, rule, fix
    )


for _tag, _pattern in _CORE_SCHEMA.items():
    _Loader1_2.add_implicit_resolver(
        f"{_YAML}{_tag}", re.compile(rf"^(?:{_pattern})$"), None
    )
_PLAIN = ("null", "bool", "str", "seq", "map", "timestamp")
_Loader1_1.yaml_constructors = {
    **{
        f"{_YAML}{_tag}": yaml.SafeLoader.yaml_constructors[f"{_YAML}{_tag}"]
        for _tag in _PLAIN
    },
    f"{_YAML}int": _Loader1_1.construct_whole,
    f"{_YAML}float": _Loader1_1.construct_number,
    None: yaml.SafeLoader.yaml_constructors[None],  # refuses any other tag
}
_Loader1_2.yaml_constructors = {
    _tag: make
    for _tag, make in _Loader1_1.yaml_constructors.items()
    if _tag != f"{_YAML}timestamp"
}


class _Dumper(yaml.SafeDumper):
    """Write what `_Loader1_2` reads, with quotes around words that mean something else."""

    yaml_implicit_resolvers = _Loader1_2.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Quote and escape text in which a YAML 1.1 reader would see a line break."""
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None
        return self.represent_scalar(f"{_YAML}str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)


def parse_yaml(text: str, source: str) -> Any:
    """Read one YAML 1.2 document of plain data.

    ConfigError names file, line and problem.
    """
    return _parse(_Loader1_2, _Loader1_2.get_single_data, text, source)


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


def _parse(
    loader: type[_Loader1_1], read: Callable[[Any], Any], text: str, source: str
) -> Any:
    if len(text) > LONGEST:
        raise ConfigError(
            "the file",
            MISSING,
            f"is longer than {LONGEST} characters",
            "write less in it",
            source,
        )
    try:
        return read(loader(text))
    except ConfigError as error:
        raise error.at(source) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the file"
        problem = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(
            line, MISSING, f"is not YAML ({problem})", "fix the syntax there", source
        ) from error
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ) as error:  # !!int on what is none
        raise ConfigError(
            "the file",
            MISSING,
            f"is not YAML ({error})",
            "fix or remove the tag",
            source,
        ) from error


def read_text(path: Path, source: str) -> str:
    """Read a text file of this machine.

    Raises FileNotFoundError, and ConfigError for what is no regular file (a pipe, a
    device), too long, or no text.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(
                "the file",
                MISSING,
                "cannot be read (it is no regular file)",
                "name a file",
                source,
            )
        with path.open("rb") as file:
            return decode(file.read(LONGEST + 1), source)
    except (FileNotFoundError, ConfigError):
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the file", MISSING, f"cannot be read ({error})", "name another", source
        ) from error


def decode(data: bytes, source: str) -> str:
    """Decode the content of a text file; ConfigError when it is none, or too long."""
    if len(data) > LONGEST:
        raise ConfigError(
            "the file",
            MISSING,
            f"is longer than {LONGEST} bytes",
            "write less in it",
            source,
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            "the file",
            MISSING,
            f"is not text ({error.reason})",
            "save it as UTF-8",
            source,
        ) from error


def parse_mapping(text: str, source: str) -> dict[str, Any]:
    """Read a YAML document that must be a mapping of names."""
    tree = parse_yaml(text, source)
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(
            "the file",
            MISSING,
            "must be a mapping of names to values",
            "write `key: value` lines",
            source,
        )
    return tree


def dump_yaml(tree: Mapping[str, Any]) -> str:
    """Return plain data as YAML 1.2 in the order given.

    ConfigError where it is more than can be read again.
    """
    text: str = yaml.dump(
        dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110
    )
    if len(text.encode()) > LONGEST:
        rule = f"would fill a file of more than {LONGEST} bytes"
        raise ConfigError(
            "the configuration",
            MISSING,
            rule,
            "keep what is long in a file that the task reads",
        )
    return text


def dump_inline(value: Any) -> str:
    """Plain data as YAML 1.2 in flow style, for a sentence."""
    return (
        yaml.dump(value, Dumper=_Dumper, default_flow_style=True)
        .removesuffix("...\n")
        .strip()
    )
