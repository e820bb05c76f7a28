"""Pure: the node types of a prepared `ray up` configuration: machine, resources, spot or not."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.files.capacity import NodeType
from cluster.files.prices import Price, load_prices
from cluster.files.shape import MOST_NODES

# Google's accelerator types carry the number of GPUs in their name: a2-highgpu-8g.
_GPUS_IN_NAME = re.compile(r"a[234]-\w+-(\d{1,4})g(?:-\w+)?")


def node_types(config: Mapping[str, Any], commands: Mapping[str, Sequence[str]]) -> tuple[NodeType, ...]:
    """Return the node types of a configuration that Ray has prepared.

    With provider local Ray has one type, which is head and workers; here they are two, because the head may
    be started with other resources.
    """
    if config["provider"]["type"] == "local":
        return _local(config, commands)
    known = load_prices(config["provider"]["type"])
    result = []
    for name, node_type in config["available_node_types"].items():
        machine: Mapping[str, Any] = node_type["node_config"]
        instance_type = instance_type_of(machine)
        price = known.get(instance_type) if instance_type else None
        # AWS is asked for what a file leaves out; offline the price list knows it of some types.
        detected = {"CPU": price.vcpus, "GPU": price.gpus} if price and price.provider == "aws" else {}
        result.append(
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
    return tuple(result)


def instance_type_of(machine: Mapping[str, Any]) -> str | None:
    """Return the cloud's name of the machine in a `node_config` of AWS, Google Cloud or Azure."""
    azure = machine.get("azure_arm_parameters") or {}
    return machine.get("InstanceType") or machine.get("machineType") or azure.get("vmSize")


def gpus_of(machine: Mapping[str, Any], price: Price | None) -> int | None:
    """Return how many GPUs the machine has: attached ones, by the price list, or by its name; None when unknown."""
    if attached := machine.get("guestAccelerators"):
        return sum(entry.get("acceleratorCount") or 0 for entry in attached)
    if price is not None:
        return price.gpus
    match = _GPUS_IN_NAME.fullmatch(instance_type_of(machine) or "")
    return int(match[1]) if match else None


def scheduling_of(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return Google Cloud's `scheduling`, which Ray's own examples write as a list of mappings."""
    scheduling = machine.get("scheduling") or {}
    parts = scheduling if isinstance(scheduling, list) else [scheduling]
    return {key: value for part in parts for key, value in part.items()}


def _is_spot(machine: Mapping[str, Any]) -> bool:
    google, azure = scheduling_of(machine), machine.get("azure_arm_parameters") or {}
    aws = machine.get("InstanceMarketOptions") or {}
    on_google = bool(google.get("preemptible")) or google.get("provisioningModel") == "SPOT"
    return on_google or aws.get("MarketType") == "spot" or azure.get("priority") == "Spot"


def _local(config: Mapping[str, Any], commands: Mapping[str, Sequence[str]]) -> tuple[NodeType, ...]:
    counts = config["available_node_types"][config["head_node_type"]]
    head = NodeType("head", _started_with(commands["head_start_ray_commands"]), is_head=True)
    workers = _started_with(commands["worker_start_ray_commands"])
    return head, NodeType("worker", workers, counts["min_workers"], counts["max_workers"])


def _started_with(commands: Sequence[str]) -> dict[str, float]:
    """The resources that `ray start` is told; what it is not told it finds on the host."""
    text = " ".join(command.split("ray start", 1)[1] for command in commands if "ray start" in command)
    told = re.findall(r"--num-(cpu|gpu)s[=\s]+(\d+)", text)
    return {name.upper(): min(float(amount), MOST_NODES) for name, amount in told}
