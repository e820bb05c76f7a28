"""How a process joins a cluster: an embedded one listens on the loopback alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import ray_constants

from trainers.on_ray.connect import connect


@pytest.mark.parametrize(("address", "several_nodes"), [(None, False), ("local", False), ("10.0.0.7:6379", True)])
@pytest.mark.parametrize("fails", [False, True])
def test_a_cluster_of_this_process_s_own_is_for_this_machine_alone(
    address: str | None, several_nodes: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ray's own switch, from which the addresses of all its ports follow; users' settings are put back."""
    seen: list[Any] = []

    def init(address: str, **options: Any) -> Any:
        seen.append((address, ray_constants.ENABLE_RAY_CLUSTER))
        if fails:
            raise ConnectionError
        return SimpleNamespace(dashboard_url=None)

    if address is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    if fails:
        with pytest.raises(ConnectionError):
            connect()
    else:
        connect()
    assert seen == [(address or "local", several_nodes)]
    assert ray_constants.ENABLE_RAY_CLUSTER
