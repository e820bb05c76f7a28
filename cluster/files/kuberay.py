"""Read KubeRay documents (RayCluster, RayJob) without Kubernetes; every refusal is one sentence.

Kubernetes drops fields that it does not know without a word, so a misspelt one is refused here.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.files.capacity import NodeType
from cluster.files.cluster_file import ClusterFile, join
from cluster.files.shape import MOST_NODES, Shape, check_shape
from trainers.errors import MISSING, ConfigError, did_you_mean, printable

GPU = "nvidia.com/gpu"
ENV = "template.spec.containers.0.env"
"""Where a group keeps the environment variables of its Ray container."""
HEAD_OPTIONS = "gcsFaultToleranceOptions"
_API = "ray.io/v1"
_KINDS = ("RayCluster", "RayJob")
_HOW_TO_WRITE = "cluster/kuberay.yaml is an example"
_POD: Shape = {
    "restartPolicy": "text",
    "nodeSelector": {"*": "text"},
    "tolerations": [{"key": "text"}],
    "containers": [
        {
            "image": "text",
            "env": [{"name": "text", "value": "scalar"}],
            "resources": {"limits": {"cpu": "quantity", GPU: "quantity"}},
        }
    ],
}
_GROUP: Shape = {
    "groupName": "text",
    "minReplicas": "count",
    "maxReplicas": "count",
    "numOfHosts": "count",
    "priority": "whole",
    "serviceType": "text",
    "enableIngress": "flag",
    "rayStartParams": {"*": "scalar", "num-cpus": "quantity", "num-gpus": "quantity"},
    "template": {"spec": _POD},
}
_SPEC: Shape = {
    "rayVersion": "scalar",
    "authOptions": {"mode": "text"},
    "autoscalerOptions": {"version": "text"},
    "enableInTreeAutoscaling": "flag",
    HEAD_OPTIONS: {
        "backend": "text",
        "redisAddress": "text",
        "redisPassword": {"value": "text", "valueFrom": {"*": {"*": "scalar"}}},
    },
    "suspend": "flag",
    "headGroupSpec": _GROUP,
    "workerGroupSpecs": [_GROUP],
}
_METADATA: Shape = {"name": "text", "labels": {"*": "text"}, "annotations": {"*": "text"}}
_SHAPES: dict[str, Shape] = {
    "RayCluster": {"metadata": _METADATA, "spec": _SPEC},
    "RayJob": {
        "metadata": _METADATA,
        "spec": {"suspend": "flag", "shutdownAfterJobFinishes": "flag", "rayClusterSpec": _SPEC},
    },
}
# The fields of KubeRay's custom resources (v1, August 2026) at the levels where typing errors would be dropped.
with Path(__file__).with_name("kuberay_fields.csv").open(newline="", encoding="utf-8") as _stream:
    _FIELDS = {row["object"]: row["fields"].split() for row in csv.DictReader(_stream)}


def is_kuberay(documents: list[Any]) -> bool:
    """Return whether the documents are Kubernetes objects: each has a `kind`, which no `ray up` file has."""
    return any(isinstance(document, dict) and "kind" in document for document in documents)


def kuberay_files(documents: list[Any], source: str) -> tuple[ClusterFile, ...]:
    """Read each RayCluster, and each RayJob with a cluster of its own; other objects are skipped."""
    mappings = [document for document in documents if isinstance(document, dict)]
    found = tuple(_cluster_file(document, source) for document in mappings if document.get("kind") in _KINDS)
    if not found:
        kinds = ", ".join(str(document.get("kind")) for document in mappings)
        raise ConfigError("kind", kinds, f"must be one of {', '.join(_KINDS)}", _HOW_TO_WRITE, source)
    return found


def pod_of(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the pod spec of a head or worker group."""
    return (group.get("template") or {}).get("spec") or {}


def container_of(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the Ray container of a group: KubeRay takes the first."""
    containers: list[Mapping[str, Any]] = pod_of(group).get("containers") or [{}]
    return containers[0]


def limits_of(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the Ray container of a group may use at most."""
    return (container_of(group).get("resources") or {}).get("limits") or {}


def groups_of(spec: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the head group and all worker groups of a RayCluster spec by their path in it."""
    workers = enumerate(spec.get("workerGroupSpecs") or [])
    return {"headGroupSpec": spec["headGroupSpec"], **{f"workerGroupSpecs.{index}": group for index, group in workers}}


def quantity(value: object) -> float:
    """Return a Kubernetes quantity of CPUs or GPUs as a number: "500m" is 0.5."""
    text = str(value)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def _cluster_file(document: Mapping[str, Any], source: str) -> ClusterFile:
    kind, metadata = document["kind"], document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    where = f"{source}, {kind} {printable(str(name))}" if name else f"{source}, {kind}"
    try:
        if document.get("apiVersion") != _API:
            raise ConfigError("apiVersion", document.get("apiVersion", MISSING), f"must be {_API}", "correct it")
        check_shape(document, _SHAPES[kind], "", _HOW_TO_WRITE)
        if not name:
            raise ConfigError("metadata.name", MISSING, "is required", "add `name`")
        spec, prefix = _mapping(document, "spec", ""), "spec"
        if kind == "RayJob":
            _known(spec, kind, prefix)
            if "entrypoint" not in spec:
                raise ConfigError("spec.entrypoint", MISSING, "is required", "add the command of the job")
            spec, prefix = _mapping(spec, "rayClusterSpec", prefix), "spec.rayClusterSpec"
        _known(spec, "RayCluster", prefix)
        _known(spec.get(HEAD_OPTIONS) or {}, HEAD_OPTIONS, join(prefix, HEAD_OPTIONS))
        _mapping(spec, "headGroupSpec", prefix)
        types = tuple(_node_type(path, group, join(prefix, path)) for path, group in groups_of(spec).items())
        names = [node_type.name for node_type in types[1:]]
        for index, group_name in enumerate(names):
            if group_name in names[:index]:
                field = f"{prefix}.workerGroupSpecs.{index}.groupName"
                raise ConfigError(field, group_name, "must be another one than those before", "rename the group")
    except ConfigError as error:
        raise error.at(where) from error
    max_workers = sum(node_type.max_workers for node_type in types)
    return ClusterFile(where, name, "kuberay", max_workers, types, written=document, config=spec)


def _node_type(path: str, group: Mapping[str, Any], field: str) -> NodeType:
    kind = path.partition(".")[0]
    is_head = kind == "headGroupSpec"
    _known(group, kind, field)
    for key in ("template",) if is_head else ("groupName", "minReplicas", "maxReplicas", "template"):
        if group.get(key) is None:
            raise ConfigError(join(field, key), MISSING, "is required", f"add `{key}`")
    if not pod_of(group).get("containers"):
        raise ConfigError(f"{field}.template.spec.containers", MISSING, "is required", _HOW_TO_WRITE)
    resources = _resources(group)
    if is_head:
        return NodeType("head", resources, is_head=True)
    low, high, hosts = group["minReplicas"], group["maxReplicas"], group.get("numOfHosts") or 1
    if low > high:
        rule = f"must be at most maxReplicas, {high}"
        raise ConfigError(f"{field}.minReplicas", low, rule, f"write {high} or less, or raise maxReplicas")
    if high * hosts > MOST_NODES:
        rule = f"makes {high * hosts} pods with numOfHosts {hosts}, more than {MOST_NODES}"
        raise ConfigError(f"{field}.maxReplicas", high, rule, "lower one of the two")
    return NodeType(
        name=group["groupName"],
        resources=resources,
        min_workers=low * hosts,
        max_workers=high * hosts,
        instance_type=(pod_of(group).get("nodeSelector") or {}).get("node.kubernetes.io/instance-type"),
        priority=group.get("priority") or 0,
    )


def _resources(group: Mapping[str, Any]) -> dict[str, float]:
    """What a pod gives to Ray: rayStartParams say it, else the limits of its container."""
    limits, start = limits_of(group), group.get("rayStartParams") or {}
    said = {"CPU": start.get("num-cpus", limits.get("cpu")), "GPU": start.get("num-gpus", limits.get(GPU))}
    return {name: quantity(value) for name, value in said.items() if value is not None}


def _mapping(parent: Mapping[str, Any], key: str, field: str) -> Mapping[str, Any]:
    value: Mapping[str, Any] | None = parent.get(key)
    if value is None:
        raise ConfigError(join(field, key), MISSING, "is required", _HOW_TO_WRITE)
    return value


def _known(mapping: Mapping[str, Any], kind: str, field: str) -> None:
    known = _FIELDS[kind]
    for key in mapping:
        if key not in known:
            fix = did_you_mean(key, known, f"the fields here are {', '.join(known)}")
            rule = "is no such field, and Kubernetes would drop it"
            raise ConfigError(join(field, key), mapping[key], rule, fix)
