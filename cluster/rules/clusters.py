"""Find what Ray and KubeRay do not: what is unsafe, contradictory, or would be lost.

Environment read: RAY_UP_enable_autoscaler_v2, which `ray up` reads too (provider local
only).
"""

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.files.capacity import NodeType
from cluster.files.cluster_file import ClusterFile
from cluster.files.kuberay import (
    ENV,
    GPU,
    container_of,
    groups_of,
    pod_of,
    prefix_of,
    resources_of,
)
from cluster.files.prices import load_prices
from cluster.files.ray_up import HEAD, WORKER, google_scheduling_of, gpus_of
from cluster.finding import Finding, error, warning
from cluster.rules import common
from trainers.errors import MISSING, did_you_mean

_WORLD = ("0.0.0.0/0", "::/0")
_SSH_PORT = 22
_QUEUE = "kueue.x-k8s.io/queue-name"
_TOKEN_FILE = "~/.ray/auth_token"  # noqa: S105 (where Ray looks for the token, not the token)
_ACCOUNTS = {("aws", "s3"): "IamInstanceProfile", ("gcp", "gs"): "serviceAccounts"}
"""The field of a `node_config` that lets a node write to a bucket, by cloud and kind of
address.
"""

_SIZES = ("nano", "micro", "small", "medium", "large", "xlarge", "metal")
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
"""Fields of a `node_config` by cloud: EC2's RunInstances, Google's Instance and Node,
Ray's own for Azure.
"""


def findings(
    cluster: ClusterFile, environ: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Return all remarks on a file that Ray (or Kubernetes) accepts."""
    if cluster.provider == "kuberay":
        return [*common.key_findings(cluster.written), *_kuberay(cluster)]
    starts = {field: _environment(cluster, field) for field in (HEAD, WORKER)}
    return [
        *_local(cluster, starts[HEAD], environ),
        *_ports(cluster),
        *common.key_findings(cluster.written),
        *_machines(cluster),
        *_misspelt(cluster),
        *_versions(cluster),
        *_head_start(cluster),
        *common.environment_findings(starts),
        *common.reaction_findings(HEAD, starts[HEAD]),
        *_token_file(cluster, starts[HEAD]),
        *_access(cluster, starts[WORKER].get("PACELINE_STORAGE", "")),
    ]


def _misspelt(cluster: ClusterFile) -> Iterator[Finding]:
    """Warn of a machine's fields and sizes that are almost the cloud's.

    It would refuse the node, hours later.
    """
    known = _MACHINE_FIELDS.get(cluster.provider, "").split()
    for name, node_type in cluster.config["available_node_types"].items():
        for key in node_type["node_config"]:
            fix = did_you_mean(key, known, "")
            if key not in known and fix:
                yield warning(
                    f"available_node_types.{name}.node_config.{key}",
                    MISSING,
                    "is no field of it",
                    fix,
                )
        machine = str(
            node_type["node_config"].get("InstanceType") or ""
        )  # of EC2's: family.size
        size = re.sub(r"^\d+|-.*", "", machine.partition(".")[2])
        if size not in _SIZES and (fix := did_you_mean(size, _SIZES, "")):
            field = f"available_node_types.{name}.node_config.InstanceType"
            yield warning(field, machine, f"has {size}, which is no size of EC2's", fix)


def _environment(cluster: ClusterFile, field: str) -> dict[str, str]:
    """Return the variables where `ray start` runs: of the command, or a profile.

    Each command has a shell of its own, so an export in another start command does not
    count.
    """
    setup = "head_setup_commands" if field == HEAD else "worker_setup_commands"
    both = [*cluster.commands["setup_commands"], *cluster.commands[setup]]
    profile = [
        command for command in both if "bashrc" in command or "profile" in command
    ]
    starts = [
        command.split("ray start")[0]
        for command in cluster.commands[field]
        if "ray start" in command
    ]
    return common.assignments("\n".join([*profile, *starts]))


def _local(
    cluster: ClusterFile, head: Mapping[str, str], environ: Mapping[str, str]
) -> Iterator[Finding]:
    if cluster.provider != "local":
        return
    # `ray up` puts its export before the head's command, so one in the command itself
    # has the last word.
    if "0" not in (
        environ.get("RAY_UP_enable_autoscaler_v2"),
        head.get("RAY_enable_autoscaler_v2"),
    ):
        rule = "does not work with Ray's autoscaler v2, which is the default"
        fix = f"put `export RAY_enable_autoscaler_v2=0;` before `ray start` in {HEAD}"
        yield warning("provider.type", "local", rule, fix)
    provider = cluster.config["provider"]
    workers = list(provider.get("worker_ips") or ())
    addresses = [provider.get("head_ip"), *workers]
    for address in {address for address in workers if addresses.count(address) > 1}:
        rule = "must not hold an address twice, or the head: that host would stop itself to start again"
        yield error("provider.worker_ips", address, rule, "remove it there")
    for address in filter(_is_loopback, addresses):
        field = "worker_ips" if address in workers else "head_ip"
        rule = "must be an address that the other hosts reach"
        yield error(
            f"provider.{field}",
            address,
            rule,
            "write the host's address in your network",
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
            entry.get("CidrIp", entry.get("CidrIpv6")) in _WORLD for entry in ranges
        )
        ports = (permission.get("FromPort"), permission.get("ToPort"))
        if is_open and ports != (_SSH_PORT, _SSH_PORT):
            value = f"ports {ports[0]} to {ports[1]} for everybody"
            fix = "name your own address range, or reach the cluster through SSH (`ray dashboard FILE`)"
            yield error(
                "provider.security_group.IpPermissions", value, common.OPEN_PORT, fix
            )


def _machines(cluster: ClusterFile) -> Iterator[Finding]:
    """Find resources that no machine has, idle GPUs, a head that trains."""
    known = load_prices(cluster.provider)
    for node_type in cluster.node_types:
        field = f"available_node_types.{node_type.name}"
        machine = _node_config(cluster, node_type)
        price = known.get(node_type.instance_type or "")
        yield from _resource(
            node_type, "CPU", price.vcpus if price else None, f"{field}.resources.CPU"
        )
        yield from _resource(
            node_type, "GPU", gpus_of(machine, price), f"{field}.resources.GPU"
        )
        must_stop = cluster.provider == "gcp" and node_type.resources.get("GPU")
        if (
            must_stop
            and google_scheduling_of(machine).get("onHostMaintenance") != "TERMINATE"
        ):
            where = f"{field}.node_config.scheduling.onHostMaintenance"
            rule = "must be TERMINATE, or Google Cloud refuses a machine with GPUs"
            yield error(
                where,
                MISSING,
                rule,
                "write `scheduling: {onHostMaintenance: TERMINATE}`",
            )


def _resource(
    node_type: NodeType, resource: str, has: int | None, field: str
) -> Iterator[Finding]:
    said = node_type.resources.get(resource, 0)
    machine = node_type.instance_type or "machine with these accelerators"
    if has is not None and said > has:
        rule = f"must be at most {has}, which is what a {machine} has"
        yield error(field, said, rule, f"write {has}, or take a larger machine")
    elif node_type.is_head and said:
        yield warning(field, said, common.HEAD_WORKS, "write 0, and let workers do it")
    elif has and resource == "GPU" and said < has and not node_type.is_head:
        rule = f"leaves GPUs idle that are paid for: a {machine} has {has}"
        yield warning(field, said, rule, f"write {has}")


def _versions(cluster: ClusterFile) -> Iterator[Finding]:
    commands = dict(cluster.commands)
    for name, node_type in cluster.config["available_node_types"].items():
        for key in ("initialization_commands", "worker_setup_commands"):
            own = tuple(node_type.get(key, ()))
            commands[f"available_node_types.{name}.{key}"] = own
    for field, lines in commands.items():
        for arguments in common.pip_arguments("\n".join(lines)):
            yield from _installed(cluster, field, arguments)
    docker = cluster.config.get("docker") or {}
    for key in ("image", "head_image", "worker_image"):
        if docker.get(key):
            yield from common.image_finding(f"docker.{key}", docker[key])


def _installed(cluster: ClusterFile, field: str, arguments: str) -> Iterator[Finding]:
    """Find packages without a version, and files of versions that no node has."""
    for package, version in common.installs(arguments):
        yield from common.version_finding(field, package, version)
    for file in common.constraint_files(arguments):
        if "://" not in file and not _brings(cluster, file):
            rule = "must be brought to the nodes, which have no such file"
            fix = f"add `{file}: constraints.txt` to file_mounts"
            yield error(field, file, rule, fix)


def _head_start(cluster: ClusterFile) -> Iterator[Finding]:
    text = "\n".join(cluster.commands[HEAD])
    for host in re.findall(r"--dashboard-host[=\s]+(\S+)", text):
        if not _is_loopback(host.strip("'\"")):
            rule = "must be the head's loopback: the dashboard runs the code of whoever may use it"
            fix = "write --dashboard-host=127.0.0.1 and use `ray dashboard FILE`"
            yield warning(HEAD, f"--dashboard-host={host}", rule, fix)
    if "ray start" in text and "--autoscaling-config" not in text:
        rule = "must give `ray start` its --autoscaling-config, or no worker is ever started"
        yield error(
            HEAD, MISSING, rule, "add --autoscaling-config=~/ray_bootstrap_config.yaml"
        )


def _token_file(cluster: ClusterFile, head: Mapping[str, str]) -> Iterator[Finding]:
    place = head.get("RAY_AUTH_TOKEN_PATH") or _TOKEN_FILE
    if (
        head.get("RAY_AUTH_MODE") == "token"
        and "RAY_AUTH_TOKEN" not in head
        and not _brings(cluster, place)
    ):
        rule = f"must bring the token to {place}, or no node can join"
        fix = f"add `{place}: {_TOKEN_FILE}` (made by `ray get-auth-token --generate`)"
        yield error("file_mounts", MISSING, rule, fix)


def _access(cluster: ClusterFile, storage: str) -> Iterator[Finding]:
    """Find workers that may not write to `storage`.

    Ray gives its own account to the head only.
    """
    scheme = storage.split("://")[0]
    if (
        cluster.provider == "azure"
        and scheme in ("abfs", "abfss")
        and "msi_name" not in cluster.config["provider"]
    ):
        rule = "must name an identity that may write to the container: Ray's own may only start machines"
        fix = "add `msi_name` and `msi_resource_group` of an identity with the role Storage Blob Data Contributor"
        yield warning("provider.msi_name", MISSING, rule, fix)
    key = _ACCOUNTS.get((cluster.provider, scheme))
    for node_type in cluster.node_types:
        if (
            key
            and not node_type.is_head
            and not _node_config(cluster, node_type).get(key)
        ):
            field = f"available_node_types.{node_type.name}.node_config.{key}"
            rule = f"must let workers write to {scheme}://, which Ray arranges for the head only"
            yield warning(
                field,
                MISSING,
                rule,
                f"add `{key}` of an account that may use the bucket",
            )


def _brings(cluster: ClusterFile, place: str) -> bool:
    """Whether `file_mounts` brings a file to a place.

    There $HOME, /home/ubuntu and /root are what `~` means.
    """
    place = re.sub(r"^\$\{?HOME\}?(?=/)", "~", place)
    mounts: list[str] = list(cluster.config["file_mounts"])
    ends = [
        mount for mount in mounts if mount.startswith("/") and mount.endswith(place[1:])
    ]
    return place in mounts or (place.startswith("~") and bool(ends))


def _node_config(cluster: ClusterFile, node_type: NodeType) -> Mapping[str, Any]:
    types: Mapping[str, Any] = cluster.config["available_node_types"]
    return types.get(node_type.name, {}).get("node_config", {})  # type: ignore[no-any-return]


def _kuberay(cluster: ClusterFile) -> list[Finding]:
    """Find what is unsafe, contradictory or lost in a RayCluster or RayJob."""
    prefix = prefix_of(cluster.written)
    groups = groups_of(cluster.config, prefix)
    by_operator = (cluster.config.get("authOptions") or {}).get("mode") == "token"
    starts = {
        f"{field}.{ENV}": _container_environment(group, by_operator)
        for field, group in groups.items()
    }
    found = [*_document(cluster, prefix), *common.environment_findings(starts)]
    for field, group in groups.items():
        found += common.image_finding(
            f"{field}.template.spec.containers.0.image",
            container_of(group).get("image"),
        )
    head, *workers = groups.items()
    found += _kuberay_head(*head)
    for field, group in workers:
        found += _kuberay_worker(field, group)
    return [*found, *common.reaction_findings(*next(iter(starts.items())))]


def _container_environment(
    group: Mapping[str, Any], by_operator: bool
) -> dict[str, str]:
    """Return the variables of a group's Ray container; `$NAME` for a Secret's value."""
    found = {"RAY_AUTH_MODE": "token"} if by_operator else {}
    for entry in container_of(group).get("env") or ():
        value = entry.get("value")
        found[entry["name"]] = f"${entry['name']}" if value is None else str(value)
    return found


def _document(cluster: ClusterFile, prefix: str) -> Iterator[Finding]:
    spec = cluster.written["spec"]
    config = cluster.config
    queue = (cluster.written["metadata"].get("labels") or {}).get(_QUEUE)
    if cluster.written["kind"] == "RayJob" and not spec.get("shutdownAfterJobFinishes"):
        rule = "must be true, or the cluster and its GPUs are paid for after the job"
        yield warning(
            "spec.shutdownAfterJobFinishes",
            MISSING,
            rule,
            "write `shutdownAfterJobFinishes: true`",
        )
    if spec.get("suspend") and queue is None:
        rule = "waits for ever: without a queue nobody sets it to false"
        yield warning(
            "spec.suspend",
            True,
            rule,
            f"add the label `{_QUEUE}`, or remove it where there is no Kueue",
        )
    version = config.get("rayVersion")
    if version:
        yield from common.version_finding(f"{prefix}.rayVersion", "ray", str(version))
    else:
        rule = "is required: without it KubeRay leaves out authentication and the autoscaler's version"
        yield error(
            f"{prefix}.rayVersion",
            MISSING,
            rule,
            f"write {common.expected_versions().get('ray')}",
        )
    if (
        not config.get("enableInTreeAutoscaling") and queue is None
    ):  # Kueue admits a size
        rule = "must be true, or the number of pods stays as it is: none is started for a waiting trial"
        fix = "write `enableInTreeAutoscaling: true`"
        yield warning(f"{prefix}.enableInTreeAutoscaling", MISSING, rule, fix)


def _kuberay_head(field: str, group: Mapping[str, Any]) -> Iterator[Finding]:
    fix = "write `serviceType: ClusterIP`, no ingress, and use `kubectl port-forward`"
    kind = group.get("serviceType")
    if kind in ("LoadBalancer", "NodePort"):
        yield error(f"{field}.serviceType", kind, common.OPEN_PORT, fix)
    if group.get("enableIngress"):
        yield error(f"{field}.enableIngress", True, common.OPEN_PORT, fix)
    told_cpus, _ = resources_of(group, "CPU", "cpu")
    told_gpus, gpus = resources_of(group, "GPU", GPU)
    if told_cpus != 0 or (gpus if told_gpus is None else told_gpus):
        start = dict(group.get("rayStartParams") or {})
        yield warning(
            f"{field}.rayStartParams",
            start,
            common.HEAD_WORKS,
            'write `num-cpus: "0"` and `num-gpus: "0"`',
        )


def _kuberay_worker(field: str, group: Mapping[str, Any]) -> Iterator[Finding]:
    told, limit = resources_of(group, "GPU", GPU)
    if told is not None and told != limit:
        rule = f"must be the container's limit of {GPU}, {limit:g}"
        yield error(
            f"{field}.rayStartParams.num-gpus", told, rule, f'write "{limit:g}"'
        )
    tolerated = {entry.get("key") for entry in pod_of(group).get("tolerations") or ()}
    # A toleration without a key tolerates everything.
    if limit and not tolerated & {GPU, None}:
        rule = f"must tolerate {GPU}, the taint of GPU nodes, or no pod is ever placed"
        fix = f"add `{{key: {GPU}, operator: Exists, effect: NoSchedule}}`"
        yield warning(f"{field}.template.spec.tolerations", MISSING, rule, fix)
