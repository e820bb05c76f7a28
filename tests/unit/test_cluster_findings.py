"""What Ray accepts in a cluster file and `validate` remarks on: variants of aws.yaml, each with its one finding."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from cluster.__main__ import main
from cluster.rules.versions import expected_versions
from tests.specs import REPOSITORY
from tests.unit.cluster_files import HEAD, TYPES, WORKER, Change, Tree, put, remarks, replace, shipped, write

AWS = REPOSITORY / "cluster" / "aws.yaml"
TOKEN = "export RAY_AUTH_MODE=token;"  # noqa: S105
STORAGE = "export PACELINE_STORAGE=s3://MY-BUCKET/paceline;"
CONSTRAINTS = "~/paceline-src/constraints.txt"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in file_mounts are relative to where `ray up` runs."""
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture
def aws() -> Tree:
    return shipped("aws")


def without_constraints(old: str, new: str) -> Change:
    def change(tree: Tree) -> None:
        replace("setup_commands", f"-c {CONSTRAINTS} ", "")(tree)
        replace("setup_commands", old, new)(tree)

    return change


def mount(place: str, local: str) -> Change:
    """Another file sent to a place."""
    return put("file_mounts", {"~/.ray/auth_token": "~/.ray/auth_token", place: local})


def rename_mount(place: str, to: str | None) -> Change:
    """The same file sent to another place, or to none."""

    def change(tree: Tree) -> None:
        local = tree["file_mounts"].pop(place)
        if to is not None:
            tree["file_mounts"][to] = local

    return change


def opened(port: int, addresses: str) -> Change:
    entry = {"FromPort": port, "ToPort": port, "IpProtocol": "tcp", "IpRanges": [{"CidrIp": addresses}]}
    return put("provider.security_group", {"GroupName": "g", "IpPermissions": [entry]})


REMARKS: list[tuple[str, Change, str, str]] = [
    ("limit_never_reached", put("max_workers", 13), "warning", "max_workers"),
    ("ray_older", replace("setup_commands", "tune]==2.60.0", "tune]==2.59.0"), "error", "setup_commands"),
    ("ray_not_pinned", without_constraints("tune]==2.60.0", "tune]"), "warning", "setup_commands"),
    ("ray_at_least", without_constraints("tune]==2.60.0", "tune]>=2.60"), "warning", "setup_commands"),
    ("ray_wheel", without_constraints("]==2.60.0", "] @ https://x/r.whl"), "warning", "setup_commands"),
    (
        "another_package_older",
        put("worker_setup_commands", ["pip install PyArrow==20.0"]),
        "warning",
        "worker_setup_commands",
    ),
    ("constraints_stay_at_home", rename_mount(CONSTRAINTS, None), "error", "setup_commands"),
    ("constraints_of_others", mount(CONSTRAINTS, "pyproject.toml"), "error", f"file_mounts.{CONSTRAINTS}"),
    ("constraints_not_here", mount(CONSTRAINTS, "nowhere.txt"), "warning", f"file_mounts.{CONSTRAINTS}"),
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
    ("token_stays_at_home", rename_mount("~/.ray/auth_token", None), "error", "file_mounts"),
    ("token_elsewhere", rename_mount("~/.ray/auth_token", "~/token"), "error", "file_mounts"),
    ("token_in_the_file", replace(HEAD, TOKEN, "RAY_AUTH_TOKEN=a " + TOKEN), "error", "RAY_AUTH_TOKEN"),
    ("no_storage_on_the_head", replace(HEAD, STORAGE, ""), "warning", HEAD),
    ("no_storage_on_workers", replace(WORKER, STORAGE, ""), "warning", WORKER),
    ("empty_storage", replace(WORKER, "=s3://MY-BUCKET/paceline", "="), "warning", WORKER),
    ("two_storages", replace(WORKER, "MY-BUCKET", "other"), "error", WORKER),
    (
        "password_in_an_address",
        put("rsync_filter", ["https://me:hunter2@pypi.example.org"]),
        "error",
        "a cloud key",
    ),
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
    ("pinned_by_a_file", put("worker_setup_commands", ["pip install -c ~/paceline-src/constraints.txt ray torch"])),
    ("pinned_on_the_web", put("worker_setup_commands", ["pip install -c https://x/c.txt ray torch"])),
    ("other_packages", put("worker_setup_commands", ["pip install torchvision ray_lightning raytune-x"])),
    ("no_install", put("worker_setup_commands", ["echo ray torch==1.0", "ray stop"])),
    ("image", put("docker", {"image": "rayproject/ray:2.60.0-py312-gpu", "container_name": "ray"})),
    ("other_image", put("docker", {"image": "my.registry/ray-train:7", "container_name": "ray"})),
    ("unknown_machine", put(f"{TYPES}.gpu_spot.node_config.InstanceType", "z9.huge")),
    ("detected", put(f"{TYPES}.gpu_spot.resources", {})),
    ("head_gpu_unused", put(f"{TYPES}.head.node_config.InstanceType", "g5.2xlarge")),
    ("localhost", replace(HEAD, "host=127.0.0.1", "host=localhost")),
    ("default_host", replace(HEAD, "--dashboard-host=127.0.0.1", "")),
    ("home_written_out", rename_mount("~/.ray/auth_token", "/home/ubuntu/.ray/auth_token")),
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
        ("warning", "available_node_types.ray.head.default.resources.CPU"),
        ("warning", HEAD),  # the dashboard; slow to notice a dead node; no time for a checkpoint; no storage
        ("error", HEAD),
        ("error", WORKER),
        ("warning", WORKER),
    }
    assert len(found) == 9


def test_exit_codes(aws: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    aws["max_workers"] = 13
    file = write(tmp_path, aws)
    assert main(["validate", file]) == 0
    assert main(["validate", file, "--strict"]) == 1
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith(f"warning: {file}: `max_workers` is 13, but can never be reached")

    del aws["file_mounts"]["~/.ray/auth_token"]
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
    torch = importlib.metadata.version("torch")
    expected = {"numpy": "2.0", "ray": "9.8.7", "torchvision": "0.1", "torch": torch}
    assert expected_versions(constraints) == expected
    installed = {package: importlib.metadata.version(package) for package in ("ray", "torch")}
    assert expected_versions(tmp_path / "nope.txt") == installed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("provider.aws_credentials", {"aws_access_key_id": "AKIAHIDDENHIDDENHIDD", "aws_secret_access_key": "hidden"}),
        ("provider.gcp_credentials", {"type": "service_account", "credentials": "hidden"}),
        ("setup_commands", ["export AWS_ACCESS_KEY_ID=AKIAHIDDENHIDDENHIDD AWS_SECRET_ACCESS_KEY=hidden"]),
        ("head_setup_commands", ["az storage --connection-string 'AccountKey=hidden'"]),
    ],
)
def test_a_key_in_the_file_is_named_and_never_shown(
    aws: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: object
) -> None:
    put(field, value)(aws)
    assert main(["validate", str(write(tmp_path, aws))]) == 2
    printed = "".join(capsys.readouterr())
    assert "long-lived key" in printed
    assert "hidden" not in printed.lower()
