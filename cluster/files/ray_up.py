"""Read a `ray up` YAML through Ray's own schema and defaults, offline (Ray)."""

import contextlib
import copy
import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.files.capacity import NodeType
from cluster.files.cluster_file import (
    MOST_NODES,
    ClusterFile,
    check_bounds,
    check_schema,
    join,
    read_file,
    schema_error,
)
from cluster.files.kuberay import is_kuberay, kuberay_files
from cluster.files.prices import Price, load_prices
from trainers.config.yaml import parse_documents
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
_HOW_TO_WRITE = "docs.ray.io lists the fields of a cluster YAML"


def load_cluster(path: str | Path) -> ClusterFile:
    """Read and check the first cluster of a file; needs no network and no cloud account.

    Raises ConfigError for what makes the file unusable.
    """
    return load_clusters(path)[0]


def load_clusters(path: str | Path) -> tuple[ClusterFile, ...]:
    """Read all clusters of a file: one of a `ray up` YAML, several of a KubeRay YAML."""
    source = str(path)
    documents = parse_documents(read_file(path), source)
    if is_kuberay(documents):
        return kuberay_files(documents, source)
    return (_ray_up(documents, source),)


def gpus_of(machine: Mapping[str, Any], price: Price | None) -> int | None:
    """Return how many GPUs the machine has, attached or by the price list, where known."""
    attached = machine.get("guestAccelerators")
    if attached:
        return sum(entry.get("acceleratorCount") or 0 for entry in attached)
    return None if price is None else price.gpus


def google_scheduling_of(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return Google Cloud's `scheduling`, which Ray's examples write as a list."""
    scheduling = machine.get("scheduling") or {}
    parts = scheduling if isinstance(scheduling, list) else [scheduling]
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= part
    return merged


def _ray_up(documents: list[Any], source: str) -> ClusterFile:
    from trainers.on_ray.internals import check_cluster_file, filled_in

    if len(documents) != 1 or not isinstance(documents[0], dict):
        rule = "must be one mapping of fields to values"
        raise ConfigError("the file", MISSING, rule, _HOW_TO_WRITE, source)
    written = documents[0]
    if "provider" not in written and "run" in written:
        rule = "is a task of SkyPilot's"
        raise ConfigError(
            "the file", MISSING, rule, "ask `sky launch --dryrun FILE`", source
        )
    # What the file itself says, before the defaults, which crash on a wrong type.
    shape = {
        "cluster_name": "default",
        "cluster_synced_files": [],
        "max_workers": 2**31,
        **written,
    }
    shape.pop("min_workers", None)
    # Ray takes them out before it validates, where they are empty.
    for legacy in ("head_node", "worker_nodes"):
        if not shape.get(legacy):
            shape.pop(legacy, None)
    if isinstance(written.get("available_node_types"), dict):
        _check_types(written, source)
    with _asking_ray(source):
        check_cluster_file(shape)
    check_schema(written, "ray_up", "", _HOW_TO_WRITE, source)
    with _asking_ray(source):
        config = filled_in(copy.deepcopy(written))
        check_cluster_file(config)
    _check_counts(config, source)
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
    """Raise ConfigError for what Ray refuses, and keep its remarks off the terminal."""
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
        raise schema_error(error, "", _HOW_TO_WRITE, source) from error
    except (Exception, SystemExit) as error:  # with provider local Ray prints and exits
        rule = f"is refused by Ray ({first_line(error)})"
        raise ConfigError("the file", MISSING, rule, _HOW_TO_WRITE, source) from error
    finally:
        logger.setLevel(level)


def _check_types(written: Mapping[str, Any], source: str) -> None:
    types = written["available_node_types"]
    provider = written.get("provider")
    if isinstance(provider, dict) and provider.get("type") == "local":
        rule = "has no effect with provider local"
        raise ConfigError(
            "available_node_types",
            MISSING,
            rule,
            "remove it; Ray asks the hosts",
            source,
        )
    head = written.get("head_node_type", MISSING)
    if str(head) not in types:
        fix = did_you_mean(head, types, f"name one of {', '.join(map(str, types))}")
        raise ConfigError(
            "head_node_type", head, "must be one of available_node_types", fix, source
        )


def _check_counts(config: Mapping[str, Any], source: str) -> None:
    # Of provider local Ray makes one type of the fields at the top.
    is_local = config["provider"]["type"] == "local"
    for name, node_type in config["available_node_types"].items():
        place = "" if is_local else f"available_node_types.{name}"
        check_bounds(
            join(place, "min_workers"),
            node_type["min_workers"],
            node_type["max_workers"],
            "its max_workers",
            source,
        )


def _commands(
    written: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """Return the commands by the field they stand in.

    Ray puts setup_commands before those of head and workers.
    """
    shared = len(config["setup_commands"])
    defaults = {
        field: config[field][shared if field in _SETUP_FIELDS else 0 :]
        for field in _COMMAND_FIELDS
    }
    return {
        field: tuple(written.get(field, defaults[field])) for field in _COMMAND_FIELDS
    }


def _node_types(
    config: Mapping[str, Any], commands: Mapping[str, Sequence[str]]
) -> tuple[NodeType, ...]:
    """Return the node types of a configuration that Ray has prepared.

    With provider local Ray has one type, which is head and workers; here they are two,
    because the head may be started with other resources.
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
        # AWS is asked for what a file leaves out; offline the price list knows it of
        # some types.
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
    google = google_scheduling_of(machine)
    azure = machine.get("azure_arm_parameters") or {}
    on_google = (
        bool(google.get("preemptible")) or google.get("provisioningModel") == "SPOT"
    )
    return (
        on_google or aws.get("MarketType") == "spot" or azure.get("priority") == "Spot"
    )


def _started_with(commands: Sequence[str]) -> dict[str, float]:
    """Return the resources that `ray start` is told; others it finds on the host."""
    text = " ".join(
        command.split("ray start", 1)[1]
        for command in commands
        if "ray start" in command
    )
    told = re.findall(r"--num-(cpu|gpu)s[=\s]+(\d+)", text)
    return {name.upper(): min(float(amount), MOST_NODES) for name, amount in told}
