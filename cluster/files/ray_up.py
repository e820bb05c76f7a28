"""Read a `ray up` YAML through Ray's own schema and defaults, offline (Ray)."""

import contextlib
import copy
import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.files.capacity import NodeType, Price, load_prices
from trainers.config.yaml import parse_documents, read_text
from trainers.errors import MISSING, ConfigError, did_you_mean, first_line

HEAD = "head_start_ray_commands"
WORKER = "worker_start_ray_commands"
_SETUP_FIELDS = ("head_setup_commands", "worker_setup_commands")
_COMMAND_FIELDS = (
    "initialization_commands",
    "setup_commands",
    *_SETUP_FIELDS,
    HEAD,
    WORKER,
)
_HOW_TO_WRITE = "see docs.ray.io for the fields of a cluster YAML"
_SCHEMA = Path(__file__).with_name("schema.yaml")
"""A schema for the fields that Ray's schema leaves untyped, so that rules see
typed data. Null values count as absent.
"""


@dataclass(frozen=True)
class ClusterFile:
    """A cluster that Ray would accept, with defaults filled in."""

    source: str
    """The path that the file was read from, for messages."""
    name: str
    provider: str
    """aws, gcp, azure, local, ..."""
    max_workers: int
    """The most worker nodes of all types that may be up at the same time."""
    node_types: tuple[NodeType, ...]
    written: Mapping[str, Any]
    """The file's own content."""
    config: Mapping[str, Any]
    """The configuration that Ray makes of the file's content, with defaults."""
    region: str | None = None
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The shell commands by their field, each on one line where a backslash
    continues it; Ray's defaults for fields that the file leaves out.
    """

    @property
    def sum_max_workers(self) -> int:
        """The sum of all types' limits; `max_workers` may be lower or higher."""
        return sum(node_type.max_workers for node_type in self.node_types)


def load_cluster(path: str | Path) -> ClusterFile:
    """Read and check a `ray up` YAML; needs no network and no cloud account.

    Raises ConfigError if the file is unusable.
    """
    source = str(path)
    return _ray_up(parse_documents(read_file(path), source), source)


def read_file(path: str | Path) -> str:
    """Return the text of a local file; raise ConfigError if it cannot be read."""
    return read_text(Path(path), str(path))


def gpus_of(machine: Mapping[str, Any], price: Price | None) -> int | None:
    """Return how many GPUs a machine has, attached or by price list; None if unknown."""
    attached = machine.get("guestAccelerators")
    if attached:
        return sum(entry.get("acceleratorCount") or 0 for entry in attached)
    return None if price is None else price.gpus


def _google_scheduling(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return Google Cloud's `scheduling`, which Ray's examples write as a list."""
    scheduling = machine.get("scheduling") or {}
    parts = scheduling if isinstance(scheduling, list) else [scheduling]
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= part
    return merged


def _ray_up(documents: list[Any], source: str) -> ClusterFile:
    from jsonschema import Draft202012Validator

    from trainers.on_ray.internals import check_cluster_file, filled_in

    written = documents[0] if documents else None
    if len(documents) != 1 or not isinstance(written, dict):
        raise ConfigError(
            "the file",
            MISSING,
            "must be one mapping of fields to values",
            _HOW_TO_WRITE,
            source,
        )
    schema = yaml.safe_load(_SCHEMA.read_text(encoding="utf-8"))
    with _asking_ray(source):
        Draft202012Validator(schema).validate(_without_nulls(written))
        config = filled_in(copy.deepcopy(written))
        check_cluster_file(config)
    provider = config["provider"]
    commands = _commands(written, config)
    return ClusterFile(
        source=source,
        name=config["cluster_name"],
        provider=provider["type"],
        region=provider.get("region") or provider.get("location"),
        max_workers=config["max_workers"],
        node_types=_node_types(config, commands),
        written=written,
        config=config,
        commands=commands,
    )


@contextlib.contextmanager
def _asking_ray(source: str) -> Iterator[None]:
    """Raise ConfigError if this block refuses the file, and suppress Ray's output."""
    import jsonschema

    logger = logging.getLogger("ray.autoscaler")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    except jsonschema.ValidationError as error:
        raise _schema_error(error, source) from error
    except (
        Exception,
        SystemExit,
    ) as error:  # with provider local Ray prints and exits
        raise ConfigError(
            "the file",
            MISSING,
            f"is refused by Ray ({first_line(error)})",
            _HOW_TO_WRITE,
            source,
        ) from error
    finally:
        logger.setLevel(level)


def _commands(
    written: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """Return the shell commands by their field.

    Ray prepends setup_commands to the setup commands of head and workers; this
    function removes them again.
    """
    shared = len(config["setup_commands"])
    defaults = {
        field: config[field][shared if field in _SETUP_FIELDS else 0 :]
        for field in _COMMAND_FIELDS
    }
    commands = {**defaults, **written}
    found = {field: commands[field] for field in _COMMAND_FIELDS}
    for name, node_type in config["available_node_types"].items():
        for key in ("initialization_commands", "worker_setup_commands"):
            found[f"available_node_types.{name}.{key}"] = node_type.get(
                key, ()
            )
    return {
        field: tuple(line.replace("\\\n", " ") for line in lines)
        for field, lines in found.items()
    }


def _node_types(
    config: Mapping[str, Any], commands: Mapping[str, Sequence[str]]
) -> tuple[NodeType, ...]:
    """Return the node types of a configuration that Ray has prepared.

    With provider local, Ray has a single type for head and workers. Here they
    are two types, because the head may be started with other resources.
    """
    provider = config["provider"]["type"]
    if provider == "local":
        counts = config["available_node_types"][config["head_node_type"]]
        head = NodeType("head", _started_with(commands[HEAD]), is_head=True)
        workers = _started_with(commands[WORKER])
        return head, NodeType(
            "worker", workers, counts["min_workers"], counts["max_workers"]
        )
    known = load_prices(provider)
    found = []
    for name, node_type in config["available_node_types"].items():
        machine = node_type["node_config"]
        azure = machine.get("azure_arm_parameters") or {}
        instance_type = (
            machine.get("InstanceType")
            or machine.get("machineType")
            or azure.get("vmSize")
        )
        price = known.get(instance_type or "")
        # On AWS, Ray asks the cloud for resources that a file leaves out. For
        # some types, the price list gives them offline.
        detected = (
            {"CPU": price.vcpus, "GPU": price.gpus}
            if price and provider == "aws"
            else {}
        )
        found.append(
            NodeType(
                name=name,
                resources={**detected, **node_type["resources"]},
                min_workers=node_type["min_workers"],
                max_workers=node_type["max_workers"],
                is_head=name == config["head_node_type"],
                instance_type=instance_type,
                spot=_is_spot(machine),
                priority=node_type.get("priority") or 0,
            )
        )
    return tuple(found)


def _is_spot(machine: Mapping[str, Any]) -> bool:
    aws = machine.get("InstanceMarketOptions") or {}
    google = _google_scheduling(machine)
    azure = machine.get("azure_arm_parameters") or {}
    on_google = (
        bool(google.get("preemptible"))
        or google.get("provisioningModel") == "SPOT"
    )
    return (
        on_google
        or aws.get("MarketType") == "spot"
        or azure.get("priority") == "Spot"
    )


def _started_with(commands: Sequence[str]) -> dict[str, float]:
    """Return the resources given to `ray start`, which detects all others itself."""
    text = " ".join(
        command.split("ray start", 1)[1]
        for command in commands
        if "ray start" in command
    )
    told = re.findall(r"--num-(cpu|gpu)s[=\s]+(\d+)", text)
    return {name.upper(): float(amount) for name, amount in told}


def _schema_error(error: Any, source: str) -> ConfigError:
    """Convert a jsonschema.ValidationError to a ConfigError, with a rule and a fix."""
    field = ""
    for part in error.absolute_path:
        field = _join(field, part)
    value: Any = MISSING
    rule = (
        f"does not match the schema of cluster files ({error.message[-160:]})"
    )
    fix = _HOW_TO_WRITE
    if error.validator == "additionalProperties":
        known = sorted(error.schema["properties"])
        unknown = next(key for key in error.instance if key not in known)
        rule = "is not a known field"
        fix = did_you_mean(unknown, known, f"use one of {', '.join(known)}")
        field = _join(field, unknown)
        value = error.instance[unknown]
    return ConfigError(field or "the file", value, rule, fix, source)


def _join(field: str, key: object) -> str:
    """Append a key to a dotted path."""
    return f"{field}.{key}" if field else str(key)


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
