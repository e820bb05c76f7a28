"""What the machines of a `ray up` file have and may do, against what the file says of them."""

from collections.abc import Iterator, Mapping
from typing import Any

from cluster.files.capacity import NodeType
from cluster.files.cluster_file import ClusterFile
from cluster.files.node_types import gpus_of, scheduling_of
from cluster.files.prices import load_prices
from cluster.finding import Finding, error, warning
from cluster.rules.sentences import HEAD_WORKS, HEAD_WORKS_FIX
from trainers.errors import MISSING


def machine_findings(cluster: ClusterFile) -> Iterator[Finding]:
    """Find resources that the machine does not have, GPUs left idle, training on the head, GPUs that cannot start."""
    known = load_prices(cluster.provider)
    for node_type in cluster.node_types:
        field = f"available_node_types.{node_type.name}"
        machine = _node_config(cluster, node_type)
        price = known.get(node_type.instance_type or "")
        actual = {"CPU": price.vcpus if price else None, "GPU": gpus_of(machine, price)}
        for resource, has in actual.items():
            yield from _resource(node_type, resource, has, f"{field}.resources.{resource}")
        must_stop = cluster.provider == "gcp" and node_type.resources.get("GPU")
        if must_stop and scheduling_of(machine).get("onHostMaintenance") != "TERMINATE":
            where = f"{field}.node_config.scheduling.onHostMaintenance"
            rule = "must be TERMINATE, or Google Cloud refuses a machine with GPUs"
            yield error(where, MISSING, rule, "write `scheduling: {onHostMaintenance: TERMINATE}`")


def access_findings(cluster: ClusterFile, storage: str) -> Iterator[Finding]:
    """Find workers that may not write to `storage`; Ray gives its own account to the head only."""
    scheme = storage.split("://")[0]
    if cluster.provider == "azure" and scheme in ("abfs", "abfss"):
        for missing in sorted({"msi_name", "msi_resource_group"} - set(cluster.config["provider"])):
            rule = "must name an identity that may write to the container: Ray's own may only start machines"
            fix = f"add `{missing}` of an identity with the role Storage Blob Data Contributor"
            yield warning(f"provider.{missing}", MISSING, rule, fix)
    keys = {("aws", "s3"): "IamInstanceProfile", ("gcp", "gs"): "serviceAccounts"}
    key = keys.get((cluster.provider, scheme))
    for node_type in cluster.node_types:
        if key and not node_type.is_head and not _node_config(cluster, node_type).get(key):
            field = f"available_node_types.{node_type.name}.node_config.{key}"
            rule = f"must let workers write to {scheme}://, which Ray arranges for the head only"
            yield warning(field, MISSING, rule, f"add `{key}` of an account that may use the bucket")


def _resource(node_type: NodeType, resource: str, has: int | None, field: str) -> Iterator[Finding]:
    said = node_type.resources.get(resource, 0)
    machine = node_type.instance_type or "machine with these accelerators"
    if has is not None and said > has:
        rule = f"must be at most {has}, which is what a {machine} has"
        yield error(field, said, rule, f"write {has}, or take a larger machine")
    elif node_type.is_head and said:
        yield warning(field, said, HEAD_WORKS, f"write 0, {HEAD_WORKS_FIX}")
    elif has and resource == "GPU" and said < has and not node_type.is_head:
        rule = f"leaves GPUs idle that are paid for: a {machine} has {has}"
        yield warning(field, said, rule, f"write {has}")


def _node_config(cluster: ClusterFile, node_type: NodeType) -> Mapping[str, Any]:
    types: Mapping[str, Any] = cluster.config["available_node_types"]
    return types.get(node_type.name, {}).get("node_config", {})  # type: ignore[no-any-return]
