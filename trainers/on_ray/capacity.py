"""The resources that the cluster has, and may grow to under its cluster file (Ray).

The file is read where a job's driver finds it: on the head of a `ray up`
cluster, and in a pod of KubeRay, from Kubernetes.

Environment read, in Kubernetes: RAY_CLUSTER_NAME, which KubeRay sets, and
KUBERNETES_SERVICE_HOST, which Kubernetes sets.
"""

import functools
import logging
import os
import time
from collections import Counter
from pathlib import Path

import ray

from trainers.config.model import Tree
from trainers.config.yaml import parse_documents, read_text
from trainers.on_ray.internals import kuberay_config, own_node

logger = logging.getLogger(__name__)

Resources = dict[str, float]
"""Amounts by name, as in Ray."""
BOOTSTRAP = Path("~/ray_bootstrap_config.yaml")
"""Where `ray up` leaves the file on the head, with the resources of every type
filled in.
"""
_HEAD = "node:__internal_head__"
_JOIN_S = 60
_LOOK_S = 1.0
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def capacity() -> Resources:
    """Return the resources the cluster has, or may grow to under its cluster file."""
    now = Counter[str](ray.cluster_resources())
    grown = Counter[str]()
    for resources in nodes_at_most():
        grown.update(resources)
    return {name: float(amount) for name, amount in (now | grown).items()}


def nodes_at_most() -> list[Resources]:
    """Return the resources of each node that the cluster file allows.

    The head is included. Empty if the limits are unknown.
    """
    file = _file(ray.get_runtime_context().get_node_id())
    if _sizes_unknown(file):
        _wait_for_a_worker()
    return allowed(file, max(_workers_up(), key=_size, default={}))


def _workers_up() -> list[Resources]:
    return [
        node["Resources"]
        for node in ray.nodes()
        if node["Alive"] and _HEAD not in node["Resources"]
    ]


@functools.cache
def _wait_for_a_worker() -> None:
    """Wait, once per process, until the first worker node has joined.

    A job may be submitted while the hosts of `ray up` are still joining.
    """
    deadline = time.monotonic() + _JOIN_S
    if not _workers_up():
        logger.info(
            "no worker has joined the cluster yet: waiting %d s at most",
            _JOIN_S,
        )
    while not _workers_up() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _sizes_unknown(config: Tree) -> bool:
    """Return whether the file leaves worker sizes open, as for on-premises hosts."""
    for kind in (config.get("available_node_types") or {}).values():
        if kind.get("max_workers") and not _numbers(
            kind.get("resources") or {}
        ):
            return True
    return False


def allowed(config: Tree, like: Tree | None = None) -> list[Resources]:
    """Return the resources of each node that a cluster file allows, largest first.

    The file must be prepared by Ray. The limits of every type and of the whole
    cluster apply.

    `like` holds the resources of a worker that is up. It stands for
    on-premises hosts, whose size the file does not give.
    """
    nodes = []
    workers = []
    for name, kind in (config.get("available_node_types") or {}).items():
        size = _numbers(kind.get("resources") or {})
        if name == config.get("head_node_type"):
            nodes.append(size)
        most = kind.get("max_workers") or 0
        workers += [size or _numbers(like or {})] * most
    workers.sort(key=_size, reverse=True)
    nodes += workers[: config.get("max_workers") or 0]
    return [size for size in nodes if size]


def _numbers(resources: Tree) -> Resources:
    """Return the resources, except those that name one node, such as its address."""
    return {
        name: float(amount)
        for name, amount in resources.items()
        if isinstance(amount, int | float) and not name.startswith("node:")
    }


def _size(resources: Tree) -> tuple[float, float]:
    return resources.get("GPU", 0), resources.get("CPU", 0)


@functools.cache
def _file(node_id: str) -> Tree:
    """Return the cluster file, from the head node or from Kubernetes.

    Empty if this is neither the head nor a pod of KubeRay, and for a cluster
    that this process has started, which never grows.
    """
    heads = [
        node["NodeID"] for node in ray.nodes() if _HEAD in node["Resources"]
    ]
    name = None
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        name = os.environ.get("RAY_CLUSTER_NAME")
    node = own_node()
    is_own = node is not None and node.is_head()
    if is_own or not (name or node_id in heads):
        return {}
    try:
        if name:
            namespace = _NAMESPACE.read_text(encoding="utf-8").strip()
            return dict(kuberay_config(namespace, name))
        file = BOOTSTRAP.expanduser()
        if not file.exists():
            return {}
        source = str(file)
        found: list[Tree] = parse_documents(read_text(file, source), source)
        return found[0] if found else {}
    except (
        OSError,
        ValueError,
        KeyError,
    ) as error:  # OSError: errors of `requests`, too
        words = "how far the cluster may grow is not known (%s): only nodes that are up are counted"
        logger.warning(words, error)
        return {}
