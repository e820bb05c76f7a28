"""Ray's autoscaler, and the node type that the cloud refuses."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from ray.autoscaler.v2.instance_manager.node_provider import LaunchNodeError
from ray.autoscaler.v2.instance_manager.reconciler import Reconciler
from ray.autoscaler.v2.instance_manager.subscribers.cloud_resource_monitor import CloudResourceMonitor
from ray.core.generated.instance_manager_pb2 import Instance

from cluster.spot.autoscaler import heed_refusals

STEPS = ("_try_resolve_pending_allocation", "_handle_stuck_requested_instance")


def refused() -> dict[str, float]:
    """What Ray thinks of node types after EC2 has refused a spot machine."""
    instance = Instance(instance_id="1", instance_type="gpu_spot", launch_request_id="r", status=Instance.REQUESTED)
    error = LaunchNodeError("gpu_spot", 1, "r", 0)
    key = "r", "gpu_spot"
    update = Reconciler._try_resolve_pending_allocation(instance, {}, {key: error}, {key: 1})
    assert update is not None
    assert update.new_instance_status == Instance.ALLOCATION_FAILED
    monitor = CloudResourceMonitor()
    monitor.notify([update])
    found: dict[str, float] = monitor.get_recoverable_resource_availabilities()
    return found


def test_a_refused_type_is_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused() == {}, "Ray by itself; where this fails, cluster/spot/autoscaler.py has become needless"
    for step in STEPS:
        monkeypatch.setattr(Reconciler, step, Reconciler.__dict__[step])
    monkeypatch.setattr(CloudResourceMonitor, "notify", CloudResourceMonitor.notify)
    heed_refusals()
    assert refused() == {"gpu_spot": 0.0}
