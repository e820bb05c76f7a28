"""Find what Ray misses in a cluster file: unsafe, contradictory or lossy setup.

Environment read: RAY_UP_enable_autoscaler_v2, which `ray up` reads too
(provider local only).
"""

import functools
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster import Finding, error, warning
from cluster.files.capacity import NodeType, load_prices
from cluster.files.ray_up import (
    HEAD,
    WORKER,
    ClusterFile,
    gpus_of,
)
from trainers.errors import MISSING, SECRET_NAME, did_you_mean
from trainers.versions import package_versions

_WORLD = ("0.0.0.0/0", "::/0")
_SSH_PORT = 22
_TOKEN_FILE = "~/.ray/auth_token"  # noqa: S105 (where Ray looks for the token, not the token)
_ACCOUNTS = {
    ("aws", "s3"): "IamInstanceProfile",
    ("gcp", "gs"): "serviceAccounts",
}
"""The field of a `node_config` that lets a node write to a bucket, by cloud
and URI scheme.
"""

_OWN_RESOURCES = ("CPU", "GPU")
_MACHINE_FIELDS = {
    "aws": "InstanceType ImageId IamInstanceProfile BlockDeviceMappings MetadataOptions InstanceMarketOptions KeyName "
    "SubnetId SubnetIds SecurityGroupIds SecurityGroups NetworkInterfaces UserData TagSpecifications Placement "
    "CpuOptions CreditSpecification CapacityReservationSpecification EbsOptimized LaunchTemplate LicenseSpecifications "
    "HibernationOptions EnclaveOptions PrivateDnsNameOptions MaintenanceOptions Monitoring Ipv6Addresses",
    "gcp": "machineType disks guestAccelerators scheduling serviceAccounts metadata networkInterfaces labels tags "
    "sourceMachineImage acceleratorType acceleratorConfig runtimeVersion minCpuPlatform shieldedInstanceConfig "
    "networkConfig schedulingConfig advancedMachineFeatures confidentialInstanceConfig reservationAffinity params",
    "azure": "azure_arm_parameters azure_arm_tags",
}
"""Fields of a `node_config` by cloud: those of EC2's RunInstances, of Google's
Instance and Node and, for Azure, Ray's own.
"""
_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
_ASSIGNMENT = re.compile(
    r"(?<![\w$-])([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;&|'\"]*)"
)
# Keys of AWS, Google and other providers, passwords in a URL, and variables that
# are named as secrets and get a literal value: not a variable, a command, a path,
# a URI, or the Key of `Key=...,Value=...`. What these patterns match is never shown.
_KEYS = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|PRIVATE KEY-----|\b(?:AWS_SECRET_ACCESS_KEY|AZURE_CLIENT_SECRET)=|"
    r"\b(?:aws|gcp)_credentials\b|\bAccountKey=|aws_secret_access_key|://[^\s/:@'\"]*:[^\s/@'\"]+@|"
    r"RAY_AUTH_TOKEN=[\\'\"]*[^\s$\\'\"]|"
    rf"(?i:{SECRET_NAME})=(?:\\?['\"])?(?![$`~/\\]|\w{{1,20}}://|[^\s'\"]{{0,99}},\w{{0,99}}Value=)[^\s;&|'\"]{{8}}"
)
# Ray's own images: the tag begins with the version, or it names a build that moves.
_RAY_IMAGE = re.compile(
    r"\brayproject/ray(?:-ml|-llm)?(?![\w@-])(?::(\d+\.[\w.]+))?"
)
_OWN_DISK = re.compile(
    r"(?:/tmp|/var/tmp|/dev/shm|/home|/root|~|\$\{?HOME\}?)(?:/|$)"
)
_RELATIVE = re.compile(r"(?![/~$]|[\w+.-]+://)")


def findings(
    cluster: ClusterFile, environ: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Return all findings in a file that Ray accepts."""
    starts = {field: _environment(cluster, field) for field in (HEAD, WORKER)}
    return [
        *_local(cluster, starts[HEAD], environ),
        *_ports(cluster),
        *_keys(cluster.written),
        *_machines(cluster),
        *_misspelt(cluster),
        *_versions(cluster),
        *_head_start(cluster),
        *_environment_findings(starts),
        *_token_file(cluster, starts[HEAD]),
        *_access(cluster, starts[WORKER].get("PACELINE_STORAGE", "")),
    ]


def _misspelt(cluster: ClusterFile) -> Iterator[Finding]:
    """Warn of misspelt machine fields and resource names.

    For such a field, the cloud would refuse the node, perhaps hours
    later.
    """
    known = _MACHINE_FIELDS.get(cluster.provider, "").split()
    for name, node_type in cluster.config["available_node_types"].items():
        for key in node_type["node_config"]:
            fix = did_you_mean(key, known, "")
            if key not in known and fix:
                yield warning(
                    f"available_node_types.{name}.node_config.{key}",
                    MISSING,
                    "is not a known field of a machine",
                    fix,
                )
        for resource in node_type.get("resources") or {}:
            if (
                resource not in _OWN_RESOURCES
                and resource.upper() in _OWN_RESOURCES
            ):
                yield warning(
                    f"available_node_types.{name}.resources.{resource}",
                    MISSING,
                    f"is a custom resource, not Ray's {resource.upper()}",
                    f"write `{resource.upper()}`",
                )


def _environment(cluster: ClusterFile, field: str) -> dict[str, str]:
    """Return the variables that are set for `ray start`, in its command or a profile.

    Each command has its own shell, so exports in other start commands do not
    count.
    """
    setup = "head_setup_commands" if field == HEAD else "worker_setup_commands"
    both = [*cluster.commands["setup_commands"], *cluster.commands[setup]]
    profile = [
        command
        for command in both
        if "bashrc" in command or "profile" in command
    ]
    starts = [
        command.split("ray start")[0]
        for command in cluster.commands[field]
        if "ray start" in command
    ]
    return assignments("\n".join([*profile, *starts]))


def _local(
    cluster: ClusterFile, head: Mapping[str, str], environ: Mapping[str, str]
) -> Iterator[Finding]:
    if cluster.provider != "local":
        return
    # `ray up` exports its setting before the head's command, so an export in
    # the command takes precedence.
    if "0" not in (
        environ.get("RAY_UP_enable_autoscaler_v2"),
        head.get("RAY_enable_autoscaler_v2"),
    ):
        yield warning(
            "provider.type",
            "local",
            "does not work with Ray's autoscaler v2, which is the default",
            f"put `export RAY_enable_autoscaler_v2=0;` before `ray start` in {HEAD}",
        )


def _is_loopback(address: object) -> bool:
    try:
        return ipaddress.ip_address(str(address)).is_loopback
    except ValueError:
        return address == "localhost"


def _ports(cluster: ClusterFile) -> Iterator[Finding]:
    group = cluster.config["provider"].get("security_group") or {}
    for permission in group.get("IpPermissions") or ():
        ranges = [
            *(permission.get("IpRanges") or ()),
            *(permission.get("Ipv6Ranges") or ()),
        ]
        is_open = any(
            entry.get("CidrIp", entry.get("CidrIpv6")) in _WORLD
            for entry in ranges
        )
        ports = (permission.get("FromPort"), permission.get("ToPort"))
        if is_open and ports != (_SSH_PORT, _SSH_PORT):
            shown = f"ports {ports[0]} to {ports[1]}"
            if None in ports:  # with protocol -1, a rule has no ports
                shown = "all ports"
            yield error(
                "provider.security_group.IpPermissions",
                f"{shown} for everybody",
                "must open only SSH's port to everybody, because anyone who reaches Ray's Jobs API can run code",
                "name your own address range, or reach the cluster through SSH (`ray dashboard FILE`)",
            )


def _machines(cluster: ClusterFile) -> Iterator[Finding]:
    """Find resources that the machine lacks, idle GPUs, and a head that trains."""
    known = load_prices(cluster.provider)
    for node_type in cluster.node_types:
        field = f"available_node_types.{node_type.name}"
        machine = _node_config(cluster, node_type)
        price = known.get(node_type.instance_type or "")
        yield from _resource(
            node_type,
            "CPU",
            price.vcpus if price else None,
            f"{field}.resources.CPU",
        )
        yield from _resource(
            node_type, "GPU", gpus_of(machine, price), f"{field}.resources.GPU"
        )


def _resource(
    node_type: NodeType, resource: str, has: int | None, field: str
) -> Iterator[Finding]:
    said = node_type.resources.get(resource, 0)
    machine = node_type.instance_type or "machine with these accelerators"
    if has is not None and said > has:
        yield error(
            field,
            said,
            f"must be at most {has}, which is what a {machine} has",
            f"write {has}, or take a larger machine",
        )
    elif node_type.is_head and said:
        yield warning(
            field,
            said,
            "should be 0 on the head: work there slows the scheduler, and can end the cluster",
            "write 0, and leave the work to workers",
        )
    elif has and resource == "GPU" and said < has and not node_type.is_head:
        yield warning(
            field,
            said,
            f"leaves paid GPUs idle: a {machine} has {has}",
            f"write {has}",
        )


def _versions(cluster: ClusterFile) -> Iterator[Finding]:
    packages = set()
    for field, lines in cluster.commands.items():
        for arguments in pip_arguments("\n".join(lines)):
            for package, version in installs(arguments):
                packages.add(package)
                yield from _version_finding(field, package, version)
    for version in dict.fromkeys(_RAY_IMAGE.findall(str(cluster.written))):
        # What a command installs takes the place of the image's.
        if not version or "ray" not in packages:
            yield from _version_finding("docker", "ray", version)


def _head_start(cluster: ClusterFile) -> Iterator[Finding]:
    text = "\n".join(cluster.commands[HEAD])
    for host in re.findall(r"--dashboard-host[=\s]+(\S+)", text):
        if not _is_loopback(host.strip("'\"")):
            yield warning(
                HEAD,
                f"--dashboard-host={host}",
                "must be the head's loopback, because anyone who reaches the dashboard can run code",
                "write --dashboard-host=127.0.0.1 and use `ray dashboard FILE`",
            )
    if "ray start" in text and "--autoscaling-config" not in text:
        yield error(
            HEAD,
            MISSING,
            "must give `ray start` its --autoscaling-config, or no worker is ever started",
            "add --autoscaling-config=~/ray_bootstrap_config.yaml",
        )
    if "--no-monitor" in text and not re.search(
        r"\bcluster autoscale\b", text
    ):
        yield error(
            HEAD,
            "--no-monitor",
            "starts no autoscaler, without which no worker is ever started",
            "start `paceline-cluster autoscale ~/ray_bootstrap_config.yaml`, or remove --no-monitor",
        )


def _token_file(
    cluster: ClusterFile, head: Mapping[str, str]
) -> Iterator[Finding]:
    place = head.get("RAY_AUTH_TOKEN_PATH") or _TOKEN_FILE
    end = re.sub(r"^(~|\$\{?HOME\}?)(?=/)", "", place)
    if (
        head.get("RAY_AUTH_MODE") == "token"
        and "RAY_AUTH_TOKEN" not in head
        and not any(
            mount.endswith(end) for mount in cluster.config["file_mounts"]
        )
    ):
        yield error(
            "file_mounts",
            MISSING,
            f"must copy the token to {place}, or no node can join",
            f"mount your {_TOKEN_FILE} at {place} (`ray get-auth-token --generate` makes the file)",
        )


def _access(cluster: ClusterFile, storage: str) -> Iterator[Finding]:
    """Find worker types that have no permission to write to `storage`.

    Ray gives its own account to the head only.
    """
    scheme = storage.split("://")[0]
    if (
        cluster.provider == "azure"
        and scheme in ("abfs", "abfss")
        and "msi_name" not in cluster.config["provider"]
    ):
        yield warning(
            "provider.msi_name",
            MISSING,
            "must name an identity that may write to the container: Ray's own identity may only start machines",
            "add `msi_name` and `msi_resource_group` of an identity with the role Storage Blob Data Contributor",
        )
    key = _ACCOUNTS.get((cluster.provider, scheme))
    for node_type in cluster.node_types:
        if (
            key
            and not node_type.is_head
            and not _node_config(cluster, node_type).get(key)
        ):
            yield warning(
                f"available_node_types.{node_type.name}.node_config.{key}",
                MISSING,
                f"must let workers write to {scheme}://, which Ray arranges for the head only",
                f"set `{key}` to an identity that may write to the bucket",
            )


def _node_config(
    cluster: ClusterFile, node_type: NodeType
) -> Mapping[str, Any]:
    types: Mapping[str, Any] = cluster.config["available_node_types"]
    return types.get(node_type.name, {}).get("node_config", {})  # type: ignore[no-any-return]


def _environment_findings(
    starts: Mapping[str, Mapping[str, str]],
) -> Iterator[Finding]:
    """Find unsafe and contradictory environment variables where Ray starts.

    `starts` holds the variables that each field sets; the head's field is
    first.
    """
    storage = next(iter(starts.values())).get("PACELINE_STORAGE")
    for field, environment in starts.items():
        mode = environment.get("RAY_AUTH_MODE")
        if mode != "token":
            value = f"RAY_AUTH_MODE={mode}" if mode else MISSING
            yield error(
                field,
                value,
                "must turn on token authentication, or anyone who reaches a port can run code",
                "set RAY_AUTH_MODE=token where Ray starts",
            )
        own = environment.get("PACELINE_STORAGE")
        if not own:
            yield warning(
                field,
                MISSING,
                "must set PACELINE_STORAGE, or checkpoints stay on one node and die with it",
                "name a bucket or a shared directory, such as s3://BUCKET/PREFIX",
            )
        elif storage and own != storage:
            yield error(
                field,
                f"PACELINE_STORAGE={own}",
                f"differs from the head's, {storage}",
                "write the same place in both",
            )
    if storage and (_OWN_DISK.match(storage) or _RELATIVE.match(storage)):
        yield error(
            next(iter(starts)),
            f"PACELINE_STORAGE={storage}",
            "is on each node's own disk, where no other node finds a checkpoint",
            "name a bucket, or a directory that all nodes share",
        )


def _keys(written: object) -> Iterator[Finding]:
    """Find a long-lived key, a token or a password in the content of a file."""
    if _KEYS.search(str(written)):
        yield error(
            "the file",
            MISSING,
            "must hold no key, token or password, since it is copied to every node",
            "give the nodes a role (instance profile, service account, managed identity), or let them read the secret "
            "from a file of `file_mounts` or a secret store",
        )


def _version_finding(
    field: str, package: str, version: str
) -> Iterator[Finding]:
    """Compare a version that a file installs with the version that Paceline uses here.

    `version` is "" if it is not pinned.
    """
    right = expected_versions().get(package)
    fix = f"take {package} {right}"
    if not version:
        yield warning(
            field,
            package,
            "must be pinned, or nodes that start later get another version",
            fix,
        )
    # Ignore the build: 2.15.0+cu130.
    elif right is not None and version.split("+")[0] != right.split("+")[0]:
        # Ray's client and cluster must have the same version; a difference in
        # another package is only a warning.
        level = error if package == "ray" else warning
        yield level(
            field,
            f"{package}=={version}",
            f"differs from {right}, which Paceline uses here",
            fix,
        )


def pip_arguments(command: str) -> list[str]:
    """Return the arguments of each `pip install` in a shell command."""
    return re.findall(r"\bpip3?\s+install\b([^;&|\n]*)", command)


def installs(arguments: str) -> list[tuple[str, str]]:
    """Return (package, version) for Ray and torch, if installed.

    The version is "" if nothing pins it; packages that a constraint file pins
    are left out.
    """
    found = re.findall(
        r"(?<![\w./-])(ray|torch)(?:\[[^\]]*\])?(?:==([\w.+]+))?(?![\w.-])",
        arguments,
    )
    is_constrained = re.search(
        r"(?:-c|-r|--constraint|--requirement)[\s=]", arguments
    )
    return [
        (package, version)
        for package, version in found
        if version or not is_constrained
    ]


def assignments(text: str) -> dict[str, str]:
    """Return the variables that shell commands set, with the last value, unquoted."""
    return {
        name: value.strip("'\"") for name, value in _ASSIGNMENT.findall(text)
    }


@functools.cache
def expected_versions() -> dict[str, str]:
    """Return the versions that nodes should have: constraints.txt, else installed ones."""
    text = (
        _CONSTRAINTS.read_text(encoding="utf-8")
        if _CONSTRAINTS.is_file()
        else ""
    )
    return package_versions("ray", "torch") | dict(
        re.findall(r"^([\w.-]+)==([\w.+]+)", text, re.MULTILINE)
    )
