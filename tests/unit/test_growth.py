"""What a cluster may grow to, from its file as Ray prepares it: no Ray is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainers.on_ray import capacity as growth
from trainers.on_ray.capacity import allowed

REPOSITORY = Path(__file__).parents[2]


def prepared(**more: Any) -> dict[str, Any]:
    types = {
        "head": {"resources": {"CPU": 2}, "max_workers": 0},
        "small": {"resources": {"CPU": 8, "GPU": 1, "memory": 1e9}, "max_workers": 4},
        "large": {"resources": {"CPU": 96, "GPU": 8}, "max_workers": 1},
    }
    return {"available_node_types": types, "head_node_type": "head", "max_workers": 3} | more


def test_the_limits_of_types_and_of_the_cluster_both_count() -> None:
    small, large = {"CPU": 8.0, "GPU": 1.0, "memory": 1e9}, {"CPU": 96.0, "GPU": 8.0}
    assert allowed(prepared()) == [{"CPU": 2.0}, large, small, small]
    assert allowed(prepared(max_workers=10)) == [{"CPU": 2.0}, large, small, small, small, small]
    assert allowed(prepared(max_workers=0)) == [{"CPU": 2.0}]


def test_hosts_of_unknown_size_count_as_one_that_is_up() -> None:
    local = {"local.cluster.node": {"resources": {}, "min_workers": 2, "max_workers": 2}}
    file = {"available_node_types": local, "head_node_type": "local.cluster.node", "max_workers": 2}
    assert allowed(file) == [], "with none up nothing is known"
    up = {"CPU": 16.0, "GPU": 4.0, "node:192.168.0.11": 1.0}
    assert allowed(file, like=up) == [{"CPU": 16.0, "GPU": 4.0}] * 2
    assert allowed({}, like=up) == []


def test_a_job_waits_for_the_first_host_of_unknown_size_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    local = {"local.cluster.node": {"resources": {}, "min_workers": 2, "max_workers": 2}}
    assert growth._sizes_unknown({"available_node_types": local})
    assert not growth._sizes_unknown(prepared())
    assert not growth._sizes_unknown({})
    answers, naps = [[], [], [], [{"CPU": 4.0}]], []
    monkeypatch.setattr(growth, "_workers_up", lambda: answers.pop(0) if len(answers) > 1 else answers[0])
    monkeypatch.setattr(growth.time, "sleep", naps.append)
    growth._wait_for_a_worker.cache_clear()
    growth._wait_for_a_worker()
    assert naps == [1.0, 1.0]
    answers[:] = [[]]
    growth._wait_for_a_worker()
    assert len(naps) == 2, "who has waited once waits no more"
    growth._wait_for_a_worker.cache_clear()


def test_kuberays_own_object_gives_its_pods() -> None:
    """Through Ray's own reading of it, which the head asks Kubernetes for."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    cluster = next(yaml.safe_load_all((REPOSITORY / "cluster" / "kuberay.yaml").read_text(encoding="utf-8")))
    cluster["metadata"]["namespace"] = "default"
    nodes = allowed(_derive_autoscaling_config_from_ray_cr(cluster))
    assert [(node["CPU"], node["GPU"]) for node in nodes[1:]] == [(8, 1)] * 8
    assert (nodes[0]["CPU"], nodes[0]["GPU"]) == (0, 0)


def test_a_driver_on_a_worker_asks_kubernetes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(growth.ray, "nodes", lambda: [{"NodeID": "head", "Resources": {"node:__internal_head__": 1.0}}])
    monkeypatch.setattr(growth, "_of_kuberay", lambda name: {"named": name})
    monkeypatch.setenv("RAY_CLUSTER_NAME", "paceline")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert growth._file.__wrapped__("worker") == {}
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert growth._file.__wrapped__("worker") == {"named": "paceline"}
