"""KubeRay documents: broken variants of kuberay.yaml, each with its one finding or its refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cluster.files.ray_up import load_clusters
from cluster.rules.ray_up import findings
from tests.unit.cluster_files import Change, Tree, drop, parent_of, put, shipped, write
from trainers.errors import ConfigError

POD = "template.spec"
ENV = f"{POD}.containers.0.env"
GPU = "nvidia.com/gpu"


def env(group: str, name: str, **entry: object) -> Change:
    """An environment variable of a group's container replaced, or taken out."""

    def change(spec: Tree) -> None:
        parent, key = parent_of(spec, f"{group}.{ENV}")
        kept = [item for item in parent[key] if item["name"] != name]
        parent[key] = [*kept, {"name": name, **entry}] if entry else kept

    return change


KUBERAY: list[tuple[str, Change, str, str]] = [
    ("ray_older", put("rayVersion", "2.55.0"), "error", "rayVersion"),
    ("ray_not_said", drop("rayVersion"), "error", "rayVersion"),
    ("no_autoscaler", put("enableInTreeAutoscaling", False), "warning", "enableInTreeAutoscaling"),
    (
        "image_not_pinned",
        put(f"workerGroupSpecs.0.{POD}.containers.0.image", "MY-REGISTRY/paceline:latest"),
        "warning",
        f"workerGroupSpecs.0.{POD}.containers.0.image",
    ),
    (
        "image_without_a_tag",
        put(f"headGroupSpec.{POD}.containers.0.image", "my-registry:5000/paceline"),
        "warning",
        f"headGroupSpec.{POD}.containers.0.image",
    ),
    (
        "image_older",
        put(f"workerGroupSpecs.0.{POD}.containers.0.image", "rayproject/ray:2.59.0-py312-gpu"),
        "error",
        f"workerGroupSpecs.0.{POD}.containers.0.image",
    ),
    (
        "token_in_the_file",
        env("headGroupSpec", "RAY_AUTH_TOKEN", value="secret"),
        "error",
        f"headGroupSpec.{ENV}.RAY_AUTH_TOKEN",
    ),
    (
        "gpus_differ",
        put("workerGroupSpecs.0.rayStartParams.num-gpus", "2"),
        "error",
        "workerGroupSpecs.0.rayStartParams.num-gpus",
    ),
    (
        "gpus_said_but_not_asked_for",
        lambda spec: [
            spec["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"][part].pop(GPU)
            for part in ("limits", "requests")
        ],
        "error",
        "workerGroupSpecs.0.rayStartParams.num-gpus",
    ),
    (
        "no_toleration",
        put(f"workerGroupSpecs.0.{POD}.tolerations", []),
        "warning",
        f"workerGroupSpecs.0.{POD}.tolerations",
    ),
    ("training_on_the_head", drop("headGroupSpec.rayStartParams.num-cpus"), "warning", "headGroupSpec.rayStartParams"),
    ("open_service", put("headGroupSpec.serviceType", "LoadBalancer"), "error", "headGroupSpec.serviceType"),
    ("ingress", put("headGroupSpec.enableIngress", True), "error", "headGroupSpec.enableIngress"),
    ("no_storage", env("workerGroupSpecs.0", "PACELINE_STORAGE"), "warning", f"workerGroupSpecs.0.{ENV}"),
    (
        "two_storages",
        env("workerGroupSpecs.0", "PACELINE_STORAGE", value="s3://other"),
        "error",
        f"workerGroupSpecs.0.{ENV}.PACELINE_STORAGE",
    ),
    (
        "restarted_pods",
        put(f"workerGroupSpecs.0.{POD}.restartPolicy", "Always"),
        "error",
        f"workerGroupSpecs.0.{POD}.restartPolicy",
    ),
    (
        "slow_to_notice",
        env("headGroupSpec", "RAY_health_check_period_ms", value="9000"),
        "warning",
        f"headGroupSpec.{ENV}",
    ),
    ("no_time_for_a_checkpoint", env("headGroupSpec", "RAY_JOB_STOP_WAIT_TIME_S"), "warning", f"headGroupSpec.{ENV}"),
]
KUBERAY_REFUSED: list[tuple[str, Change, str, str]] = [
    (
        "typo",
        lambda spec: spec.update(enableIntreeAutoscaling=True),
        "enableIntreeAutoscaling",
        "enableInTreeAutoscaling",
    ),
    (
        "typo_in_a_group",
        put("workerGroupSpecs.0.maxReplica", 8),
        "workerGroupSpecs.0.maxReplica",
        "did you mean `maxReplicas`?",
    ),
    ("min_above_max", put("workerGroupSpecs.0.minReplicas", 9), "workerGroupSpecs.0.minReplicas", "write 8 or less"),
    ("negative", put("workerGroupSpecs.0.minReplicas", -1), "workerGroupSpecs.0.minReplicas", "cluster/kuberay.yaml"),
    ("no_limit", drop("workerGroupSpecs.0.maxReplicas"), "workerGroupSpecs.0.maxReplicas", "add `maxReplicas`"),
    ("no_head", drop("headGroupSpec"), "headGroupSpec", "cluster/kuberay.yaml"),
    (
        "no_container",
        put(f"workerGroupSpecs.0.{POD}.containers", []),
        f"workerGroupSpecs.0.{POD}.containers",
        "cluster/kuberay.yaml",
    ),
    (
        "gpus_no_number",
        put("workerGroupSpecs.0.rayStartParams.num-gpus", "many"),
        "workerGroupSpecs.0.rayStartParams.num-gpus",
        "cluster/kuberay.yaml",
    ),
]


def broken_kuberay(change: Change, tmp_path: Path, job: bool) -> str:
    """The path of the RayCluster or the RayJob alone, with one change in its cluster's spec."""
    document = shipped("kuberay", job)
    change(document["spec"]["rayClusterSpec"] if job else document["spec"])
    return write(tmp_path, document)


@pytest.mark.parametrize("job", [False, True], ids=["RayCluster", "RayJob"])
@pytest.mark.parametrize(("change", "level", "field"), [c[1:] for c in KUBERAY], ids=[c[0] for c in KUBERAY])
def test_kuberay(change: Change, level: str, field: str, job: bool, tmp_path: Path) -> None:
    file = broken_kuberay(change, tmp_path, job)
    prefix = "spec.rayClusterSpec" if job else "spec"
    found = findings(load_clusters(file)[0])
    assert [(finding.level, finding.field) for finding in found] == [(level, f"{prefix}.{field}")]
    assert found[0].rule
    assert found[0].fix


@pytest.mark.parametrize(
    ("change", "field", "fix"), [c[1:] for c in KUBERAY_REFUSED], ids=[c[0] for c in KUBERAY_REFUSED]
)
def test_kuberay_refused(change: Change, field: str, fix: str, tmp_path: Path) -> None:
    file = broken_kuberay(change, tmp_path, job=False)
    with pytest.raises(ConfigError) as caught:
        load_clusters(file)
    assert caught.value.field == f"spec.{field}"
    assert fix in caught.value.fix
    assert str(caught.value).startswith(f"{file}, RayCluster paceline: ")


def test_without_the_operators_token_every_container_needs_its_own(tmp_path: Path) -> None:
    def by_hand(spec: Tree) -> None:
        del spec["authOptions"]
        secret = {"secretKeyRef": {"name": "paceline-token", "key": "auth_token"}}
        for group in ("headGroupSpec", "workerGroupSpecs.0"):
            env(group, "RAY_AUTH_MODE", value="token")(spec)
            env(group, "RAY_AUTH_TOKEN", valueFrom=secret)(spec)

    def half_by_hand(spec: Tree) -> None:
        by_hand(spec)
        env("workerGroupSpecs.0", "RAY_AUTH_TOKEN")(spec)

    assert findings(load_clusters(broken_kuberay(by_hand, tmp_path, job=False))[0]) == []
    found = findings(load_clusters(broken_kuberay(half_by_hand, tmp_path, job=False))[0])
    assert [(finding.level, finding.field) for finding in found] == [("error", f"spec.workerGroupSpecs.0.{ENV}")]
    found = findings(load_clusters(broken_kuberay(drop("authOptions"), tmp_path, job=False))[0])
    assert [finding.level for finding in found] == ["error", "error"]


def test_a_job_that_leaves_its_cluster_behind(tmp_path: Path) -> None:
    path = Path(broken_kuberay(lambda spec: None, tmp_path, job=True))
    job = yaml.safe_load(path.read_text(encoding="utf-8"))
    del job["spec"]["shutdownAfterJobFinishes"]
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    (finding,) = findings(load_clusters(path)[0])
    assert (finding.level, finding.field) == ("warning", "spec.shutdownAfterJobFinishes")
    job["spec"]["entrypiont"] = job["spec"].pop("entrypoint")
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    with pytest.raises(ConfigError, match="did you mean `entrypoint`"):
        load_clusters(path)


KUEUE: list[tuple[str, Change, str, str]] = [
    (
        "grows",
        put("spec.rayClusterSpec.enableInTreeAutoscaling", True),
        "error",
        "rayClusterSpec.enableInTreeAutoscaling",
    ),
    ("stays", drop("spec.shutdownAfterJobFinishes"), "error", "shutdownAfterJobFinishes"),
    ("no_queue", drop("metadata.labels"), "warning", "suspend"),
    ("anothers_cluster", put("spec.clusterSelector", {"ray.io/cluster": "a"}), "error", "clusterSelector"),
]


@pytest.mark.parametrize(("change", "level", "field"), [c[1:] for c in KUEUE], ids=[c[0] for c in KUEUE])
def test_a_job_for_kueue(change: Change, level: str, field: str, tmp_path: Path) -> None:
    document = shipped("kuberay", 2)
    change(document)
    found = findings(load_clusters(write(tmp_path, document))[0])
    assert (level, f"spec.{field}") in [(finding.level, finding.field) for finding in found]
    assert [finding for finding in found if finding.level == "error"][1:] == []


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("kind: ConfigMap\n", "kind"),
        ("kind: RayCluster\napiVersion: ray.io/v1alpha1\nmetadata: {name: a}\n", "apiVersion"),
        ("kind: RayCluster\napiVersion: ray.io/v1\n", "metadata.name"),
        ("kind: RayCluster\napiVersion: ray.io/v1\nmetadata: {name: a}\n", "spec"),
        ("cluster_name: a\n---\ncluster_name: b\n", "the file"),
    ],
)
def test_what_is_no_cluster(text: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_clusters(path)
    assert caught.value.field == field
