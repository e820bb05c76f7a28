"""What Ray and KubeRay do not check in a cluster file: what is unsafe in it, contradicts itself, or would be lost.

Environment read: RAY_UP_enable_autoscaler_v2, which `ray up` reads too (provider local only).
"""

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from cluster.files.cluster_file import ClusterFile
from cluster.finding import Finding, error, warning
from cluster.rules.commands import HEAD, WORKER, brings, exported
from cluster.rules.head import head_findings
from cluster.rules.kuberay import kuberay_findings
from cluster.rules.machines import access_findings, machine_findings
from cluster.rules.sentences import KEYS, OPEN_PORT, SECRET
from cluster.rules.timeouts import reaction_findings
from cluster.rules.versions import version_findings
from trainers.errors import MISSING

_WORLD = ("0.0.0.0/0", "::/0")
_SSH_PORT = 22
_TOKEN_FILE = "~/.ray/auth_token"  # noqa: S105 (where Ray looks for the token, not the token)
_OWN_DISK = re.compile(r"(?:/tmp|/home|/root|~|\$HOME|/var/tmp)(?:/|$)")


def findings(cluster: ClusterFile, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return all remarks on a file that Ray (or Kubernetes) accepts, in the order of the fields they are about."""
    if cluster.provider == "kuberay":
        return [*_keys(cluster), *kuberay_findings(cluster)]
    return [
        *_limits(cluster),
        *_local(cluster, environ),
        *_ports(cluster),
        *_keys(cluster),
        *machine_findings(cluster),
        *version_findings(cluster),
        *_head_start(cluster),
        *_token(cluster),
        *head_findings(cluster),
        *_storage(cluster),
    ]


def _limits(cluster: ClusterFile) -> Iterator[Finding]:
    asked = cluster.written.get("max_workers")
    addresses = cluster.config["provider"].get("worker_ips")
    if cluster.provider == "local" and addresses is not None:
        if asked is not None and asked != len(addresses):
            rule = f"does not match the {len(addresses)} addresses in provider.worker_ips"
            yield warning("max_workers", asked, rule, "remove it, and Ray uses them all")
    elif cluster.max_workers > cluster.sum_max_workers:
        rule = f"can never be reached, because the types allow {cluster.sum_max_workers} together"
        fix = f"write {cluster.sum_max_workers}, or raise max_workers of a type"
        yield warning("max_workers", cluster.max_workers, rule, fix)


def _local(cluster: ClusterFile, environ: Mapping[str, str]) -> Iterator[Finding]:
    if cluster.provider != "local":
        return
    # `ray up` puts its export before the head's command, so one in the command itself has the last word.
    switches = environ.get("RAY_UP_enable_autoscaler_v2"), exported(cluster, HEAD, "RAY_enable_autoscaler_v2")
    if "0" not in switches:
        rule = "does not work with Ray's autoscaler v2, which is the default"
        fix = f"put `export RAY_enable_autoscaler_v2=0;` before `ray start` in {HEAD}"
        yield warning("provider.type", "local", rule, fix)
    provider = cluster.config["provider"]
    head, workers = provider.get("head_ip"), list(provider.get("worker_ips") or ())
    if head in workers:
        rule = "must not hold the head, which would stop itself to start as a worker"
        yield error("provider.worker_ips", head, rule, "remove it there")
    for address in sorted({address for address in workers if workers.count(address) > 1}):
        yield error("provider.worker_ips", address, "must hold each address once", "remove the second")
    for field, address in [("head_ip", head), *(("worker_ips", worker) for worker in workers)]:
        if _is_loopback(address):
            rule = "must be an address that the other hosts reach"
            yield error(f"provider.{field}", address, rule, "write the host's address in your network")


def _is_loopback(address: object) -> bool:
    try:
        return ipaddress.ip_address(str(address)).is_loopback
    except ValueError:
        return address == "localhost"


def _ports(cluster: ClusterFile) -> Iterator[Finding]:
    group = cluster.config["provider"].get("security_group") or {}
    for permission in group.get("IpPermissions") or ():
        ranges = [*(permission.get("IpRanges") or ()), *(permission.get("Ipv6Ranges") or ())]
        is_open = any(entry.get("CidrIp", entry.get("CidrIpv6")) in _WORLD for entry in ranges)
        ports = (permission.get("FromPort"), permission.get("ToPort"))
        if is_open and ports != (_SSH_PORT, _SSH_PORT):
            value = f"ports {ports[0]} to {ports[1]} for everybody"
            fix = "name your own address range, or reach the cluster through SSH (`ray dashboard FILE`)"
            yield error("provider.security_group.IpPermissions", value, OPEN_PORT, fix)
    docker = cluster.config.get("docker") or {}
    for key in ("run_options", "head_run_options", "worker_run_options"):
        for option in docker.get(key) or ():
            match = re.match(r"(?:-p|--publish)[=\s]*(\S+)", option)
            if match and not match[1].startswith(("127.0.0.1:", "[::1]:")):
                yield error(f"docker.{key}", option, OPEN_PORT, "remove it: Ray uses the host's own network")


def _keys(cluster: ClusterFile) -> Iterator[Finding]:
    rule = "must not stand in the file: it is a long-lived key, and is copied to every node"
    provider = cluster.config.get("provider") or {}
    for key in ("aws_credentials", "gcp_credentials"):
        if key in provider:
            fix = "log in on this machine, and give the nodes a role (instance profile, service account)"
            yield error(f"provider.{key}", MISSING, rule, fix)
            return
    if any(map(KEYS.search, _texts(cluster.written))):
        fix = "give the nodes a role (instance profile, service account, managed identity)"
        yield error("a cloud key", MISSING, rule, fix)


def _texts(value: Any) -> Iterator[str]:
    """All text in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in chain(value, value.values()) if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _head_start(cluster: ClusterFile) -> Iterator[Finding]:
    text = "\n".join(cluster.commands[HEAD])
    for host in re.findall(r"--dashboard-host[=\s]+(\S+)", text):
        if not _is_loopback(host.strip("'\"")):
            rule = "must be the head's loopback: the dashboard runs the code of whoever may use it"
            fix = "write --dashboard-host=127.0.0.1 and use `ray dashboard FILE`"
            yield warning(HEAD, f"--dashboard-host={host}", rule, fix)
    if "ray start" in text and "--autoscaling-config" not in text:
        rule = "must give `ray start` its --autoscaling-config, or no worker is ever started"
        yield error(HEAD, MISSING, rule, "add --autoscaling-config=~/ray_bootstrap_config.yaml")
    yield from reaction_findings(HEAD, lambda name: exported(cluster, HEAD, name))


def _token(cluster: ClusterFile) -> Iterator[Finding]:
    modes = {field: exported(cluster, field, "RAY_AUTH_MODE") for field in (HEAD, WORKER)}
    for field, mode in modes.items():
        if mode != "token":
            value = f"RAY_AUTH_MODE={mode}" if mode else MISSING
            rule = "must turn token authentication on, or whoever reaches a port runs code"
            yield error(field, value, rule, "put `export RAY_AUTH_MODE=token;` before `ray start`")
    if any(re.search(r"\bRAY_AUTH_TOKEN=", command) for commands in cluster.commands.values() for command in commands):
        fix = f"send the token by `file_mounts: {{{_TOKEN_FILE}: {_TOKEN_FILE}}}`"
        yield error("RAY_AUTH_TOKEN", MISSING, SECRET, fix)
    elif "token" in modes.values():
        place = exported(cluster, HEAD, "RAY_AUTH_TOKEN_PATH") or _TOKEN_FILE
        if not brings(cluster, place):
            rule = f"must bring the token to {place}, or no node can join"
            fix = f"add `{place}: {_TOKEN_FILE}` (made by `ray get-auth-token --generate`)"
            yield error("file_mounts", MISSING, rule, fix)


def _storage(cluster: ClusterFile) -> Iterator[Finding]:
    head, worker = exported(cluster, HEAD, "PACELINE_STORAGE"), exported(cluster, WORKER, "PACELINE_STORAGE")
    for field, value in ((HEAD, head), (WORKER, worker)):
        if not value:
            rule = "must export PACELINE_STORAGE, or checkpoints stay on one node and die with it"
            fix = "put `export PACELINE_STORAGE=s3://BUCKET/PREFIX;` before `ray start`"
            yield warning(field, MISSING, rule, fix)
    if head and worker and head != worker:
        rule = f"differs from the head's, {head}"
        yield error(WORKER, f"PACELINE_STORAGE={worker}", rule, "write the same place in both")
    elif head and worker and _OWN_DISK.match(head):
        rule = "is on each node's own disk, where no other node finds a checkpoint"
        yield error(HEAD, f"PACELINE_STORAGE={head}", rule, "name a bucket, or a directory on NFS")
    elif worker:
        yield from access_findings(cluster, worker)
