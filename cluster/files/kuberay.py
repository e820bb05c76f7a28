"""Read KubeRay documents (RayCluster, RayJob) without Kubernetes; every refusal is one sentence.

Kubernetes drops fields that it does not know without a word, so a misspelt one is refused here.
"""

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.files.capacity import NodeType
from cluster.files.cluster_file import ClusterFile, join
from trainers.errors import MISSING, ConfigError, did_you_mean

GPU = "nvidia.com/gpu"
_API = "ray.io/v1"
_KINDS = ("RayCluster", "RayJob")
_HOW_TO_WRITE = "cluster/kuberay.yaml is an example"
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
    return (group["template"].get("spec") or {}) if isinstance(group.get("template"), dict) else {}


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
    kind, name = document["kind"], (document.get("metadata") or {}).get("name")
    where = f"{source}, {kind} {name}" if name else f"{source}, {kind}"
    try:
        if document.get("apiVersion") != _API:
            raise ConfigError("apiVersion", document.get("apiVersion", MISSING), f"must be {_API}", "correct it")
        if not name:
            raise ConfigError("metadata.name", MISSING, "is required", "add `name`")
        spec, prefix = _mapping(document, "spec", ""), "spec"
        if kind == "RayJob":
            _known(spec, kind, prefix)
            if "entrypoint" not in spec:
                raise ConfigError("spec.entrypoint", MISSING, "is required", "add the command of the job")
            spec, prefix = _mapping(spec, "rayClusterSpec", prefix), "spec.rayClusterSpec"
        _known(spec, "RayCluster", prefix)
        _mapping(spec, "headGroupSpec", prefix)
        types = tuple(_node_type(path, group, join(prefix, path)) for path, group in groups_of(spec).items())
    except ConfigError as error:
        raise error.at(where) from error
    max_workers = sum(node_type.max_workers for node_type in types)
    return ClusterFile(where, name, "kuberay", max_workers, types, written=document, config=spec)


def _node_type(path: str, group: Any, field: str) -> NodeType:
    kind = path.partition(".")[0]
    is_head = kind == "headGroupSpec"
    if not isinstance(group, dict):
        raise ConfigError(field, group, "must be a mapping", _HOW_TO_WRITE)
    _known(group, kind, field)
    for key in ("template",) if is_head else ("groupName", "minReplicas", "maxReplicas", "template"):
        if key not in group:
            raise ConfigError(join(field, key), MISSING, "is required", f"add `{key}`")
    if not pod_of(group).get("containers"):
        raise ConfigError(f"{field}.template.spec.containers", MISSING, "is required", _HOW_TO_WRITE)
    resources = _resources(group, field)
    if is_head:
        return NodeType("head", resources, is_head=True)
    for key in ("minReplicas", "maxReplicas"):
        if not isinstance(group[key], int) or isinstance(group[key], bool) or group[key] < 0:
            raise ConfigError(join(field, key), group[key], "must be a whole number of at least 0", "correct it")
    low, high, hosts = group["minReplicas"], group["maxReplicas"], group.get("numOfHosts", 1)
    if low > high:
        rule = f"must be at most maxReplicas, {high}"
        raise ConfigError(f"{field}.minReplicas", low, rule, f"write {high} or less, or raise maxReplicas")
    return NodeType(
        name=group["groupName"],
        resources=resources,
        min_workers=low * hosts,
        max_workers=high * hosts,
        instance_type=(pod_of(group).get("nodeSelector") or {}).get("node.kubernetes.io/instance-type"),
        priority=group.get("priority", 0),
    )


def _resources(group: Mapping[str, Any], field: str) -> dict[str, float]:
    """What a pod gives to Ray: rayStartParams say it, else the limits of its container."""
    limits, start = limits_of(group), group.get("rayStartParams") or {}
    found: dict[str, float] = {}
    for name, flag, limit in (("CPU", "num-cpus", "cpu"), ("GPU", "num-gpus", GPU)):
        value = start.get(flag, limits.get(limit))
        try:
            found |= {} if value is None else {name: quantity(value)}
        except ValueError as error:
            raise ConfigError(join(field, flag), value, "must be a number", "correct it") from error
    return found


def _mapping(parent: Mapping[str, Any], key: str, field: str) -> Mapping[str, Any]:
    value = parent.get(key)
    if not isinstance(value, dict):
        rule = "is required" if value is None else "must be a mapping"
        raise ConfigError(join(field, key), MISSING if value is None else value, rule, _HOW_TO_WRITE)
    return value


def _known(mapping: Mapping[str, Any], kind: str, field: str) -> None:
    known = _FIELDS[kind]
    for key in mapping:
        if key not in known:
            fix = did_you_mean(key, known, f"the fields here are {', '.join(known)}")
            rule = "is no such field, and Kubernetes would drop it"
            raise ConfigError(join(field, re.sub(r"\s", "", str(key))), mapping[key], rule, fix)
