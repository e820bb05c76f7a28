"""Configuration files: YAML 1.2 scalars, overrides by dotted keys, and errors that are one sentence each.

No torch and no Ray here: a mistake in a file is said before either is imported.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from trainers.errors import MISSING, ConfigError, ConfigErrors

Tree = dict[str, Any]


class Settings(BaseModel):
    """Base of every configuration model: strict, immutable, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of keys of which exactly one may be set; an override of one replaces the others."""


def plain(settings: Settings) -> Tree:
    """Plain data that builds the same settings again: keys without a value are left out, what users nest is kept."""
    fields = type(settings).model_fields
    values = {field.alias or name: getattr(settings, name) for name, field in fields.items()}
    return {
        name: plain(value) if isinstance(value, Settings) else _copy(value)
        for name, value in values.items()
        if value is not None
    }


S = TypeVar("S", bound=Settings)


def keys_of(model: type[Settings]) -> dict[str, FieldInfo]:
    """The fields of a model by the keys that users write (`async`, which Python cannot name a field)."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the YAML 1.2 core schema (`1e-3` is a number, `off` is a word)."""

    # https://yaml.org/spec/1.2.2/#103-core-schema
    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML copies it)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (dict, list)):
                raise yaml.constructor.ConstructorError(None, None, "a key must be one word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key}` stands twice in one mapping", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads: quotes the words that its schema would take for something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def parse_yaml(text: str, source: str) -> Any:
    """Read one YAML 1.2 document of plain data; `ConfigError` names file, line and problem."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the file"
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(line, MISSING, f"is not YAML ({problem})", "mend the syntax there", source) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # a tag such as !!int on what is none
        raise ConfigError("the file", MISSING, f"is not YAML ({error})", "mend or remove the tag", source) from error


def dump_yaml(tree: Mapping[str, Any]) -> str:
    """Plain data as YAML 1.2 in the order given."""
    return yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def parse_mapping(text: str, source: str) -> Tree:
    """Read a YAML document that must be a mapping."""
    tree = parse_yaml(text, source)
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError("the file", tree, "must be a mapping of names to values", "write `key: value` lines", source)
    return tree


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
    result: Tree = _copy(tree)
    for dotted, value in overrides.items():
        owner, parent = _owner(model, result, dotted)
        leaf = dotted.rsplit(".", 1)[-1]
        for group in owner.exclusive if owner else ():
            if leaf in group:
                for other in group:
                    given = dotted.removesuffix(leaf) + other in overrides  # both were asked for: an error to come
                    if parent is not None and other != leaf and not given:
                        parent.pop(other, None)
        set_key(result, dotted, value)
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(child) for key, child in value.items()}
    return [_copy(child) for child in value] if isinstance(value, list) else value


def _owner(model: type[Settings], tree: Tree, dotted: str) -> tuple[type[Settings] | None, Tree | None]:
    """The model and the mapping that hold the last part of a dotted key."""
    current: type[Settings] | None = model
    node: Any = tree
    for part in dotted.split(".")[:-1]:
        current = child_model(current, part)
        node = node.get(part) if isinstance(node, dict) else None
    return current, node if isinstance(node, dict) else None


def child_model(model: type[Settings] | None, name: str) -> type[Settings] | None:
    """The model of a field that holds one."""
    field = keys_of(model).get(name) if model else None
    return next((t for t in _flatten(field.annotation) if _is_settings(t)), None) if field else None


def _is_settings(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Settings)


def _flatten(annotation: Any) -> Iterable[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _flatten(part)
    else:
        yield annotation


def build(model: type[S], tree: Tree, source: str) -> S:
    """Validate a mapping; every problem becomes a `ConfigError` sentence that names `source`."""
    try:
        return model.model_validate(tree)
    except ValidationError as invalid:
        found: dict[str, ConfigError] = {}
        # Of a value that is no member of a union, the wrong types say least.
        for problem in sorted(invalid.errors(include_url=False), key=lambda one: one["type"].endswith("_type")):
            error = _sentence(model, problem, source)
            found.setdefault(error.field, error)  # a union reports every member: one sentence a field
        errors = [error for field, error in found.items() if not _said_better(field, found)]
        raise (errors[0] if len(errors) == 1 else ConfigErrors(errors)) from None


def _said_better(field: str, found: Mapping[str, ConfigError]) -> bool:
    """Whether another member of the same union got further: its sentence is about a part of this value."""
    return any(other.startswith((f"{field}.", f"{field}[")) for other in found)


_RULES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be one of {expected}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must not be empty",
    "finite_number": "must be a finite number",
}


def _sentence(model: type[Settings], problem: Any, source: str) -> ConfigError:
    kind, context = problem["type"], problem.get("ctx", {})
    path, owner, field = _locate(model, problem["loc"], kind == "extra_forbidden")
    if kind == "extra_forbidden":
        known = list(keys_of(owner))
        name = path.rsplit(".", 1)[-1]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        fix = f"did you mean `{_sibling(path, near[0])}`?" if near else f"the keys here are {', '.join(known)}"
        return ConfigError(path, problem["input"], "there is no such key", fix, source)
    if kind == "missing":
        what = f" ({field.description.rstrip('.')})" if field and field.description else ""
        return ConfigError(path, MISSING, f"is required{what}", f"add {_example(path, field)}", source)
    error = context.get("error")
    if isinstance(error, ConfigError):
        dotted = f"{path}.{error.field}" if path and error.field else path or error.field
        return ConfigError(dotted, error.value, error.rule, error.fix, source)
    rule = _RULES.get(kind, "{msg}").format(msg=problem["msg"], **context)
    options = _rule_of(field)
    if field is not None and keys_of(owner).get(path.rsplit(".", 1)[-1].partition("[")[0]) is not field:
        field = None  # a key of a free mapping: the field's example is one of the whole mapping
    return ConfigError(path, problem["input"], options or rule, f"write {_example(path, field)}", source)


def _rule_of(field: FieldInfo | None) -> str | None:
    """A field whose type is a union says its rule itself (`json_schema_extra={"rule": ...}`)."""
    extra = field.json_schema_extra if field else None
    return str(extra["rule"]) if isinstance(extra, dict) and "rule" in extra else None


def _sibling(path: str, name: str) -> str:
    return ".".join([*path.split(".")[:-1], name])


def _example(path: str, field: FieldInfo | None) -> str:
    leaf = path.rsplit(".", 1)[-1].partition("[")[0]
    if field is not None and field.examples:
        value = field.examples[0]
    elif field is not None and not field.is_required() and field.default is not None:
        value = field.get_default(call_default_factory=True)
    else:
        return f"a valid `{path}`"
    if isinstance(value, Settings):
        value = value.model_dump(exclude_none=True)
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True).removesuffix("...\n").strip()
    return f"for example `{leaf}: {text}`"


def _mapping_values(field: FieldInfo) -> Any:
    """The type of the values of a free mapping; None for any other field, and for a union with a mapping in it."""
    members = [member for member in _flatten(field.annotation) if member is not type(None)]
    return get_args(members[0])[1] if len(members) == 1 and get_origin(members[0]) is dict else None


def _locate(
    model: type[Settings], loc: tuple[int | str, ...], unknown_key: bool
) -> tuple[str, type[Settings], FieldInfo | None]:
    """A pydantic location as (dotted path, the model that owns its last key, that key's field).

    Parts that pydantic adds for union members (`int`, `list[any]`, a model's name) are no keys of ours and are left
    out; the last part of an unknown key is one, though no model has it.
    """
    parts: list[str] = []
    owner, field = model, None
    current: type[Settings] | None = model
    keyed = False  # the next part is a key of a free mapping
    for index, part in enumerate(loc):
        if isinstance(part, int):
            if parts:
                parts[-1] += f"[{part}]"
        elif keyed and field is not None:
            parts.append(part)
            keyed = False
            current = next((t for t in _flatten(_mapping_values(field)) if _is_settings(t)), None)
        elif current is not None and part in keys_of(current):
            owner, field = current, keys_of(current)[part]
            parts.append(part)
            current = child_model(owner, part)
            keyed = _mapping_values(field) is not None
        elif unknown_key and index == len(loc) - 1:
            owner, field = current or owner, None
            parts.append(part)
    return ".".join(parts), owner, field
