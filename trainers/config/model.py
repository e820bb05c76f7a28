"""Settings, the base of all configuration classes: keys, overrides, error messages.

Imports neither torch nor Ray, so that mistakes are reported without delay.
"""

import copy
import re
import types
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from trainers.config.yaml import check_size, dump_inline
from trainers.errors import (
    MISSING,
    ConfigError,
    ConfigErrors,
    did_you_mean,
    show,
)

Tree = dict[str, Any]
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
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must not be empty",
    "finite_number": "must be a finite number",
}
_FEW = 8  # keys that a sentence may list


class Settings(BaseModel):
    """Base of all configuration classes: strict, immutable, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of keys. At most one key of a group may be set; overriding one
    removes the others.
    """
    one_is_required: ClassVar[bool] = False
    """Whether one key of each `exclusive` group must be set."""
    needs: ClassVar[Mapping[str, str]] = {}
    """Maps a key to another key, which must be set for the first to have an effect."""
    foreign: ClassVar[Mapping[str, tuple[str, ...] | str]] = {}
    """Maps another tool's name for a key to our dotted keys, or to a sentence to show."""
    holds: ClassVar[Mapping[str, type["Settings"]]] = {}
    """Maps each key whose value is validated separately to its Settings class."""
    call: ClassVar[str] = ""
    """The command whose `--help` lists all keys; set for the classes of whole files."""

    @model_validator(mode="after")
    def _check_exclusive(self) -> Self:
        for key, needed in self.needs.items():
            is_set = getattr(self, key) != type(self).model_fields[key].default
            alone = is_set and not getattr(self, needed)
            rule = f"has no effect without {needed}"
            self.refuse_if(alone, key, rule, self._add(needed))
        for group in self.exclusive:
            chosen = [
                name for name in group if getattr(self, name) is not None
            ]
            if len(chosen) > 1:
                first, second = chosen[:2]
                rule = f"conflicts with {first}"
                self.refuse_if(True, second, rule, "keep one of the two")
            missing = self.one_is_required and not chosen
            rule = f"or {' or '.join(group[1:])} is required"
            self.refuse_if(missing, group[0], rule, self._add(group[0]))
        return self

    def _add(self, key: str) -> str:
        return f"add {example(key, type(self).model_fields[key])}"

    def refuse_if(
        self, condition: bool, key: str, rule: str, fix: str
    ) -> None:
        """Raise ConfigError about a dotted key if `condition` holds."""
        if condition:
            value = _plain_value(attrgetter(key)(self))
            raise ConfigError(
                key, MISSING if value is None else value, rule, fix
            )

    def tree(self) -> Tree:
        """Return plain data that builds the same settings again, without empty keys."""
        tree: Tree = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            shown = _plain_value(value)
            # An empty section is left out, as in files of versions without it.
            is_bare = shown == {} and isinstance(value, Settings)
            if value is not None and not is_bare:
                tree[field.alias or name] = shown
        return tree


def _plain_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain_value(part) for part in value]
    if isinstance(value, Settings):
        return value.tree()
    return copy.deepcopy(value)


S = TypeVar("S", bound=Settings)


def keys_of(model: type[Settings]) -> dict[str, FieldInfo]:
    """Return a class's fields by the keys that users write: `async`, not `async_`."""
    return {
        field.alias or name: field
        for name, field in model.model_fields.items()
    }


def child_model(
    model: type[Settings] | None, key: str
) -> type[Settings] | None:
    """Return the Settings class of a key's value; None if the value is no section."""
    field = keys_of(model).get(key) if model else None
    return _model_in(field.annotation) if field else None


def _model_in(annotation: Any) -> type[Settings] | None:
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, Settings):
            return member
    return None


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or any other type itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def build(model: type[S], tree: Tree, source: str) -> S:
    """Validate a mapping; each problem becomes a ConfigError that names `source`."""
    try:
        return model.model_validate(tree)
    except ValidationError as invalid:
        # If no member of a union fits, errors about types help least.
        problems = sorted(
            invalid.errors(include_url=False),
            key=lambda problem: problem["type"].endswith("_type"),
        )
        found: dict[str, ConfigError] = {}
        for problem in problems:
            error = _sentence(model, problem, source)
            # A union reports one error per member: keep one per field.
            found.setdefault(error.field, error)
        errors = []
        for field, error in found.items():
            # If another member of the union got further, its error is about a
            # part of this value: keep that one.
            part = (f"{field}.", f"{field}[")
            if not any(other.startswith(part) for other in found):
                errors.append(error)
        if len(errors) > 1:
            raise ConfigErrors(errors) from None
        raise errors[0] from None


def _sentence(model: type[Settings], problem: Any, source: str) -> ConfigError:
    kind = problem["type"]
    context = problem.get("ctx", {})
    path, owner, field = _locate(
        model, problem["loc"], kind == "extra_forbidden"
    )
    value = problem["input"]
    error = context.get("error")
    if kind == "extra_forbidden":
        rule = "is not a known key"
        fix = _instead(model, owner, path)
        path = path or '""'
    elif kind == "invalid_key":
        value = MISSING
        rule = "has a key that is not text"
        fix = "write it in quotes"
        path = path.rpartition("[")[0] or "the file"
    elif kind == "missing":
        value = MISSING
        rule = "is required"
        if field and field.description:
            rule += f" ({field.description.rstrip('.')})"
        fix = f"add {example(path, field)}"
    elif isinstance(error, ConfigError):
        value = error.value
        rule = error.rule
        fix = error.fix
        path = ".".join(filter(None, (path, error.field)))
    else:
        rule = _RULES.get(kind, "is not valid ({msg})").format(
            msg=problem["msg"], **context
        )
        extra = field.json_schema_extra if field else None
        # a field whose type is a union states its own rule
        if isinstance(extra, dict):
            rule = str(extra.get("rule", rule))
        if keys_of(owner).get(_leaf(path)) is not field:
            # a key of a free mapping: the field's example shows the whole
            # mapping
            field = None
        options = re.findall("'([^']*)'", str(context.get("expected", "")))
        fix = did_you_mean(value, options, f"write {example(path, field)}")
    return ConfigError(path, value, rule, fix, source)


def _leaf(path: str) -> str:
    """Return the last key of a dotted path, without a list index."""
    return path.rpartition(".")[2].partition("[")[0]


def _instead(model: type[Settings], owner: type[Settings], path: str) -> str:
    """Return the fix for an unknown key: our name, its place, or a similar name."""
    above, _, leaf = path.rpartition(".")
    every = dict(_dotted(model))
    if path in every:  # written with dots, in a file or mapping
        *outer, last = path.split(".")
        nested = "".join(f"{key}: {{" for key in outer)
        return f"write `{nested}{last}: ...{'}' * len(outer)}`: dots are for the command line"
    siblings = list(keys_of(owner))
    word = leaf.lower().replace("-", "_")
    elsewhere = [key for key in every if key.rpartition(".")[2] == word]
    meant = model.foreign.get(word) or tuple(elsewhere[:3])
    if isinstance(meant, str):
        return meant
    if meant:
        named = [
            f"`{key}` ({_first(every[key].description)})" for key in meant
        ]
        return f"write {' or '.join(named)}"
    listed = f"use one of {', '.join(siblings)}"
    if model.call and len(siblings) > _FEW:
        listed = f"find the keys with `{model.call} --help`"
    before = f"{above}." if above else ""
    return did_you_mean(leaf, siblings, listed, lambda near: before + near)


def _dotted(
    model: type[Settings], prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield all keys of a Settings class, those of its sections included."""
    for key, field in keys_of(model).items():
        yield f"{prefix}{key}", field
        below = child_model(model, key) or model.holds.get(key)
        if below is not None:
            yield from _dotted(below, f"{prefix}{key}.")


def _first(description: str | None) -> str:
    """Return the first clause of a description, for use in a sentence."""
    line = " ".join((description or "").split())
    return re.split(r"[.;:](?:\s|$)| \(", line)[0]


def example(path: str, field: FieldInfo | None) -> str:
    """Return a key with an example of its value, for a fix."""
    value = None
    if field is not None and field.examples:
        value = field.examples[0]
    elif field is not None and not field.is_required():
        value = field.get_default(call_default_factory=True)
    if value is None:
        return f"a valid `{path}`"
    if isinstance(value, Settings):
        value = value.model_dump(exclude_none=True, by_alias=True)
    return f"for example `{_leaf(path)}: {dump_inline(value)}`"


def _mapping_values(field: FieldInfo) -> Any:
    """Return the type of a free mapping's values; None for any other field."""
    members = {*_members(field.annotation)} - {type(None)}
    member = members.pop()
    if members or get_origin(member) is not dict:
        return None
    return get_args(member)[1]


def _locate(
    model: type[Settings], loc: tuple[int | str, ...], unknown_key: bool
) -> tuple[str, type[Settings], FieldInfo | None]:
    """Return a pydantic location as (dotted path, class with its last key, that field).

    Parts that pydantic adds for union members (`int`, `list[any]`, a class's
    name) are not keys, and are left out. The last part of an unknown key is
    kept, though no class has it.
    """
    parts: list[str] = []
    owner = model
    field = None
    current: type[Settings] | None = model
    keyed = False  # the next part is a key of a free mapping
    for index, part in enumerate(loc):
        if isinstance(part, int):
            if parts:
                parts[-1] += f"[{part}]"
            is_list = (
                field is not None and get_origin(field.annotation) is list
            )
            if current is None and field is not None and is_list:
                current = _model_in(get_args(field.annotation)[0])
            continue
        if keyed and field is not None:
            current = _model_in(_mapping_values(field))
            keyed = False
        elif current is not None and part in keys_of(current):
            owner = current
            field = keys_of(current)[part]
            current = child_model(owner, part)
            keyed = _mapping_values(field) is not None
        elif unknown_key and index == len(loc) - 1:
            owner = current or owner
            field = None
        else:
            continue
        parts.append(part)
    return ".".join(parts), owner, field


def set_key(tree: Tree, dotted: str, value: Any) -> None:
    """Set `dotted` in a nested mapping, in place, creating the mappings on the way."""
    *path, last = dotted.split(".")
    node = tree
    for part in path:
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            rule = f"is below `{part}`, which is not a mapping"
            raise ConfigError(dotted, value, rule, f"set `{part}` whole")
    node[last] = value


def override(
    model: type[Settings], tree: Tree, overrides: Mapping[str, Any]
) -> Tree:
    """Return a copy of `tree` with `--dotted.key value` overrides applied.

    Setting one key of an exclusive group drops the others.

    Raises ConfigError if the result is too large or too deep to be read again
    from the run's directory.
    """
    result = copy.deepcopy(tree)
    for dotted, value in overrides.items():
        *path, leaf = dotted.split(".")
        owner: type[Settings] | None = model
        node: Any = result
        for part in path:
            owner = child_model(owner, part)
            node = node.get(part) if isinstance(node, dict) else None
        others: set[str] = set()
        if owner and isinstance(node, dict):
            others.update(
                *(group for group in owner.exclusive if leaf in group)
            )
        for other in others:
            # If both are overridden, validation reports that.
            if ".".join([*path, other]) not in overrides:
                node.pop(other, None)
        set_key(result, dotted, copy.deepcopy(value))
    check_size(result)
    return result


def refuse_changes(
    then: Tree, now: Tree, place: str, fix: str, source: str | None = None
) -> None:
    """Raise ConfigError for the first key whose value changed from `then` to `now`.

    The message names `place` as the origin of the earlier value. Values are
    compared as YAML: NaN equals NaN, and 1 is not true.
    """
    for key in sorted(then.keys() | now.keys()):
        before = then.get(key)
        after = now.get(key)
        if dump_inline(before) != dump_inline(after):
            raise ConfigError(
                key,
                after,
                f"differs from {show(before)} in {place}",
                fix,
                source,
            )
