"""Read KubeRay documents (RayCluster, RayJob) without Kubernetes.

Kubernetes drops fields that it does not know without a word, so a misspelt one is
refused here.
"""

from collections.abc import Mapping
from typing import Any

from cluster.files.capacity import NodeType
from cluster.files.cluster_file import ClusterFile, check_bounds, check_schema, join
from trainers.errors import ConfigError, printable

GPU = "nvidia.com/gpu"
ENV = "template.spec.containers.0.env"
"""Where a group keeps the environment variables of its Ray container."""
_KINDS = ("RayCluster", "RayJob")
_HOW_TO_WRITE = "cluster/kuberay.yaml is an example"


def is_kuberay(documents: list[Any]) -> bool:
    """Return whether the documents are Kubernetes objects, of which each has a `kind`."""
    return any(
        isinstance(document, dict) and "kind" in document for document in documents
    )


def kuberay_files(documents: list[Any], source: str) -> tuple[ClusterFile, ...]:
    """Read each RayCluster, and each RayJob with its own; skip other objects."""
    mappings = [document for document in documents if isinstance(document, dict)]
    found = tuple(
        _cluster_file(document, source)
        for document in mappings
        if document.get("kind") in _KINDS
    )
    if not found:
        kinds = ", ".join(str(document.get("kind")) for document in mappings)
        raise ConfigError(
            "kind", kinds, f"must be one of {', '.join(_KINDS)}", _HOW_TO_WRITE, source
        )
    return found


def pod_of(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the pod spec of a head or worker group."""
    pod: Mapping[str, Any] = group["template"]["spec"]
    return pod


def container_of(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the Ray container of a group: KubeRay takes the first."""
    container: Mapping[str, Any] = pod_of(group)["containers"][0]
    return container


def resources_of(
    group: Mapping[str, Any], resource: str, limit: str
) -> tuple[float | None, float]:
    """Return how many CPUs or GPUs `rayStartParams` tell Ray, and the container's limit.

    The first is None where they tell nothing.
    """
    start = group.get("rayStartParams") or {}
    limits = (container_of(group).get("resources") or {}).get("limits") or {}
    told = start.get(f"num-{resource.lower()}s")
    return None if told is None else _quantity(told), _quantity(limits.get(limit) or 0)


def groups_of(spec: Mapping[str, Any], prefix: str) -> dict[str, Mapping[str, Any]]:
    """Return the head group and all worker groups of a RayCluster spec by their path."""
    groups = {join(prefix, "headGroupSpec"): spec["headGroupSpec"]}
    for index, group in enumerate(spec.get("workerGroupSpecs") or []):
        groups[join(prefix, f"workerGroupSpecs.{index}")] = group
    return groups


def prefix_of(document: Mapping[str, Any]) -> str:
    """Return where the spec of the RayCluster stands in a document."""
    return "spec.rayClusterSpec" if document["kind"] == "RayJob" else "spec"


def _quantity(value: object) -> float:
    """Return a Kubernetes quantity of CPUs or GPUs as a number: "500m" is 0.5."""
    text = str(value)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def _cluster_file(document: Mapping[str, Any], source: str) -> ClusterFile:
    kind = document["kind"]
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    where = f"{source}, {kind} {printable(str(name))}" if name else f"{source}, {kind}"
    check_schema(document, "kubernetes", "", _HOW_TO_WRITE, where)
    check_schema(document["spec"], kind, "spec", _HOW_TO_WRITE, where)
    spec = document["spec"]["rayClusterSpec"] if kind == "RayJob" else document["spec"]
    groups = groups_of(spec, prefix_of(document))
    types = tuple(_node_type(field, group, where) for field, group in groups.items())
    names = [node_type.name for node_type in types[1:]]
    if len(set(names)) < len(names):
        field = f"{prefix_of(document)}.workerGroupSpecs"
        raise ConfigError(
            field, names, "must have another groupName each", "rename a group", where
        )
    max_workers = sum(node_type.max_workers for node_type in types)
    return ClusterFile(
        where, str(name), "kuberay", max_workers, types, written=document, config=spec
    )


def _node_type(field: str, group: Mapping[str, Any], source: str) -> NodeType:
    resources = {}
    for resource, limit in (("CPU", "cpu"), ("GPU", GPU)):
        told, at_most = resources_of(group, resource, limit)
        if told is not None or at_most:
            resources[resource] = at_most if told is None else told
    if field.endswith("headGroupSpec"):
        return NodeType("head", resources, is_head=True)
    low = group["minReplicas"]
    high = group["maxReplicas"]
    check_bounds(f"{field}.minReplicas", low, high, "maxReplicas", source)
    num_hosts = group.get("numOfHosts") or 1
    return NodeType(
        name=group["groupName"],
        resources=resources,
        min_workers=low * num_hosts,
        max_workers=high * num_hosts,
        instance_type=(pod_of(group).get("nodeSelector") or {}).get(
            "node.kubernetes.io/instance-type"
        ),
        priority=group.get("priority") or 0,
    )
