"""Cluster files: what is read of them, and what is refused."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest

from cluster.__main__ import main
from cluster.files.ray_up import load_cluster
from cluster.rules.ray_up import findings
from cluster.rules.versions import expected_versions
from tests.specs import REPOSITORY
from tests.unit.cluster_files import LOCAL, Change, Tree, drop, put, remarks, shipped, write
from trainers.errors import ConfigError, ConfigErrors

AWS = REPOSITORY / "cluster" / "aws.yaml"
V2_OFF = {"RAY_UP_enable_autoscaler_v2": "0"}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in file_mounts are relative to where `ray up` runs."""
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture
def aws() -> Tree:
    return shipped("aws")


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


def test_aws_yaml_is_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(AWS), "--strict"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{AWS}: in order (aws, up to 8 worker nodes)\n"
    assert captured.err == ""


def test_aws_yaml_is_read() -> None:
    cluster = load_cluster(AWS)
    assert (cluster.name, cluster.provider, cluster.region) == ("paceline", "aws", "us-east-1")
    assert (cluster.max_workers, cluster.sum_max_workers) == (8, 12)
    head = cluster.node_types[0]
    assert (head.name, head.is_head, head.resources) == ("head", True, {"CPU": 0, "GPU": 0})
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


def test_local(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, LOCAL))
    assert [(node_type.min_workers, node_type.max_workers) for node_type in cluster.node_types] == [(0, 0), (2, 2)]
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
