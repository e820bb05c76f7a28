"""What Ray does not check in a cluster file: what is unsafe in it, contradicts itself, or would be lost.

Environment read: RAY_UP_enable_autoscaler_v2, which `ray up` reads too (provider local only).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster.config import COMMAND_FIELDS, ClusterFile
from cluster.prices import load_prices
from trainers.errors import MISSING, ConfigError

Level = Literal["error", "warning"]

_CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
_START_FIELDS = ("head_start_ray_commands", "worker_start_ray_commands")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_WORLD = ("0.0.0.0/0", "::/0")
_SSH_PORT = 22
_TOKEN_FILE = "~/.ray/auth_token"  # noqa: S105 (where Ray looks for the token, not the token)
_PIP_INSTALL = re.compile(r"\bpip3?\s+install\b([^;&|\n]*)")
_REQUIREMENT = re.compile(r"(ray|torch)(?:\[[^\]]*\])?\s*(?:==\s*([\w.+]+)|(.*))", re.DOTALL)
_RAY_IMAGE = re.compile(r"rayproject/ray(?:-ml|-llm)?(?::(\d+\.\d+\.\d+)?.*)?$")


@dataclass(frozen=True)
class Finding:
    """One remark on a cluster file: field, value, rule and fix.

    An error is what would not work, or would run the code of strangers; a warning what may be meant so.
    """

    level: Level
    field: str
    value: Any
    rule: str
    fix: str

    def __str__(self) -> str:
        return str(ConfigError(self.field, self.value, self.rule, self.fix))


def findings(cluster: ClusterFile, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """All remarks on a file that Ray accepts, in the order of the fields they are about."""
    return [
        *_limits(cluster),
        *_provider(cluster, environ),
        *_machines(cluster),
        *_versions(cluster),
        *_dashboard(cluster),
        *_token(cluster),
        *_storage(cluster),
    ]


def expected_versions(constraints: Path = _CONSTRAINTS) -> dict[str, str]:
    """The versions of ray and torch for every node: as in constraints.txt, else as installed here."""
    lines = constraints.read_text(encoding="utf-8").splitlines() if constraints.is_file() else []
    matches = [_REQUIREMENT.fullmatch(line.split("#")[0].strip()) for line in lines]
    found = {match[1]: match[2] for match in matches if match and match[2]}
    for package in ("ray", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.setdefault(package, importlib.metadata.version(package))
    return found


def _limits(cluster: ClusterFile) -> Iterator[Finding]:
    asked = cluster.written.get("max_workers")
    addresses = cluster.config["provider"].get("worker_ips")
    if cluster.provider == "local" and addresses is not None:
        if asked is not None and asked != len(addresses):
            rule = f"does not match the {len(addresses)} addresses in provider.worker_ips"
            yield Finding("warning", "max_workers", asked, rule, "remove it, and Ray uses them all")
    elif cluster.max_workers > cluster.sum_max_workers:
        rule = f"can never be reached, because the types allow {cluster.sum_max_workers} together"
        fix = f"write {cluster.sum_max_workers}, or raise max_workers of a type"
        yield Finding("warning", "max_workers", cluster.max_workers, rule, fix)


def _provider(cluster: ClusterFile, environ: Mapping[str, str]) -> Iterator[Finding]:
    if cluster.provider == "local" and environ.get("RAY_UP_enable_autoscaler_v2") != "0":
        rule = "does not work with Ray's autoscaler v2, which is the default"
        fix = "run `export RAY_UP_enable_autoscaler_v2=0` before `ray up` and `ray down`"
        yield Finding("warning", "provider.type", "local", rule, fix)
    group = cluster.config["provider"].get("security_group") or {}
    for permission in group.get("IpPermissions", []):
        ranges = [*permission.get("IpRanges", []), *permission.get("Ipv6Ranges", [])]
        is_open = any(entry.get("CidrIp", entry.get("CidrIpv6")) in _WORLD for entry in ranges)
        ports = (permission.get("FromPort"), permission.get("ToPort"))
        if is_open and ports != (_SSH_PORT, _SSH_PORT):
            value = f"ports {ports[0]} to {ports[1]} for everybody"
            rule = "must not open a port to the world: the Jobs API runs any code that reaches it"
            fix = "name your own address range, or reach the cluster through SSH (`ray dashboard FILE`)"
            yield Finding("error", "provider.security_group.IpPermissions", value, rule, fix)


def _machines(cluster: ClusterFile) -> Iterator[Finding]:
    known = load_prices()
    for node_type in cluster.node_types:
        machine = known.get(node_type.instance_type or "")
        if machine is None:
            continue
        for resource, actual in (("CPU", machine.vcpus), ("GPU", machine.gpus)):
            said = node_type.resources.get(resource, 0)
            field = f"available_node_types.{node_type.name}.resources.{resource}"
            if said > actual:
                rule = f"must be at most {actual}, which is what a {machine.instance_type} has"
                yield Finding("error", field, said, rule, f"write {actual}, or take a larger machine")
            elif resource == "GPU" and said < actual and not node_type.is_head:
                rule = f"leaves GPUs idle that are paid for: a {machine.instance_type} has {actual}"
                yield Finding("warning", field, said, rule, f"write {actual}")


def _versions(cluster: ClusterFile) -> Iterator[Finding]:
    expected = expected_versions()
    for field, package, version in _installs(cluster):
        right = expected.get(package)
        fix = f"write {package}=={right}" if right else "write the version that you tested with"
        if version is None:
            rule = "must be pinned, or nodes that start later differ"
            yield Finding("warning", field, package, rule, fix)
        elif right is not None and version.split("+")[0] != right.split("+")[0]:
            rule = f"differs from {right}, which Paceline has here"
            # Ray's client and cluster must be the same version; torch merely should be.
            level: Level = "error" if package == "ray" else "warning"
            yield Finding(level, field, f"{package}=={version}", rule, fix)


def _installs(cluster: ClusterFile) -> Iterator[tuple[str, str, str | None]]:
    """(field, package, version or None) of each place where a node gets ray or torch from."""
    fields = [(field, commands) for field, commands in cluster.commands.items()]
    for name, node_type in cluster.config["available_node_types"].items():
        for key in ("initialization_commands", "worker_setup_commands"):
            fields.append((f"available_node_types.{name}.{key}", tuple(node_type.get(key, ()))))
    for field, commands in fields:
        for command in commands:
            for arguments in _PIP_INSTALL.findall(command):
                words = _words(arguments)
                if {"-c", "-r", "--constraint", "--requirement"} & set(words):
                    continue  # pinned by a file
                for word in words:
                    if match := _REQUIREMENT.fullmatch(word):
                        if match[3] and match[3][0] not in "=~<>!@":
                            continue  # another package, such as torchvision
                        yield field, match[1], match[2]
    docker = cluster.config.get("docker") or {}
    for key in ("image", "head_image", "worker_image"):
        if match := _RAY_IMAGE.search(docker.get(key) or ""):
            yield f"docker.{key}", "ray", match[1]


def _words(arguments: str) -> list[str]:
    try:
        return shlex.split(arguments)
    except ValueError:  # an open quote: the shell would fail as well
        return arguments.split()


def _dashboard(cluster: ClusterFile) -> Iterator[Finding]:
    field = "head_start_ray_commands"
    for host in re.findall(r"--dashboard-host[=\s]+(\S+)", "\n".join(cluster.commands[field])):
        if host.strip("'\"") not in _LOOPBACK:
            rule = "must be the head's loopback: the dashboard runs the code of whoever may use it"
            fix = "write --dashboard-host=127.0.0.1 and use `ray dashboard FILE`"
            yield Finding("warning", field, f"--dashboard-host={host}", rule, fix)


def _token(cluster: ClusterFile) -> Iterator[Finding]:
    modes = {field: _exported(cluster, field, "RAY_AUTH_MODE") for field in _START_FIELDS}
    for field, mode in modes.items():
        if mode != "token":
            value = f"RAY_AUTH_MODE={mode}" if mode else MISSING
            rule = "must turn token authentication on, or whoever reaches a port runs code"
            yield Finding("error", field, value, rule, "put `export RAY_AUTH_MODE=token;` before `ray start`")
    commands = [command for field in COMMAND_FIELDS for command in cluster.commands[field]]
    if any(re.search(r"\bRAY_AUTH_TOKEN=", command) for command in commands):
        fix = f"send the token by `file_mounts: {{{_TOKEN_FILE}: {_TOKEN_FILE}}}`"
        yield Finding("error", "RAY_AUTH_TOKEN", MISSING, "must not stand in the file: it is a secret", fix)
    elif "token" in modes.values():
        place = _exported(cluster, "head_start_ray_commands", "RAY_AUTH_TOKEN_PATH") or _TOKEN_FILE
        if not any(_same_file(mount, place) for mount in cluster.config["file_mounts"]):
            rule = f"must bring the token to {place}, or no node can join"
            fix = f"add `{place}: {_TOKEN_FILE}` (made by `ray get-auth-token --generate`)"
            yield Finding("error", "file_mounts", MISSING, rule, fix)


def _same_file(mount: str, place: str) -> bool:
    """Whether two paths on a node are one; /home/ubuntu and /root are what `~` means there."""
    return mount == place or (place.startswith("~") and mount.startswith("/") and mount.endswith(place[1:]))


def _storage(cluster: ClusterFile) -> Iterator[Finding]:
    values = {field: _exported(cluster, field, "PACELINE_STORAGE") for field in _START_FIELDS}
    for field, value in values.items():
        if not value:
            rule = "must export PACELINE_STORAGE, or checkpoints stay on one node and die with it"
            fix = "put `export PACELINE_STORAGE=s3://BUCKET/PREFIX;` before `ray start`"
            yield Finding("warning", field, MISSING, rule, fix)
    head, worker = values.values()
    if head and worker and head != worker:
        value, rule = f"PACELINE_STORAGE={worker}", f"differs from the head's, {head}"
        yield Finding("error", "worker_start_ray_commands", value, rule, "write the same place in both")


def _exported(cluster: ClusterFile, field: str, name: str) -> str | None:
    """The value that `name` has where `ray start` runs: set in that command, or in a profile by set-up.

    Each command has a shell of its own, so an export in another start command does not count.
    """
    setup = "head_setup_commands" if field.startswith("head") else "worker_setup_commands"
    both = [*cluster.commands["setup_commands"], *cluster.commands[setup]]
    profile = [command for command in both if "bashrc" in command or "profile" in command]
    starts = [command.split("ray start")[0] for command in cluster.commands[field] if "ray start" in command]
    found = None
    for command in [*profile, *starts]:
        for match in re.finditer(rf"(?<!\w){name}=(\"[^\"]*\"|'[^']*'|[^\s;&|'\"]*)", command):
            found = match[1].strip("'\"")
    return found
