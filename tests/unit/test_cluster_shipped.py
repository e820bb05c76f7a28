"""The cluster files that Paceline ships: accepted by Ray and Kubernetes, in order,
pinned, and planned.
"""

import copy
import re
import shlex
import subprocess

import pytest
import yaml

from cluster.__main__ import main
from cluster.files.ray_up import load_clusters
from cluster.rules.common import expected_versions
from tests.specs import REPOSITORY

RAY_UP = ("aws", "gcp", "azure", "onprem")
ALL = (*RAY_UP, "kuberay")
START_FIELDS = ("head_start_ray_commands", "worker_start_ray_commands")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    """Paths in file_mounts are relative to where `ray up` runs; nothing is set for
    provider local.
    """
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("RAY_UP_enable_autoscaler_v2", raising=False)


def path_of(name):
    return REPOSITORY / "cluster" / f"{name}.yaml"


def tree_of(name):
    return yaml.safe_load(path_of(name).read_text(encoding="utf-8"))


def documents():
    return list(yaml.safe_load_all(path_of("kuberay").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ALL)
def test_validate_strict_finds_nothing(name, capsys):
    assert main(["validate", str(path_of(name)), "--strict"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("in order") == (3 if name == "kuberay" else 1)


def test_the_jobs_have_the_clusters_spec():
    cluster, job, queued, _ = documents()
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]
    fixed = copy.deepcopy(cluster["spec"])
    del fixed["enableInTreeAutoscaling"], fixed["autoscalerOptions"]
    fixed["workerGroupSpecs"][0] |= dict.fromkeys(
        ("replicas", "minReplicas", "maxReplicas"), 2
    )
    assert queued["spec"]["rayClusterSpec"] == fixed, "what Kueue admits has a size"
    assert queued["spec"] | {"suspend": True} == queued["spec"], "it waits for Kueue"
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "MY-QUEUE"
    assert "suspend" not in job["spec"], "without Kueue nobody would start it"


def test_only_rays_own_pods_reach_what_asks_for_no_token():
    *clusters, policy = documents()
    assert (policy["apiVersion"], policy["kind"]) == (
        "networking.k8s.io/v1",
        "NetworkPolicy",
    )
    rays = {"matchLabels": {"ray.io/is-ray-node": "yes"}}
    assert (policy["spec"]["podSelector"], policy["spec"]["policyTypes"]) == (
        rays,
        ["Ingress"],
    )
    within, everybody = policy["spec"]["ingress"]
    assert within == {"from": [{"podSelector": rays}]}
    assert everybody == {"ports": [{"protocol": "TCP", "port": 8265}]}, (
        "the port that the token guards"
    )
    labels = [
        document["metadata"]["labels"]["paceline"] for document in (*clusters, policy)
    ]
    assert len(set(labels)) == 4, "each is applied by a label of its own"


@pytest.mark.parametrize("name", RAY_UP)
def test_nodes_get_paceline_and_all_that_it_needs(name):
    """From a mounted copy of the sources, so that a job of any directory runs, at the
    versions of constraints.txt.
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


def test_the_image_installs_what_the_nodes_do():
    text = path_of("kuberay").with_name("Dockerfile").read_text(encoding="utf-8")
    assert f"FROM rayproject/ray:{expected_versions()['ray']}-py312" in text
    assert "-c /home/ray/paceline/constraints.txt" in text
    for copied in re.findall(r"^COPY --chown=\S+ (.+) \S+$", text, re.MULTILINE):
        for source in copied.split():
            assert (REPOSITORY / source).exists(), source


@pytest.mark.parametrize("name", ALL)
def test_the_head_trains_nothing_and_workers_come_from_zero(name):
    for cluster in load_clusters(path_of(name)):
        [head] = [node_type for node_type in cluster.node_types if node_type.is_head]
        assert head.resources == {"CPU": 0, "GPU": 0}
        workers = [
            node_type for node_type in cluster.node_types if not node_type.is_head
        ]
        if name == "onprem":
            assert [worker.min_workers for worker in workers] == [2]
        else:
            assert {worker.min_workers for worker in workers} == {
                2 if "paceline-queued" in cluster.source else 0
            }
            assert all(worker.resources["GPU"] == 1 for worker in workers)
        if name in ("aws", "gcp", "azure"):
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
        head_command, worker_command = (tree[field][-1] for field in START_FIELDS)
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
