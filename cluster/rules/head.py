"""A head that may die: what it knows is in a Redis, its workers wait for it; half of that is worth nothing."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.files.cluster_file import ClusterFile
from cluster.files.kuberay import ENV, HEAD_OPTIONS, container_of
from cluster.finding import Finding, error, warning
from cluster.rules.commands import HEAD, WORKER, brings, exported
from cluster.rules.sentences import SECRET
from trainers.errors import MISSING

_ADDRESS, _NAMESPACE = "RAY_REDIS_ADDRESS", "RAY_external_storage_namespace"
_CA, _CERT, _KEY = _CERTIFICATES = "RAY_REDIS_CA_CERT", "RAY_REDIS_CLIENT_CERT", "RAY_REDIS_CLIENT_KEY"
_PATIENCE, _RAYS_PATIENCE_S, _LEAST_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0, 120.0
"""How long a worker looks for its head; Ray's default; and what a host needs to boot and Ray to start."""
_OPEN = "must make Redis ask who it is: what stands there decides what runs on the cluster"


def head_findings(cluster: ClusterFile) -> Iterator[Finding]:
    """Find what a `ray up` file lacks for a head that may die, and what it has in vain."""
    values = {name: exported(cluster, HEAD, name) for name in (_ADDRESS, _NAMESPACE, *_CERTIFICATES)}
    address, namespace, *_ = values.values()
    password = re.search(r"--redis-password[=\s]+(\S+)", "\n".join(cluster.commands[HEAD]))
    if password and "$" not in password[1]:
        yield error(HEAD, "--redis-password", SECRET, f"let Redis ask for a certificate: {', '.join(_CERTIFICATES)}")
    if not address:
        for name in [name for name, value in values.items() if value] + ["--redis-password"] * bool(password):
            rule = "has no effect: what the head knows dies with it"
            yield warning(HEAD, name, rule, f"put `export {_ADDRESS}=rediss://HOST:PORT;` before `ray start`")
        return
    given = {name: path for name in _CERTIFICATES if (path := values[name])}
    if not password and _CERT not in given:
        yield error(HEAD, f"{_ADDRESS}={address}", _OPEN, f"export {', '.join(_CERTIFICATES)}")
    elif given and not address.startswith("rediss://"):
        rule = "must begin with rediss://, or Ray shows no certificate"
        yield error(HEAD, f"{_ADDRESS}={address}", rule, "write rediss://HOST:PORT")
    elif (_CERT in given) != (_KEY in given):
        yield error(HEAD, MISSING, f"must export {_CERT} and {_KEY}, not one of them", "add the other")
    for path in dict.fromkeys(given.values()):
        if not brings(cluster, path):
            yield error("file_mounts", MISSING, f"must bring {path} to the head", f"add `{path}: LOCAL-PATH`")
    if not namespace:
        rule = f"should export {_NAMESPACE}, or clusters that share a Redis mix"
        yield warning(HEAD, MISSING, rule, f"put `export {_NAMESPACE}={cluster.name};` before `ray start`")
    yield from _patience(WORKER, exported(cluster, WORKER, _PATIENCE) or _RAYS_PATIENCE_S)
    # The new head's autoscaler knows from the cloud which machines are set up; with provider local nobody does.
    if cluster.provider == "local" and any(re.match(r"\s*ray stop\b", one) for one in cluster.commands[WORKER]):
        rule = "ends workers that look for their head, because a head that is back runs these commands"
        yield error(WORKER, "ray stop", rule, "leave it out where a raylet is up, as cluster/onprem-redis.patch does")


def kuberay_head_findings(cluster: ClusterFile, groups: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Find the same in a RayCluster or RayJob; `groups` by their paths, the head's first.

    What KubeRay refuses is from its ValidateRayClusterSpec (KubeRay 1.6).
    """
    options, annotations = cluster.config.get(HEAD_OPTIONS), cluster.written["metadata"].get("annotations") or {}
    (head, environment), *workers = ((f"{path}.{ENV}", _variables(group)) for path, group in groups.items())
    prefix = head.partition(".headGroupSpec")[0]
    start = cluster.config["headGroupSpec"].get("rayStartParams") or {}
    if options is None:
        if _ADDRESS in environment and annotations.get("ray.io/ft-enabled") != "true":
            fix = f"write `{HEAD_OPTIONS}: {{redisAddress: HOST:PORT}}` in {prefix}"
            yield error(f"{head}.{_ADDRESS}", MISSING, f"is refused by KubeRay without {HEAD_OPTIONS}", fix)
        return
    where = f"{prefix}.{HEAD_OPTIONS}"
    if options.get("backend", "redis") != "redis":
        return
    if not options.get("redisAddress"):
        yield error(
            f"{where}.redisAddress", MISSING, "is required", "write HOST:PORT of a Redis that outlives the head"
        )
    twice = {f"{head}.{name}": name in environment for name in (_ADDRESS, "REDIS_PASSWORD")}
    twice[f"{prefix}.headGroupSpec.rayStartParams.redis-password"] = "redis-password" in start
    for field in [field for field, is_there in twice.items() if is_there]:
        yield error(field, MISSING, f"is refused by KubeRay beside {HEAD_OPTIONS}", f"move it to {where}")
    password = options.get("redisPassword") or {}
    if password.get("value"):
        yield error(f"{where}.redisPassword", MISSING, SECRET, "take it from a Secret, by `valueFrom.secretKeyRef`")
    elif not password and _CERT not in environment:
        fix = "add `redisPassword: {valueFrom: {secretKeyRef: {name: SECRET, key: KEY}}}`"
        yield error(f"{where}.redisPassword", MISSING, _OPEN, fix)
    for field, one in workers:  # KubeRay's own value is 600
        if one.get(_PATIENCE) is not None:
            yield from _patience(field, one[_PATIENCE])
    spec = cluster.written["spec"]
    asks = ("entrypointNumCpus", "entrypointNumGpus", "entrypointResources")
    if cluster.written["kind"] == "RayJob" and not any(spec.get(field) for field in asks):
        rule = "puts the driver on the head, with which it dies"
        yield warning("spec.entrypointNumCpus", MISSING, rule, "write 1, which no head has that runs no work")


def _variables(group: Mapping[str, Any]) -> dict[Any, Any]:
    """The environment variables of a group's Ray container; None for the values of those that are not written out."""
    return {entry.get("name"): entry.get("value") for entry in container_of(group).get("env") or ()}


def _patience(field: str, value: object) -> Iterator[Finding]:
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = _RAYS_PATIENCE_S
    if not math.isfinite(seconds) or seconds < _LEAST_S:
        rule = f"should be {_LEAST_S:g} or more: so long a worker looks for its head before its lanes end"
        yield warning(field, f"{_PATIENCE}={value}", rule, f"export {_PATIENCE}=600")
