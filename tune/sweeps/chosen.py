"""The cluster file of a choice of machines: the user's, with other workers, and in another region where it says so."""

import copy
from collections.abc import Mapping
from typing import Any

from cluster.files.cluster_file import ClusterFile
from cluster.files.prices import Price, all_prices
from trainers.errors import MISSING, ConfigError
from tune.sweeps.deadline import Choice

_REGIONAL = ("SubnetId", "SubnetIds", "SecurityGroupIds", "NetworkInterfaces", "KeyName")
"""What a machine of AWS is told that is there in one region only, beside images by their id."""


def cluster_yaml(cluster: ClusterFile, choice: Choice) -> dict[str, Any]:
    """Return the cluster file with the chosen machines in place of its workers: spot first, on-demand to fall back to.

    Raises ConfigError where the file has no node type of that kind to take image, disk and role from, or names what
    another region does not have.
    """
    tree, price = copy.deepcopy(dict(cluster.written)), choice.offer.price
    if price.region != cluster.region:
        tree = _moved(tree, cluster, price)
    types = tree["available_node_types"]
    wanted = {"workers_spot": True, "workers_on_demand": False} if choice.is_spot else {"workers_on_demand": False}
    made = {}
    for name, is_spot in wanted.items():
        pattern = next((one.name for one in cluster.node_types if not one.is_head and one.spot is is_spot), None)
        if pattern is None:
            kind = "spot" if is_spot else "on-demand"
            rule = f"has no {kind} node type, whose image, disk and role could be taken"
            raise ConfigError("available_node_types", MISSING, rule, "add one", cluster.source)
        node_type = copy.deepcopy(types[pattern])
        machine = node_type["node_config"]
        place = machine.get("azure_arm_parameters", machine)
        key = next(key for key in ("InstanceType", "machineType", "vmSize") if key in place)
        place[key] = price.instance_type
        machine.pop("guestAccelerators", None)
        resources = {"CPU": price.vcpus} | ({"GPU": price.gpus} if price.gpus else {})
        limits = {"min_workers": 0, "max_workers": choice.num_nodes, "priority": 10 if is_spot else 0}
        made[name] = node_type | limits | {"resources": resources}
    heads = {one.name: types[one.name] for one in cluster.node_types if one.is_head}
    return tree | {"max_workers": choice.num_nodes, "available_node_types": heads | made}


def _moved(tree: dict[str, Any], cluster: ClusterFile, price: Price) -> dict[str, Any]:
    """The cluster file for another region; raises ConfigError where it names what that one does not have."""
    provider, region = dict(tree["provider"]), price.region
    if cluster.provider == "aws":
        for name, node_type in tree["available_node_types"].items():
            machine = node_type["node_config"]
            kept = [key for key in _REGIONAL if key in machine]
            kept += ["ImageId"] if str(machine.get("ImageId")).startswith("ami-") else []
            if kept:
                field = f"available_node_types.{name}.node_config.{kept[0]}"
                rule = f"belongs to {cluster.region}, and the choice is in {region}"
                fix = f"give --region {cluster.region}, or leave it out of the file"
                raise ConfigError(field, machine[kept[0]], rule, fix, cluster.source)
        provider.pop("availability_zone", None)  # Ray takes all of the region
        return tree | {"provider": provider | {"region": region}}
    if cluster.provider == "azure":
        return tree | {"provider": provider | {"location": region}}
    zones = price.zones.split()
    heads = [one.instance_type for one in cluster.node_types if one.is_head]
    head = all_prices().get(("gcp", heads[0] or "", region))
    zones = [zone for zone in zones if head is None or zone in head.zones.split()]
    if not zones:
        rule = f"is not known in {region} for {price.instance_type} and the head"
        raise ConfigError(
            "provider.availability_zone", MISSING, rule, f"give --region {cluster.region}", cluster.source
        )
    old = {str(provider.get("availability_zone")): zones[0], str(cluster.region): region}
    types = _replaced(tree["available_node_types"], old)
    moved = provider | {"region": region, "availability_zone": zones[0]}
    return tree | {"provider": moved, "available_node_types": types}


def _replaced(part: Any, names: Mapping[str, str]) -> Any:
    """A tree whose paths (projects/P/zones/ZONE/diskTypes/D) have other names in them."""
    if isinstance(part, dict):
        return {key: _replaced(value, names) for key, value in part.items()}
    if isinstance(part, list):
        return [_replaced(value, names) for value in part]
    return "/".join(names.get(step, step) for step in part.split("/")) if isinstance(part, str) else part
