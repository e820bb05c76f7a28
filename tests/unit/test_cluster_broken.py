"""Broken variants of the shipped `ray up` files of all providers: each gets its one finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.__main__ import main
from cluster.files.ray_up import load_cluster
from cluster.rules.ray_up import findings
from tests.specs import REPOSITORY
from tests.unit.cluster_files import HEAD, TYPES, WORKER, Change, Tree, broken, drop, put, replace


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("RAY_UP_enable_autoscaler_v2", raising=False)


RAY_UP: list[tuple[str, str, Change, str, str]] = [
    # Google Cloud
    (
        "gcp",
        "more_gpus_than_the_machine",
        put(f"{TYPES}.gpu_spot.resources.GPU", 2),
        "error",
        f"{TYPES}.gpu_spot.resources.GPU",
    ),
    (
        "gcp",
        "more_gpus_than_attached",
        lambda tree: _attached(tree),
        "error",
        f"{TYPES}.gpu_spot.resources.GPU",
    ),
    (
        "gcp",
        "idle_gpus_by_the_name_of_the_machine",
        put(f"{TYPES}.gpu_on_demand.node_config.machineType", "a3-highgpu-4g"),
        "warning",
        f"{TYPES}.gpu_on_demand.resources.GPU",
    ),
    (
        "gcp",
        "gpu_that_cannot_start",
        drop(f"{TYPES}.gpu_on_demand.node_config.scheduling"),
        "error",
        f"{TYPES}.gpu_on_demand.node_config.scheduling.onHostMaintenance",
    ),
    (
        "gcp",
        "workers_without_an_account",
        drop(f"{TYPES}.gpu_on_demand.node_config.serviceAccounts"),
        "warning",
        f"{TYPES}.gpu_on_demand.node_config.serviceAccounts",
    ),
    (
        "gcp",
        "key_in_the_file",
        put("provider.gcp_credentials", {"type": "service_account"}),
        "error",
        "provider.gcp_credentials",
    ),
    ("gcp", "training_on_the_head", put(f"{TYPES}.head.resources.CPU", 8), "warning", f"{TYPES}.head.resources.CPU"),
    ("gcp", "ray_older", replace("setup_commands", "==2.60.0", "==2.55.0"), "error", "setup_commands"),
    (
        "gcp",
        "own_disk",
        lambda tree: [replace(f, "gs://MY-BUCKET", "/tmp")(tree) for f in (HEAD, WORKER)],
        "error",
        HEAD,
    ),
    # Azure
    (
        "azure",
        "more_cpus_than_the_machine",
        put(f"{TYPES}.gpu_spot.resources.CPU", 32),
        "error",
        f"{TYPES}.gpu_spot.resources.CPU",
    ),
    (
        "azure",
        "more_gpus_than_the_machine",
        put(f"{TYPES}.gpu_spot.resources.GPU", 4),
        "error",
        f"{TYPES}.gpu_spot.resources.GPU",
    ),
    ("azure", "identity_of_ray", drop("provider.msi_name"), "warning", "provider.msi_name"),
    ("azure", "slow_to_notice", replace(HEAD, "export RAY_health_check_timeout_ms=1000;"), "warning", HEAD),
    ("azure", "no_time_for_a_checkpoint", replace(HEAD, "export RAY_JOB_STOP_WAIT_TIME_S=120;"), "warning", HEAD),
    ("azure", "no_token", replace(WORKER, "export RAY_AUTH_MODE=token;"), "error", WORKER),
    ("azure", "no_storage", replace(HEAD, "export PACELINE_STORAGE=", "echo "), "warning", HEAD),
    (
        "azure",
        "key_in_a_command",
        put("head_setup_commands", ["export AZURE_CLIENT_SECRET=abc"]),
        "error",
        "a cloud key",
    ),
    ("azure", "limit_never_reached", put("max_workers", 7), "warning", "max_workers"),
    # AWS, beyond test_cluster_config.py
    (
        "aws",
        "key_in_the_file",
        put("provider.aws_credentials", {"aws_access_key_id": "x"}),
        "error",
        "provider.aws_credentials",
    ),
    ("aws", "key_in_a_command", put("setup_commands", ["x AKIAABCDEFGHIJKLMNOP"]), "error", "a cloud key"),
    (
        "aws",
        "workers_without_a_profile",
        drop(f"{TYPES}.gpu_spot.node_config.IamInstanceProfile"),
        "warning",
        f"{TYPES}.gpu_spot.node_config.IamInstanceProfile",
    ),
    ("aws", "no_autoscaler", replace(HEAD, "--autoscaling-config=~/ray_bootstrap_config.yaml"), "error", HEAD),
    (
        "aws",
        "container_port",
        put("docker", {"image": "me/mine:1", "container_name": "c", "run_options": ["-p 8265:8265"]}),
        "error",
        "docker.run_options",
    ),
    # own hosts
    ("onprem", "autoscaler_v2", replace(HEAD, "export RAY_enable_autoscaler_v2=0;"), "warning", "provider.type"),
    (
        "onprem",
        "head_among_the_workers",
        put("provider.worker_ips", ["192.168.0.10", "192.168.0.11"]),
        "error",
        "provider.worker_ips",
    ),
    (
        "onprem",
        "address_twice",
        put("provider.worker_ips", ["192.168.0.11", "192.168.0.11"]),
        "error",
        "provider.worker_ips",
    ),
    ("onprem", "head_on_the_loopback", put("provider.head_ip", "127.0.0.1"), "error", "provider.head_ip"),
    (
        "onprem",
        "fewer_than_the_addresses",
        lambda tree: tree.update(min_workers=0, max_workers=1),
        "warning",
        "max_workers",
    ),
    ("onprem", "open_dashboard", replace(HEAD, "host=127.0.0.1", "host=0.0.0.0"), "warning", HEAD),
    ("onprem", "two_storages", replace(WORKER, "=/nfs/paceline", "=/nfs2"), "error", WORKER),
]


def _attached(tree: Tree) -> None:
    """An n1 machine with one T4 that is said to have two."""
    gpu = tree[TYPES]["gpu_spot"]
    gpu["resources"]["GPU"] = 2
    gpu["node_config"]["machineType"] = "n1-standard-8"
    gpu["node_config"]["guestAccelerators"] = [{"acceleratorType": "nvidia-tesla-t4", "acceleratorCount": 1}]


@pytest.mark.parametrize(
    ("name", "change", "level", "field"),
    [(case[0], *case[2:]) for case in RAY_UP],
    ids=[f"{case[0]}-{case[1]}" for case in RAY_UP],
)
def test_ray_up(name: str, change: Change, level: str, field: str, tmp_path: Path) -> None:
    file = broken(name, change, tmp_path)
    found = findings(load_cluster(file))
    assert [(finding.level, finding.field) for finding in found] == [(level, field)]
    assert found[0].rule
    assert found[0].fix
    assert main(["validate", file, "--strict"]) == (2 if level == "error" else 1)


def test_no_key_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = broken("aws", put("setup_commands", ["x AKIAABCDEFGHIJKLMNOP"]), tmp_path)
    assert main(["validate", file]) == 2
    captured = capsys.readouterr()
    assert "AKIA" not in captured.out + captured.err


def test_the_environment_may_turn_autoscaler_v2_off_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = broken("onprem", replace(HEAD, "export RAY_enable_autoscaler_v2=0;"), tmp_path)
    monkeypatch.setenv("RAY_UP_enable_autoscaler_v2", "0")
    assert main(["validate", file, "--strict"]) == 0
