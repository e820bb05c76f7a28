"""How a process joins a cluster: an embedded one listens on the loopback alone."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import ray_constants

from trainers.errors import ClusterError
from trainers.on_ray import reaper
from trainers.on_ray.connect import connect, disconnect


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
            raise Exception("The current node timed out during startup.\nMore of it.")  # as Ray's own
        return SimpleNamespace(dashboard_url=None)

    if address is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    node = SimpleNamespace(get_session_dir_path=lambda: "/session", live_processes=list)
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    reaped: list[str] = []
    monkeypatch.setattr(reaper, "start", lambda session, token: reaped.append(session))
    if fails:
        where = f"joined at RAY_ADDRESS {address}" if several_nodes else "start on this machine"
        with pytest.raises(ClusterError, match=rf"{where}: The current node timed out during startup\. \("):
            connect()
    else:
        connect()
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        disconnect()
    assert seen == [(address or "local", several_nodes)]
    assert reaped == (["/session"] if address != "10.0.0.7:6379" and not fails and sys.platform == "linux" else [])
    assert ray_constants.ENABLE_RAY_CLUSTER


@pytest.mark.parametrize("stopped", [False, True])
def test_leaving_waits_for_no_process_that_was_stopped(stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray waits for the raylet's answer; killed, it needs none."""
    killed = threading.Event()
    process = SimpleNamespace(kill=killed.set)
    node = SimpleNamespace(live_processes=lambda: [("raylet", process)])
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr("trainers.on_ray.connect._LEAVE_S", 0.05 if stopped else 1e6)
    monkeypatch.setattr(ray, "shutdown", killed.wait if stopped else lambda: None)
    disconnect()
    assert killed.is_set() == stopped


def test_what_a_process_does_at_sigterm_is_not_rays_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost lease ends the command by it, in a sentence, also while the command leaves the cluster, and after."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))

    def take(handler: Any) -> Any:
        return lambda **options: signal.signal(signal.SIGTERM, handler) and SimpleNamespace(dashboard_url=None)

    def end() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    node = SimpleNamespace(live_processes=list, get_session_dir_path=lambda: "/session")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", take(signal.SIG_IGN))
    monkeypatch.setattr(ray, "shutdown", end)
    try:
        connect()
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        disconnect()
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM] * 3
