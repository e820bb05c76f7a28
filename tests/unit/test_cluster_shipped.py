"""The cluster files that Paceline ships: accepted by Ray, in order, pinned, planned."""

import re
import shlex
import subprocess

import pytest
import yaml

from cluster.__main__ import main
from cluster.files.ray_up import load_cluster
from cluster.files.rules import expected_versions
from tests.specs import REPOSITORY
from tests.unit.cluster_files import in_the_repository  # noqa: F401 (used by every test)

RAY_UP = ("aws", "gcp", "azure", "onprem")
START_FIELDS = ("head_start_ray_commands", "worker_start_ray_commands")


def path_of(name):
    return REPOSITORY / "cluster" / f"{name}.yaml"


def tree_of(name):
    return yaml.safe_load(path_of(name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RAY_UP)
def test_validate_strict_finds_nothing(name, capsys):
    assert main(["validate", str(path_of(name)), "--strict"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("in order") == 1


@pytest.mark.parametrize("name", RAY_UP)
def test_nodes_get_paceline_and_all_that_it_needs(name):
    """From a mounted copy of the sources, so that a job of any directory runs,
    at the versions of constraints.txt.
    """
    tree = tree_of(name)
    mounts = tree["file_mounts"]
    for local in mounts.values():
        assert local.startswith("~") or (REPOSITORY / local).exists(), local
    needed = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "constraints.txt",
        "cluster",
        "trainers",
        "tune",
    }
    assert needed <= set(mounts.values())
    for local in needed:
        assert mounts[f"~/paceline-src/{local}"] == local
    (install,) = [
        shlex.split(command)
        for command in tree["setup_commands"]
        if "pip install" in command
    ]
    assert install[install.index("-c") + 1] == "~/paceline-src/constraints.txt"
    assert "$HOME/paceline-src[examples]" in install
    versions = expected_versions()
    assert f"ray[default,train,tune]=={versions['ray']}" in install
    assert f"torch=={versions['torch']}" in install


@pytest.mark.parametrize("name", RAY_UP)
def test_the_head_trains_nothing_and_workers_come_from_zero(name):
    cluster = load_cluster(path_of(name))
    [head] = [
        node_type for node_type in cluster.node_types if node_type.is_head
    ]
    assert head.resources == {"CPU": 0, "GPU": 0}
    workers = [
        node_type for node_type in cluster.node_types if not node_type.is_head
    ]
    if name == "onprem":
        assert [worker.min_workers for worker in workers] == [2]
        return
    assert {worker.min_workers for worker in workers} == {0}
    assert all(worker.resources["GPU"] == 1 for worker in workers)
    spot, on_demand = sorted(workers, key=lambda worker: not worker.spot)
    assert (spot.spot, on_demand.spot) == (True, False)
    assert spot.priority > on_demand.priority
    assert spot.instance_type == on_demand.instance_type


@pytest.mark.parametrize("name", RAY_UP)
def test_start_commands_agree(name):
    """Every setting of a worker is the head's."""
    tree = tree_of(name)
    head, worker = (
        dict(re.findall(r"export (\w+)=([^;\s]+);", " ".join(tree[field])))
        for field in START_FIELDS
    )
    assert worker.items() <= head.items()
    if name != "onprem":
        head_command, worker_command = (
            tree[field][-1] for field in START_FIELDS
        )
        assert "--no-monitor" in head_command
        assert (
            "(setsid paceline-cluster autoscale ~/ray_bootstrap_config.yaml"
            in head_command
        )
        assert f"(setsid paceline-cluster watch {name} " in worker_command


@pytest.mark.parametrize("name", RAY_UP)
def test_commands_are_valid_shell(name):
    tree = tree_of(name)
    for field in (field for field in tree if field.endswith("_commands")):
        for command in tree[field]:
            done = subprocess.run(
                ["bash", "-n"],
                input=command,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
