"""Cluster files: what is refused, what is remarked on, and that aws.yaml has neither."""

from __future__ import annotations

import copy
import importlib.metadata
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.__main__ import main
from cluster.config import load_cluster
from cluster.findings import Finding, expected_versions, findings
from trainers.errors import ConfigError, ConfigErrors

Tree = dict[str, Any]
Change = Callable[[Tree], object]

AWS = Path(__file__).parents[2] / "cluster" / "aws.yaml"
LOCAL: Tree = {
    "cluster_name": "lab",
    "provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2", "10.0.0.3"]},
    "auth": {"ssh_user": "root"},
    "file_mounts": {"/root/.ray/auth_token": "~/.ray/auth_token"},
    "head_start_ray_commands": [
        "ray stop",
        "export RAY_AUTH_MODE=token; export PACELINE_STORAGE=/nfs; ray start --head --autoscaling-config=x",
    ],
    "worker_start_ray_commands": ["RAY_AUTH_MODE=token PACELINE_STORAGE='/nfs' ray start --address=$RAY_HEAD_IP:6379"],
}
V2_OFF = {"RAY_UP_enable_autoscaler_v2": "0"}
HEAD, WORKER = "head_start_ray_commands", "worker_start_ray_commands"


@pytest.fixture
def aws() -> Tree:
    tree: Tree = yaml.safe_load(AWS.read_text(encoding="utf-8"))
    return tree


def write(tmp_path: Path, tree: object) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return str(path)


def refused(tmp_path: Path, tree: object) -> list[ConfigError]:
    """The errors of a file that must be refused; each names file, field, rule and fix."""
    file = write(tmp_path, tree)
    with pytest.raises(ConfigError) as caught:
        load_cluster(file)
    error = caught.value
    errors = error.errors if isinstance(error, ConfigErrors) else [error]
    for one in errors:
        assert str(one).startswith(f"{file}: `{one.field}` ")
        assert one.rule
        assert one.fix
    return errors


def remarks(tmp_path: Path, tree: Tree, environ: dict[str, str] | None = None) -> list[Finding]:
    return findings(load_cluster(write(tmp_path, tree)), environ or {})


def replace(field: str, old: str, new: str) -> Change:
    def change(tree: Tree) -> None:
        before = list(tree[field])
        tree[field] = [command.replace(old, new) for command in before]
        assert tree[field] != before

    return change


def put(dotted: str, value: object) -> Change:
    def change(tree: Tree) -> None:
        *path, last = dotted.split(".")
        for part in path:
            tree = tree[part]
        tree[last] = value

    return change


def drop(dotted: str) -> Change:
    def change(tree: Tree) -> None:
        *path, last = dotted.split(".")
        for part in path:
            tree = tree[part]
        del tree[last]

    return change


def test_aws_yaml_is_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(AWS), "--strict"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{AWS}: in order (aws, up to 8 worker nodes)\n"
    assert captured.err == ""


def test_aws_yaml_is_read() -> None:
    cluster = load_cluster(AWS)
    assert (cluster.name, cluster.provider, cluster.region) == ("paceline", "aws", "us-east-1")
    assert (cluster.max_workers, cluster.sum_max_workers) == (8, 12)
    assert cluster.head.name == cluster.head_node_type == "head"
    assert cluster.head.resources == {"CPU": 0, "GPU": 0}
    types = {node_type.name: node_type for node_type in cluster.node_types}
    assert (types["gpu_spot"].spot, types["gpu_on_demand"].spot, types["head"].spot) == (True, False, False)
    assert types["gpu_spot"].priority > types["gpu_on_demand"].priority
    assert {node_type.min_workers for node_type in types.values()} == {0}
    assert types["gpu_spot"].instance_type == "g5.2xlarge"


def test_aws_yaml_pins_the_tested_versions() -> None:
    installs = " ".join(load_cluster(AWS).commands["setup_commands"])
    versions = expected_versions()
    assert f'"ray[default,train,tune]=={versions["ray"]}"' in installs
    assert f'"torch=={versions["torch"]}"' in installs


REFUSED: list[tuple[str, Change, str, str]] = [
    ("typo_at_the_top", put("setup_comands", []), "setup_comands", "did you mean `setup_commands`?"),
    ("unknown", put("zebra", 1), "zebra", "the fields here are"),
    (
        "typo_in_a_type",
        put("available_node_types.gpu_spot.min_worker", 1),
        "available_node_types.gpu_spot.min_worker",
        "did you mean `min_workers`?",
    ),
    ("typo_in_auth", put("auth.ssh_usr", "x"), "auth.ssh_usr", "did you mean `ssh_user`?"),
    ("head_typo", put("head_node_type", "haed"), "head_node_type", "did you mean `head`?"),
    ("head_unknown", put("head_node_type", "zebra"), "head_node_type", "name one of head, gpu_spot"),
    ("no_head", drop("head_node_type"), "head_node_type", "add `head_node_type: head`"),
    ("head_gone", drop("available_node_types.head"), "head_node_type", "name one of gpu_spot"),
    ("no_provider", drop("provider"), "provider", "add `provider`"),
    ("provider_without_type", drop("provider.type"), "provider.type", "add `type`"),
    ("provider_unknown", put("provider.type", "amazon"), "provider.type", "correct it"),
    ("kuberay", put("provider.type", "kuberay"), "provider.type", "kubectl"),
    (
        "type_above_the_cluster",
        put("available_node_types.gpu_spot.max_workers", 9),
        "available_node_types.gpu_spot.max_workers",
        "write 8",
    ),
    (
        "min_above_max",
        put("available_node_types.gpu_on_demand.min_workers", 5),
        "available_node_types.gpu_on_demand.min_workers",
        "write 4 or less",
    ),
    (
        "negative",
        put("available_node_types.gpu_spot.min_workers", -1),
        "available_node_types.gpu_spot.min_workers",
        "write 0",
    ),
    ("text_for_a_number", put("max_workers", "8"), "max_workers", "docs.ray.io"),
    ("negative_limit", put("max_workers", -1), "max_workers", "docs.ray.io"),
    ("commands_no_list", put("setup_commands", "ls"), "setup_commands", "docs.ray.io"),
    (
        "half_a_gpu",
        put("available_node_types.gpu_spot.resources.GPU", 0.5),
        "available_node_types.gpu_spot.resources.GPU",
        "docs.ray.io",
    ),
    (
        "no_resources",
        drop("available_node_types.gpu_spot.resources"),
        "available_node_types.gpu_spot.resources",
        "add `resources`",
    ),
    ("empty_docker", put("docker", None), "docker", "docs.ray.io"),
    ("half_docker", put("docker", {"image": "x"}), "the file", "docs.ray.io"),
]


@pytest.mark.parametrize(("change", "field", "fix"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused(aws: Tree, tmp_path: Path, change: Change, field: str, fix: str) -> None:
    change(aws)
    errors = refused(tmp_path, aws)
    assert [error.field for error in errors] == [field]
    assert fix in errors[0].fix


def test_all_wrong_numbers_are_said_at_once(aws: Tree, tmp_path: Path) -> None:
    aws["head_node_type"] = "zebra"
    aws["available_node_types"]["gpu_spot"] |= {"min_workers": 9, "max_workers": 9}
    assert [error.field for error in refused(tmp_path, aws)] == [
        "head_node_type",
        "available_node_types.gpu_spot.max_workers",
        "max_workers",
    ]


@pytest.mark.parametrize(
    ("text", "field", "rule"),
    [
        ("a: [", "line 1, column 5", "is not YAML"),
        ("- 1\n", "the file", "must be a mapping"),
        ("", "the file", "must be a mapping"),
        ("a: !!python/object/apply:os.getcwd []\n", "line 1, column 4", "is not YAML"),
    ],
)
def test_what_is_no_cluster_file(tmp_path: Path, text: str, field: str, rule: str) -> None:
    (error,) = refused(tmp_path, text)
    assert error.field == field
    assert error.rule.startswith(rule)


def test_a_missing_file_or_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_cluster(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster(tmp_path)


TYPES = "available_node_types"
TOKEN = "export RAY_AUTH_MODE=token;"  # noqa: S105
STORAGE = "export PACELINE_STORAGE=s3://MY-BUCKET/paceline;"


def opened(port: int, addresses: str) -> Change:
    entry = {"FromPort": port, "ToPort": port, "IpProtocol": "tcp", "IpRanges": [{"CidrIp": addresses}]}
    return put("provider.security_group", {"GroupName": "g", "IpPermissions": [entry]})


REMARKS: list[tuple[str, Change, str, str]] = [
    ("limit_never_reached", put("max_workers", 13), "warning", "max_workers"),
    ("ray_older", replace("setup_commands", "tune]==2.60.0", "tune]==2.59.0"), "error", "setup_commands"),
    ("ray_not_pinned", replace("setup_commands", "tune]==2.60.0", "tune]"), "warning", "setup_commands"),
    ("ray_at_least", replace("setup_commands", "tune]==2.60.0", "tune]>=2.60"), "warning", "setup_commands"),
    ("ray_wheel", replace("setup_commands", "]==2.60.0", "] @ https://x/r.whl"), "warning", "setup_commands"),
    ("torch_older", replace("setup_commands", "torch==2.15.0", "torch==2.11.0"), "warning", "setup_commands"),
    (
        "ray_older_on_workers",
        put("worker_setup_commands", ["pip install 'ray==2.1.0' && ray stop"]),
        "error",
        "worker_setup_commands",
    ),
    (
        "torch_older_in_initialization",
        put("initialization_commands", ["uv pip install torch==2.11.0"]),
        "warning",
        "initialization_commands",
    ),
    (
        "ray_older_in_a_type",
        put(f"{TYPES}.gpu_spot.worker_setup_commands", ["pip install ray==2.1.0"]),
        "error",
        f"{TYPES}.gpu_spot.worker_setup_commands",
    ),
    (
        "image_older",
        put("docker", {"image": "rayproject/ray:2.59.0-py312-gpu", "container_name": "ray"}),
        "error",
        "docker.image",
    ),
    (
        "image_not_pinned",
        put("docker", {"image": "rayproject/ray:latest-gpu", "container_name": "ray"}),
        "warning",
        "docker.image",
    ),
    (
        "more_gpus_than_the_machine",
        put(f"{TYPES}.gpu_spot.resources.GPU", 4),
        "error",
        f"{TYPES}.gpu_spot.resources.GPU",
    ),
    ("idle_gpus", put(f"{TYPES}.gpu_spot.resources.GPU", 0), "warning", f"{TYPES}.gpu_spot.resources.GPU"),
    ("more_cpus", put(f"{TYPES}.gpu_spot.resources.CPU", 16), "error", f"{TYPES}.gpu_spot.resources.CPU"),
    ("gpu_on_the_head", put(f"{TYPES}.head.resources.GPU", 1), "error", f"{TYPES}.head.resources.GPU"),
    ("open_dashboard", replace(HEAD, "host=127.0.0.1", "host=0.0.0.0"), "warning", HEAD),
    ("open_dashboard_6", replace(HEAD, "host=127.0.0.1", "host '::'"), "warning", HEAD),
    ("no_token_on_the_head", replace(HEAD, TOKEN, ""), "error", HEAD),
    ("no_token_on_workers", replace(WORKER, TOKEN, ""), "error", WORKER),
    ("token_off", replace(WORKER, "MODE=token", "MODE=disabled"), "error", WORKER),
    ("token_stays_at_home", put("file_mounts", {}), "error", "file_mounts"),
    ("token_elsewhere", put("file_mounts", {"~/token": "~/.ray/auth_token"}), "error", "file_mounts"),
    ("token_in_the_file", replace(HEAD, TOKEN, "RAY_AUTH_TOKEN=a " + TOKEN), "error", "RAY_AUTH_TOKEN"),
    ("no_storage_on_the_head", replace(HEAD, STORAGE, ""), "warning", HEAD),
    ("no_storage_on_workers", replace(WORKER, STORAGE, ""), "warning", WORKER),
    ("empty_storage", replace(WORKER, "=s3://MY-BUCKET/paceline", "="), "warning", WORKER),
    ("two_storages", replace(WORKER, "MY-BUCKET", "other"), "error", WORKER),
    (
        "port_open_to_the_world",
        opened(8265, "0.0.0.0/0"),
        "error",
        "provider.security_group.IpPermissions",
    ),
]


@pytest.mark.parametrize(("change", "level", "field"), [r[1:] for r in REMARKS], ids=[r[0] for r in REMARKS])
def test_remarked(aws: Tree, tmp_path: Path, change: Change, level: str, field: str) -> None:
    change(aws)
    found = remarks(tmp_path, aws)
    assert [(finding.level, finding.field) for finding in found] == [(level, field)]
    assert str(found[0]).startswith(f"`{field}` ")
    assert found[0].rule
    assert found[0].fix


NO_REMARK: list[tuple[str, Change]] = [
    ("limit_reached", put("max_workers", 12)),
    ("local_build", replace("setup_commands", "torch==2.15.0", "torch==2.15.0+cu130")),
    ("pinned_by_a_file", put("worker_setup_commands", ["pip install -c constraints.txt ray torch"])),
    ("other_packages", put("worker_setup_commands", ["pip install torchvision ray_lightning raytune-x"])),
    ("no_install", put("worker_setup_commands", ["echo ray torch==1.0", "ray stop"])),
    ("image", put("docker", {"image": "rayproject/ray:2.60.0-py312-gpu", "container_name": "ray"})),
    ("other_image", put("docker", {"image": "my.registry/ray-train:7", "container_name": "ray"})),
    ("unknown_machine", put(f"{TYPES}.gpu_spot.node_config.InstanceType", "z9.huge")),
    ("detected", put(f"{TYPES}.gpu_spot.resources", {})),
    ("head_gpu_unused", put(f"{TYPES}.head.node_config.InstanceType", "g5.2xlarge")),
    ("localhost", replace(HEAD, "host=127.0.0.1", "host=localhost")),
    ("default_host", replace(HEAD, "--dashboard-host=127.0.0.1", "")),
    ("home_written_out", put("file_mounts", {"/home/ubuntu/.ray/auth_token": "~/.ray/auth_token"})),
    ("ssh_for_everybody", opened(22, "0.0.0.0/0")),
    ("own_addresses", opened(8265, "10.0.0.0/8")),
]


@pytest.mark.parametrize("change", [r[1] for r in NO_REMARK], ids=[r[0] for r in NO_REMARK])
def test_not_remarked(aws: Tree, tmp_path: Path, change: Change) -> None:
    change(aws)
    assert remarks(tmp_path, aws) == []


def test_settings_in_a_profile_count(aws: Tree, tmp_path: Path) -> None:
    for field in (HEAD, WORKER):
        replace(field, STORAGE, "")(aws)
        replace(field, TOKEN, "")(aws)
    aws["setup_commands"].append(f"echo '{TOKEN} {STORAGE}' >> ~/.bashrc")
    assert remarks(tmp_path, aws) == []


def test_an_export_in_another_command_does_not_count(aws: Tree, tmp_path: Path) -> None:
    replace(HEAD, STORAGE, "")(aws)
    aws[HEAD].insert(1, STORAGE)
    assert [finding.field for finding in remarks(tmp_path, aws)] == [HEAD]


def test_ray_defaults_are_remarked_on(tmp_path: Path) -> None:
    """Ray's own commands: an open dashboard, no token, a wheel from a branch."""
    found = remarks(tmp_path, {"cluster_name": "a", "provider": {"type": "aws", "region": "us-east-1"}})
    assert {(finding.level, finding.field) for finding in found} == {
        ("warning", "setup_commands"),
        ("warning", HEAD),  # the dashboard; and no storage
        ("error", HEAD),
        ("error", WORKER),
        ("warning", WORKER),
    }
    assert len(found) == 6


def test_local(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, LOCAL))
    assert [(node_type.min_workers, node_type.max_workers) for node_type in cluster.node_types] == [(2, 2)]
    assert findings(cluster, V2_OFF) == []
    for environ in ({}, {"RAY_UP_enable_autoscaler_v2": "1"}):
        assert [(f.level, f.field) for f in findings(cluster, environ)] == [("warning", "provider.type")]


def test_local_minimum_is_all_addresses_unless_said(tmp_path: Path) -> None:
    (error,) = refused(tmp_path, {**LOCAL, "max_workers": 1})
    assert (error.field, error.value) == ("min_workers", 2)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_local_limit_differs_from_the_addresses(tmp_path: Path, num_workers: int) -> None:
    tree = {**LOCAL, "min_workers": 0, "max_workers": num_workers}
    found = remarks(tmp_path, tree, V2_OFF)
    assert [(finding.field, finding.value) for finding in found] == [("max_workers", num_workers)]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (drop("provider.head_ip"), "provider.head_ip"),
        (drop("provider.worker_ips"), "provider.worker_ips"),
        (put("available_node_types", {}), "available_node_types"),
        (put("provider", {"type": "local", "coordinator_address": "x:1"}), "max_workers"),
    ],
)
def test_local_refused(tmp_path: Path, change: Change, field: str) -> None:
    tree = copy.deepcopy(LOCAL)
    change(tree)
    assert [error.field for error in refused(tmp_path, tree)] == [field]


def test_loading_changes_and_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    level = logging.getLogger("ray.autoscaler").level
    file = write(tmp_path, {**LOCAL, "min_workers": 0, "max_workers": 1})  # Ray has a remark on this
    before = Path(file).read_bytes()
    assert load_cluster(file) == load_cluster(file)
    assert Path(file).read_bytes() == before
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("ray.autoscaler").level == level


def test_exit_codes(aws: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    aws["max_workers"] = 13
    file = write(tmp_path, aws)
    assert main(["validate", file]) == 0
    assert main(["validate", file, "--strict"]) == 1
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith(f"warning: {file}: `max_workers` is 13, but can never be reached")

    aws["file_mounts"] = {}
    assert main(["validate", write(tmp_path, aws)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2

    aws["zebra"] = 1
    assert main(["validate", write(tmp_path, aws), str(AWS)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {file}: `zebra`")
    assert str(AWS) in captured.out  # the next file is checked all the same


def test_expected_versions_come_from_the_constraints_first(tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("numpy==2.0\nray[default]==9.8.7  # why\ntorchvision==0.1\n", encoding="utf-8")
    assert expected_versions(constraints) == {"ray": "9.8.7", "torch": importlib.metadata.version("torch")}
    installed = {package: importlib.metadata.version(package) for package in ("ray", "torch")}
    assert expected_versions(tmp_path / "nope.txt") == installed
