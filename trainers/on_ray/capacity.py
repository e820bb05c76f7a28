"""What the connected cluster has, and may grow to by its cluster file (Ray).

Ray has a register for the latter, which its own autoscaler of 2.60 leaves empty (ray
pull request 63012). So the file is read where a job's driver finds it: on the head of a
`ray up` cluster, and in a pod of KubeRay's from Kubernetes.

Environment read: RAY_ADDRESS, without which a cluster is embedded and never grows; in
Kubernetes RAY_CLUSTER_NAME and KUBERNETES_SERVICE_HOST, which KubeRay and Kubernetes
set.
"""

import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from trainers.config.yaml import parse_documents, read_text
from trainers.on_ray.environment import embedded
from trainers.on_ray.internals import cluster_config, kuberay_config

logger = logging.getLogger(__name__)

BOOTSTRAP = Path("~/ray_bootstrap_config.yaml")
"""Where `ray up` leaves the file on the head, with the resources of every type filled
in.
"""
_HEAD = "node:__internal_head__"
_JOIN_S = 60
_LOOK_S = 1.0
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def capacity() -> dict[str, float]:
    """Return all that the cluster has, or may grow to by its cluster file."""
    now = {name: float(amount) for name, amount in ray.cluster_resources().items()}
    grown = Counter[str]()
    for resources in nodes_at_most():
        grown.update(resources)
    return {
        name: max(now.get(name, 0.0), float(grown.get(name, 0))) for name in now | grown
    }


def nodes_at_most() -> list[dict[str, float]]:
    """Return the resources of each node that the cluster file allows.

    The head is among them; none where that is unknown.
    """
    config = cluster_config()
    if config is not None and config.node_group_configs:
        return [
            dict(group.resources)
            for group in config.node_group_configs
            for _ in range(max(0, group.max_count))
        ]
    file = _file(ray.get_runtime_context().get_node_id())
    if _sizes_unknown(file):
        _wait_for_a_worker()
    return allowed(file, max(_workers_up(), key=_size, default={}))


def _workers_up() -> list[dict[str, float]]:
    return [
        node["Resources"]
        for node in ray.nodes()
        if node["Alive"] and _HEAD not in node["Resources"]
    ]


@functools.cache
def _wait_for_a_worker() -> None:
    """Wait, once a process, for a first worker.

    A job may be submitted while the hosts of `ray up` are still joining.
    """
    deadline = time.monotonic() + _JOIN_S
    if not _workers_up():
        logger.info(
            "no worker has joined the cluster yet: waiting %d s at most", _JOIN_S
        )
    while not _workers_up() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _sizes_unknown(config: Mapping[str, Any]) -> bool:
    """Return whether the file does not say how large workers are: hosts of one's own."""
    types = (config.get("available_node_types") or {}).values()
    return any(
        one.get("max_workers") and not _numbers(one.get("resources") or {})
        for one in types
    )


def allowed(
    config: Mapping[str, Any], like: Mapping[str, Any] | None = None
) -> list[dict[str, float]]:
    """Return the resources of each node that a file prepared by Ray allows.

    Within every type's limit and the cluster's, largest nodes first.

    `like`: the resources of a worker that is up, which stand for hosts of one's own,
    whose size the file does not say.
    """
    types: Mapping[str, Mapping[str, Any]] = config.get("available_node_types") or {}
    head = config.get("head_node_type")
    sizes = {
        name: _numbers(node_type.get("resources") or {})
        for name, node_type in types.items()
    }
    usual = _numbers(like or {})
    workers = [
        sizes[name] or usual
        for name in types
        for _ in range(types[name].get("max_workers") or 0)
    ]
    workers.sort(key=_size, reverse=True)
    nodes = [sizes[head]] if head in sizes else []
    return [
        size for size in [*nodes, *workers[: config.get("max_workers") or 0]] if size
    ]


def _numbers(resources: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources without those of a single node, such as its address."""
    known = {
        name: amount
        for name, amount in resources.items()
        if isinstance(amount, int | float)
    }
    return {
        name: float(amount)
        for name, amount in known.items()
        if not name.startswith("node:")
    }


def _size(resources: Mapping[str, Any]) -> tuple[float, float]:
    return resources.get("GPU", 0), resources.get("CPU", 0)


@functools.cache
def _file(node_id: str) -> Mapping[str, Any]:
    """Read the file as the head has it, or Kubernetes.

    Empty where this is neither the head nor a pod of KubeRay's.
    """
    heads = [node["NodeID"] for node in ray.nodes() if _HEAD in node["Resources"]]
    name = (
        os.environ.get("RAY_CLUSTER_NAME")
        if "KUBERNETES_SERVICE_HOST" in os.environ
        else None
    )
    if embedded() or not (name or node_id in heads):
        return {}
    try:
        if name:
            return kuberay_config(_NAMESPACE.read_text(encoding="utf-8").strip(), name)
        file = BOOTSTRAP.expanduser()
        found: list[Mapping[str, Any]] = (
            parse_documents(read_text(file, str(file)), str(file))
            if file.exists()
            else []
        )
        return found[0] if found else {}
    except (
        OSError,
        ValueError,
        KeyError,
    ) as error:  # OSError: requests' own errors, too
        logger.warning(
            "what the cluster may grow to is not known (%s): only nodes that are up count",
            error,
        )
        return {}
