"""YAML 1.2 scalars, overrides, and the one sentence that every mistake gets."""

import math
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field, model_validator

from trainers.config.model import (
    Settings,
    build,
    override,
    refuse_changes,
    set_key,
)
from trainers.config.yaml import parse_mapping, parse_yaml
from trainers.errors import ConfigError, ConfigErrors

SCALARS = {
    "1e-3": 1e-3,
    "1E+3": 1000.0,
    "1.5e3": 1500.0,
    "-2": -2,
    "+12": 12,
    "017": 17,
    "0o17": 15,
    "0x1F": 31,
    "0b101": "0b101",
    "1_000": "1_000",
    "1:30": "1:30",
    ".5": 0.5,
    "-.5": -0.5,
    "1.": 1.0,
    ".": ".",
    "+": "+",
    "e3": "e3",
    "1e": "1e",
    ".inf": math.inf,
    "-.INF": -math.inf,
    "inf": "inf",
    "nan": "nan",
    "off": "off",
    "on": "on",
    "yes": "yes",
    "no": "no",
    "n": "n",
    "y": "y",
    "true": True,
    "False": False,
    "TRUE": True,
    "tRUE": "tRUE",
    "null": None,
    "~": None,
    "": None,
    "NULL": None,
    "none": "none",
    "2026-11-01": "2026-11-01",
    "2026-11-01 10:00:00": "2026-11-01 10:00:00",
    "<<": "<<",
    "=": "=",
    "'1e-3'": "1e-3",
    '"off"': "off",
    "[1e-4, 1e-2]": [1e-4, 1e-2],
    "{min: 1, max: 8}": {"min": 1, "max": 8},
}


@pytest.mark.parametrize("text", SCALARS)
def test_scalars_are_read_by_yaml_1_2(text):
    value = parse_yaml(f"key: {text}\n", "f")["key"]
    assert value == SCALARS[text]
    assert type(value) is type(SCALARS[text])


def test_a_key_that_stands_twice_is_named_with_its_line():
    with pytest.raises(ConfigError) as raised:
        parse_yaml("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n", "train.yaml")
    assert "train.yaml" in str(raised.value)
    assert "line 5" in str(raised.value)
    assert "`c`" in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "a: [1, 2",
        "a: b: c",
        "a: 1\n- b",
        "a: *nowhere",
        "\ta: 1",
        "a: 'open",
        "\x00",
        "a: 1\n---\nb: 2",
        "? [a, b]\n: 1",
        "? {a: b}\n: 1",
        "a: !!int word",
        "a: !!float word",
        "a: !!timestamp word",
        "a: !!bool word",
        "a: !mine 1",
        "a: " + "9" * 5000,
    ],
)
def test_what_is_not_yaml_is_a_config_error_that_names_the_file(text):
    with pytest.raises(ConfigError, match=r"train\.yaml"):
        parse_yaml(text, "train.yaml")


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.mkdir ['{}']",
        "!!python/object/new:os.mkdir ['{}']",
        "!!python/object/apply:pathlib.Path.mkdir [!!python/object/apply:pathlib.Path ['{}']]",
        "!!python/name:os.system",
        "!!python/module:antigravity",
    ],
)
def test_a_python_tag_is_refused_and_runs_nothing(tmp_path, value):
    target = tmp_path / "made"
    with pytest.raises(ConfigError, match="python"):
        parse_yaml("task_args:\n  x: " + value.format(target), "evil.yaml")
    assert not target.exists()


@pytest.mark.parametrize("text", ["", "- a", "3", "word", "1: x", "null: x"])
def test_a_file_must_be_a_mapping_of_names(text):
    with pytest.raises(ConfigError, match="must be a mapping"):
        parse_mapping(text, "f")


class Inner(Settings):
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("steps", "epochs", "seconds"),
    )

    steps: int | None = Field(default=None, ge=1, examples=[100])
    """Steps."""
    epochs: int | None = None
    """Epochs."""
    seconds: float | None = None
    """Seconds."""


class Outer(Settings):
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("size", "share"),)

    size: int | None = None
    """Size."""
    share: float | None = None
    """Share."""
    kind: Literal["small", "large"] = "small"
    """Kind."""
    needed: str = Field(min_length=1, examples=["word"])
    """What it is for."""
    inner: Inner = Field(default_factory=Inner)
    """Inner part."""
    many: int | list[int] = Field(
        default=1,
        examples=[2],
        json_schema_extra={"rule": "must be one or several"},
    )
    """One or several."""
    free: dict[str, Any] = Field(default_factory=dict)
    """Anything."""
    ratio: float = Field(default=0.5, gt=0, lt=1)
    """Ratio."""

    @model_validator(mode="after")
    def _check(self):
        if self.ratio == 0.25:
            raise ConfigError(
                "ratio", self.ratio, "must not be a quarter", "take a third"
            )
        return self


def test_an_override_replaces_the_other_keys_of_its_group():
    tree = {"size": 3, "needed": "x", "inner": {"steps": 1, "epochs": None}}
    assert override(Outer, tree, {"share": 0.5}) == {
        "share": 0.5,
        "needed": "x",
        "inner": {"steps": 1, "epochs": None},
    }
    assert override(Outer, tree, {"inner.seconds": 2.0}) == {
        "size": 3,
        "needed": "x",
        "inner": {"seconds": 2.0},
    }
    assert override(Outer, tree, {"ratio": 0.1}) == {**tree, "ratio": 0.1}


def test_a_key_below_a_value_is_a_config_error():
    with pytest.raises(ConfigError, match=r"`optimizer\.lr: .*`optimizer`"):
        set_key({"optimizer": "adam"}, "optimizer.lr", 1)


def sentence(tree, model=Outer):
    with pytest.raises(ConfigError) as raised:
        build(model, tree, "f.yaml")
    return str(raised.value)


GOOD = {"needed": "x"}


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (
            "rato: 0.5",
            "`rato: 0.5` is not a known key; did you mean `ratio`?",
        ),
        (
            "inner: {step: 1}",
            "`inner.step: 1` is not a known key; did you mean `inner.steps`?",
        ),
        (
            "inner.steps: 1",
            "`inner.steps: 1` is not a known key; write `inner: {steps: ...}`: dots are",
        ),
        ("size: many", '`size: "many"` must be a whole number; write'),
        (
            "kind: false",
            "`kind: false` must be one of 'small' or 'large'; write for example `kind: small`",
        ),
        (
            "needed: ''",
            '`needed: ""` must not be empty; write for example `needed: word`',
        ),
        (
            "inner: {steps: 0}",
            "`inner.steps: 0` must be at least 1; write for example `steps: 100`",
        ),
        ("inner: [1]", "`inner: [1]` must be a mapping; write"),
        ("free: 3", "`free: 3` must be a mapping; write"),
        (
            "ratio: 0.25",
            "`ratio: 0.25` must not be a quarter; take a third",
        ),
        (
            "ratio: null",
            "`ratio: null` must be a number; write for example `ratio: 0.5`",
        ),
        (
            "many: x",
            '`many: "x"` must be one or several; write for example `many: 2`',
        ),
    ],
)
def test_a_mistake_is_one_sentence(tree, words):
    text = sentence(GOOD | parse_mapping(tree, "test"))
    assert len(text.splitlines()) == 1
    assert text.startswith(f"f.yaml: {words}")


def test_several_mistakes_are_a_line_each():
    with pytest.raises(ConfigErrors) as raised:
        build(
            Outer,
            {"size": "x", "ratio": 7, "inner": {"steps": -1}, "zzz": 1},
            "f.yaml",
        )
    assert len(raised.value.errors) == 5
    assert len(str(raised.value).splitlines()) == 5
    assert {error.field for error in raised.value.errors} == {
        "size",
        "ratio",
        "inner.steps",
        "zzz",
        "needed",
    }


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        (math.nan, math.nan, True),
        ({"b": 1, "a": [2]}, {"a": (2,), "b": 1}, True),
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        ([1], [True], False),
        ({1: "x"}, {"1": "x"}, False),
        (None, 1, False),
    ],
)
def test_a_value_that_differs_from_before_is_named(then, now, same):
    if same:
        refuse_changes({"a": then}, {"a": now}, "s3://b/run", "start anew")
        return
    with pytest.raises(
        ConfigError, match=r"`a: .*` differs from .* in s3://b/run"
    ):
        refuse_changes({"a": then}, {"a": now}, "s3://b/run", "start anew")
