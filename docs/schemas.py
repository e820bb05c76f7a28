"""JSON schemas of `train.yaml` and `sweep.yaml`, for editors, from the models.

What only the models know (which keys fit together) they say themselves when a
file is read.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from trainers.config import TrainConfig
from trainers.config.function import FunctionConfig
from trainers.config.model import Settings, child_model, keys_of
from tune.config import SweepConfig

Schema = dict[str, Any]
DIALECT = "http://json-schema.org/draft-07/schema#"
FREE = r"^(task_args|train_loop_config)\."
"""Dotted keys of the user's own."""


def train() -> str:
    """The schema of a run: of a task, or of a training function."""
    definitions = _definitions(TrainConfig, FunctionConfig)
    return _text(
        {
            "$schema": DIALECT,
            "title": "train.yaml",
            **_run(),
            "definitions": definitions,
        }
    )


def sweep() -> str:
    """Return a sweep's schema; its run requires nothing, which the space may give."""
    definitions = _definitions(SweepConfig, TrainConfig, FunctionConfig)
    for name in definitions.keys() - {"SweepConfig"}:
        definitions[name].pop("required", None)
        definitions[name].pop("allOf", None)
    own = definitions.pop("SweepConfig")
    own["properties"]["train"] |= {
        "anyOf": [{"type": "string"}, {"type": "object", **_run()}]
    }
    own["properties"]["space"] |= {
        "properties": dict(_space(TrainConfig)),
        "patternProperties": {FREE: _values({})},
        "additionalProperties": False,
    }
    return _text(
        {
            "$schema": DIALECT,
            **own,
            "title": "sweep.yaml",
            "definitions": definitions,
        }
    )


def _run() -> Schema:
    """Not `anyOf`: an editor would name what is missing of the other kind."""
    return {
        "if": {"required": ["train_func"]},
        "then": _reference("FunctionConfig"),
        "else": _reference("TrainConfig"),
    }


def _reference(path: str) -> Schema:
    return {"$ref": f"#/definitions/{path}"}


def _definitions(*models: type[BaseModel]) -> dict[str, Schema]:
    _, whole = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/definitions/{model}",
    )
    definitions: dict[str, Schema] = _plain(whole["$defs"])
    for model in _models(Settings):
        if model.__name__ in definitions and model.exclusive:
            definitions[model.__name__]["allOf"] = [
                _exclusive(group, model) for group in model.exclusive
            ]
    return definitions


def _models(model: type[Settings]) -> Iterator[type[Settings]]:
    for below in model.__subclasses__():
        yield below
        yield from _models(below)


def _exclusive(group: tuple[str, ...], model: type[Settings]) -> Schema:
    """Exactly one of a run's groups; at most one of any other."""
    given = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in group
    ]
    pairs = [
        {"allOf": [first, second]}
        for first, second in itertools.combinations(given, 2)
    ]
    return (
        {"oneOf": given} if model is TrainConfig else {"not": {"anyOf": pairs}}
    )


def _space(
    model: type[Settings], before: str = ""
) -> Iterator[tuple[str, Schema]]:
    """What each dotted key of a run may be in a space."""
    for key in keys_of(model):
        yield (
            before + key,
            _values(_reference(f"{model.__name__}/properties/{key}")),
        )
        if (below := child_model(model, key)) is not None and key not in (
            "batch_schedule",
            "tracking",
        ):
            yield from _space(below, f"{before}{key}.")


def _values(value: Schema) -> Schema:
    listed = {"type": "array", "items": value, "minItems": 1}
    return {"anyOf": [listed, _reference("Range"), {"const": "around"}]}


def _plain(node: Any) -> Any:
    """Without pydantic's titles, our own `rule`, and line breaks in descriptions."""
    if isinstance(node, list):
        return [_plain(part) for part in node]
    if not isinstance(node, dict):
        return " ".join(node.split()) if isinstance(node, str) else node
    return {
        key: _plain(part)
        for key, part in node.items()
        if key not in ("title", "rule") or isinstance(part, dict)
    }


def _text(schema: Schema) -> str:
    return json.dumps(schema, indent=1) + "\n"
