"""Hold a cluster file of any kind, and check its parts against a schema; needs no Ray."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.files.capacity import NodeType
from trainers.config.yaml import read_text
from trainers.errors import MISSING, ConfigError, did_you_mean

MOST_NODES = 100_000
"""Of one node type: far beyond what Ray runs, and still cheap to count.
cluster/files/schemas.yaml has it as well.
"""


@dataclass(frozen=True)
class ClusterFile:
    """A cluster that Ray or KubeRay would accept, with defaults filled in."""

    source: str
    """The path it was read from, and of several documents which one, for messages."""
    name: str
    provider: str
    """aws, gcp, azure, local, kuberay, ..."""
    max_workers: int
    """The most worker nodes that may be up at once, over all types."""
    node_types: tuple[NodeType, ...]
    written: Mapping[str, Any]
    """What the file says."""
    config: Mapping[str, Any]
    """What Ray makes of it; of a KubeRay document its RayCluster spec."""
    region: str | None = None
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The shell commands by the field they stand in, Ray's defaults where the file has
    none; KubeRay has none.
    """

    @property
    def sum_max_workers(self) -> int:
        """The sum of all types' limits; `max_workers` may be lower or higher."""
        return sum(node_type.max_workers for node_type in self.node_types)


def read_file(path: str | Path) -> str:
    """Return the text of a file of this machine; ConfigError where it is not there."""
    source = str(path)
    try:
        return read_text(Path(path), source)
    except FileNotFoundError as error:
        fix = "give the path of a cluster file"
        raise ConfigError("the file", MISSING, "does not exist", fix, source) from error


def check_bounds(field: str, low: int, high: int, most: str, source: str) -> None:
    """Raise ConfigError where a node type's least number of nodes is above its most."""
    if low > high:
        rule = f"must be at most {most}, {high}"
        fix = f"write {high} or less, or raise {most}"
        raise ConfigError(field, low, rule, fix, source)


def check_schema(
    value: Any, name: str, field: str, how_to_write: str, source: str | None = None
) -> None:
    """Raise ConfigError for the first part of `value` that breaks a schema.

    The schema is one of cluster/files/schemas.yaml.

    `field` is where `value` stands. What is null counts as absent.
    """
    import jsonschema

    validator = jsonschema.Draft202012Validator(_schemas()[name])
    for error in validator.iter_errors(_without_nulls(value)):
        raise schema_error(error, field, how_to_write, source)


def schema_error(
    error: Any, field: str, how_to_write: str, source: str | None
) -> ConfigError:
    """Return a jsonschema.ValidationError as a sentence."""
    for part in error.absolute_path:
        field = join(field, part)
    if error.validator == "additionalProperties":
        known = sorted(error.schema["properties"])
        unknown = next(key for key in error.instance if key not in known)
        fix = did_you_mean(unknown, known, f"the fields here are {', '.join(known)}")
        return ConfigError(
            join(field, unknown),
            error.instance[unknown],
            "is no such field",
            fix,
            source,
        )
    if error.validator == "required":
        missing = next(
            key for key in error.validator_value if key not in error.instance
        )
        return ConfigError(
            join(field, missing), MISSING, "is required", f"add `{missing}`", source
        )
    rules = {
        "type": f"must be of the type {error.validator_value}",
        "minimum": f"must be at least {error.validator_value}",
        "maximum": f"must be at most {error.validator_value}",
        "enum": f"must be one of {error.validator_value}",
        "minItems": "must not be empty",
        "pattern": error.schema.get("rule"),
    }
    rule = rules.get(error.validator) or f"breaks the schema ({error.message[-160:]})"
    options = error.validator_value if error.validator == "enum" else []
    fix = did_you_mean(error.instance, map(str, options), how_to_write)
    return ConfigError(field or "the file", error.instance, rule, fix, source)


def join(field: str, key: object) -> str:
    """Return a dotted path one step deeper."""
    return f"{field}.{key}" if field else str(key)


@functools.cache
def _schemas() -> dict[str, Any]:
    text = Path(__file__).with_name("schemas.yaml").read_text(encoding="utf-8")
    schemas: dict[str, Any] = yaml.safe_load(text)
    return schemas


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(key): _without_nulls(part)
            for key, part in value.items()
            if part is not None
        }
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value
