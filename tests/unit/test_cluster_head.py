"""A head that may die: onprem.yaml with its patch, KubeRay's option, and what `validate` says of half of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from cluster.__main__ import main
from cluster.files.ray_up import load_clusters
from cluster.rules.ray_up import findings
from tests.lab.on_premises import with_redis
from tests.specs import REPOSITORY
from tests.unit.cluster_files import HEAD, WORKER, Change, Tree, drop, put, remarks, replace, write
from trainers.errors import ConfigError

PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
SECRET = {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def onprem() -> str:
    return (REPOSITORY / "cluster" / "onprem.yaml").read_text(encoding="utf-8")


def kuberay(document: int) -> Tree:
    """A document of cluster/kuberay.yaml, the cluster's with the option that stands there as a comment."""
    text = (REPOSITORY / "cluster" / "kuberay.yaml").read_text(encoding="utf-8")
    found = re.subn(r"^  # (gcsFaultToleranceOptions:|  redis\w+: .*)$", r"  \1", text, flags=re.MULTILINE)
    assert found[1] == 3
    return list(yaml.safe_load_all(found[0]))[document]


def test_the_patch_fits_a_file_with_other_hosts_login_and_storage(tmp_path: Path) -> None:
    own = re.sub(r"192\.168\.0\.1", "10.1.2.", onprem().replace("/nfs", "/data").replace("ubuntu", "me"))
    assert main(["validate", write(tmp_path, with_redis(own)), "--strict"]) == 0


def without_certificates(tree: Tree) -> None:
    tree[HEAD] = [re.sub(r"export RAY_REDIS_C\w+=\S+;", "", command) for command in tree[HEAD]]


def with_password(word: str) -> Change:
    def change(tree: Tree) -> None:
        without_certificates(tree)
        replace(HEAD, "--port=6379", f"--port=6379 --redis-password={word}")(tree)

    return change


HALF: list[tuple[str, Change, list[tuple[str, str, str]]]] = [
    (
        "no_redis",
        replace(HEAD, "export RAY_REDIS_ADDRESS=rediss://192.168.0.13:6380;"),
        [("warning", HEAD, "dies")] * 4,
    ),
    ("no_address", replace(HEAD, "=rediss://192.168.0.13:6380"), [("warning", HEAD, "dies")] * 4),
    ("open_redis", without_certificates, [("error", HEAD, "who it is")]),
    ("password_in_the_file", with_password("hunter2"), [("error", HEAD, "secret")]),
    ("password_from_a_file", with_password('"$(cat ~/.ray/redis)"'), []),
    ("no_tls", replace(HEAD, "rediss://"), [("error", HEAD, "rediss://")]),
    (
        "no_key",
        replace(HEAD, "export RAY_REDIS_CLIENT_KEY=$HOME/.ray/redis.pem;"),
        [("error", HEAD, "not one of them")],
    ),
    (
        "key_stays_at_home",
        lambda tree: tree["file_mounts"].pop("~/.ray/redis.pem"),
        [("error", "file_mounts", "redis.pem")],
    ),
    ("no_namespace", replace(HEAD, "export RAY_external_storage_namespace=paceline;"), [("warning", HEAD, "share")]),
    ("impatient_workers", replace(WORKER, f"{PATIENCE}=600", f"{PATIENCE}=20"), [("warning", WORKER, "120 or more")]),
    ("rays_own_patience", replace(WORKER, f"export {PATIENCE}=600;"), [("warning", WORKER, "120 or more")]),
    ("no_number", replace(WORKER, f"{PATIENCE}=600", f"{PATIENCE}=long"), [("warning", WORKER, "120 or more")]),
    ("workers_are_stopped", lambda tree: tree[WORKER].insert(0, "ray stop"), [("error", WORKER, "head that is back")]),
]


@pytest.mark.parametrize(("change", "expected"), [one[1:] for one in HALF], ids=[one[0] for one in HALF])
def test_half_of_it(change: Change, expected: list[tuple[str, str, str]], tmp_path: Path) -> None:
    tree = yaml.safe_load(with_redis(onprem()))
    change(tree)
    found = remarks(tmp_path, tree)
    assert [(one.level, one.field) for one in found] == [(level, field) for level, field, _ in expected]
    assert all(words in str(one) for one, (*_, words) in zip(found, expected, strict=True)), found
    assert not any("hunter2" in str(one) for one in found)


def variable(group: str, name: str, **entry: object) -> Change:
    def change(tree: Tree) -> None:
        groups = {"head": tree["spec"]["headGroupSpec"], "worker": tree["spec"]["workerGroupSpecs"][0]}
        container = groups[group]["template"]["spec"]["containers"][0]
        container["env"] = [*container["env"], {"name": name, **entry}]

    return change


def without_options(tree: Tree) -> None:
    del tree["spec"]["gcsFaultToleranceOptions"]
    variable("head", "RAY_REDIS_ADDRESS", value="redis:6379")(tree)


OPTIONS = "spec.gcsFaultToleranceOptions"
ENV = "template.spec.containers.0.env"
IN_KUBERNETES: list[tuple[str, Change, list[tuple[str, str]]]] = [
    ("as_shipped", lambda tree: None, []),
    ("no_address", drop(f"{OPTIONS}.redisAddress"), [("error", f"{OPTIONS}.redisAddress")]),
    ("open_redis", drop(f"{OPTIONS}.redisPassword"), [("error", f"{OPTIONS}.redisPassword")]),
    ("in_the_file", put(f"{OPTIONS}.redisPassword", {"value": "a"}), [("error", f"{OPTIONS}.redisPassword")]),
    ("another_backend", put(OPTIONS, {"backend": "rocksdb"}), []),
    ("without_the_option", without_options, [("error", f"spec.headGroupSpec.{ENV}.RAY_REDIS_ADDRESS")]),
    (
        "said_twice",
        variable("head", "REDIS_PASSWORD", **SECRET),
        [("error", f"spec.headGroupSpec.{ENV}.REDIS_PASSWORD")],
    ),
    (
        "password_for_ray_start",
        put("spec.headGroupSpec.rayStartParams.redis-password", "$REDIS_PASSWORD"),
        [("error", "spec.headGroupSpec.rayStartParams.redis-password")],
    ),
    ("impatient_workers", variable("worker", PATIENCE, value="20"), [("warning", f"spec.workerGroupSpecs.0.{ENV}")]),
]


@pytest.mark.parametrize(
    ("change", "expected"), [one[1:] for one in IN_KUBERNETES], ids=[one[0] for one in IN_KUBERNETES]
)
def test_in_kubernetes(change: Change, expected: list[tuple[str, str]], tmp_path: Path) -> None:
    document = kuberay(0)
    change(document)
    found = findings(load_clusters(write(tmp_path, document))[0])
    assert [(one.level, one.field) for one in found] == expected


def test_the_driver_of_a_job_must_not_be_on_the_head(tmp_path: Path) -> None:
    job = kuberay(1)
    job["spec"]["rayClusterSpec"]["gcsFaultToleranceOptions"] = kuberay(0)["spec"]["gcsFaultToleranceOptions"]
    [found] = findings(load_clusters(write(tmp_path, job))[0])
    assert (found.level, found.field) == ("warning", "spec.entrypointNumCpus")
    job["spec"]["entrypointNumCpus"] = 1
    assert findings(load_clusters(write(tmp_path, job))[0]) == []


def test_a_misspelt_option_would_be_dropped(tmp_path: Path) -> None:
    cluster = kuberay(0)
    cluster["spec"]["gcsFaultToleranceOptions"]["redisUser"] = SECRET
    with pytest.raises(ConfigError, match="did you mean `redisUsername`"):
        load_clusters(write(tmp_path, cluster))
