"""A cluster of a process's own: on the loopback alone, its signals, its end,
and who kills what is left of it.
"""

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray._private import ray_constants

from tests.conftest import REPOSITORY
from tests.specs import error_of
from tests.waits import HANG_S
from trainers.errors import ClusterError
from trainers.launch.process import embedded
from trainers.on_ray import _reaper as reaper
from trainers.on_ray.cluster import connect, disconnect
from trainers.on_ray.internals import has_token, read_token_again


@pytest.mark.parametrize(
    ("address", "several_nodes"),
    [(None, False), ("local", False), ("10.0.0.7:6379", True)],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_cluster_of_this_process_s_own_is_for_this_machine_alone(
    address, several_nodes, fails, monkeypatch
):
    """By Ray's own switch, from which the addresses of all its ports follow;
    users' settings are put back.
    """
    seen = []

    def init(address, **options):
        seen.append((address, ray_constants.ENABLE_RAY_CLUSTER))
        if fails:
            raise Exception(
                "The current node timed out during startup.\nMore of it."
            )  # as Ray's own
        return SimpleNamespace(dashboard_url=None)

    if address is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    node = SimpleNamespace(
        get_session_dir_path=lambda: "/session", live_processes=list
    )
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    reaped = []
    ended = []
    monkeypatch.setattr(
        reaper,
        "start",
        lambda session, token: (
            reaped.append(session) or (lambda: ended.append(session))
        ),
    )
    if fails:
        where = (
            f"joined at RAY_ADDRESS {address}"
            if several_nodes
            else "start on this machine"
        )
        with pytest.raises(
            ClusterError,
            match=rf"{where}: The current node timed out during startup\. \(",
        ):
            connect()
    else:
        connect()
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        assert embedded() != several_nodes
        disconnect()
        assert not embedded(), "connected by somebody else"
    is_tried_again = fails and not several_nodes
    assert seen == [(address or "local", several_nodes)] * (
        3 if is_tried_again else 1
    )
    assert reaped == (
        ["/session"]
        if address != "10.0.0.7:6379" and not fails and sys.platform == "linux"
        else []
    )
    assert ended == reaped
    assert ray_constants.ENABLE_RAY_CLUSTER


@pytest.mark.parametrize(
    ("environment", "is_named"),
    [
        ({"RAY_AUTH_TOKEN": "0" * 64}, True),
        ({"RAY_AUTH_TOKEN": "0" * 64, "RAY_AUTH_MODE": "token"}, False),
        ({}, False),
    ],
)
def test_a_token_that_was_not_sent_is_named_where_a_cluster_is_not_joined(
    environment, is_named, monkeypatch
):
    """Ray says that it could not connect, whatever the cause."""

    def init(**options):
        raise ConnectionError(
            "Failed to connect to Ray cluster at 10.0.0.7:6379"
        )

    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/none")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ray, "init", init)
    read_token_again()
    try:
        with pytest.raises(ClusterError) as raised:
            connect()
        assert ("RAY_AUTH_MODE=token" in str(raised.value)) == is_named
    finally:
        monkeypatch.undo()
        read_token_again()


def test_a_token_s_file_that_is_missing_is_an_error_of_the_environment(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    read_token_again()
    try:
        with error_of("RAY_AUTH_TOKEN_PATH"):
            has_token()
    finally:
        monkeypatch.undo()
        read_token_again()


@pytest.mark.parametrize("stopped", [False, True])
def test_leaving_waits_for_no_process_that_was_stopped(stopped, monkeypatch):
    """Ray waits for the raylet's answer; killed, it needs none."""
    killed = threading.Event()
    process = SimpleNamespace(kill=killed.set)
    node = SimpleNamespace(live_processes=lambda: [("raylet", process)])
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(
        "trainers.on_ray.cluster._LEAVE_S", 0.05 if stopped else 1e6
    )
    monkeypatch.setattr(
        ray, "shutdown", killed.wait if stopped else lambda: None
    )
    disconnect()
    assert killed.is_set() == stopped


def test_what_a_process_does_at_sigterm_is_not_rays_to_say(monkeypatch):
    """A lost lease ends the command by it, in a sentence, also while the
    command leaves the cluster, and after.
    """
    heard = []
    before = signal.signal(
        signal.SIGTERM, lambda number, frame: heard.append(number)
    )

    def take(handler):
        return lambda **options: (
            signal.signal(signal.SIGTERM, handler)
            and SimpleNamespace(dashboard_url=None)
        )

    def end():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    node = SimpleNamespace(
        live_processes=list, get_session_dir_path=lambda: "/session"
    )
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


# A driver's process without Ray: its cluster is what the node says.
SCRIPT = """
import sys, threading, time
from types import SimpleNamespace
import ray
import trainers.on_ray.vital_signs as end

end._LOOK_S, end._RAYS_PATIENCE_S = 0.05, 2 / 3
dead = {"embedded": [("raylet", SimpleNamespace(returncode=-9))], "dashboard": [("dashboard", None)]}
node = SimpleNamespace(
    dead_processes=lambda: dead.get(sys.argv[1], []) if found.is_set() else [],
    gcs_address="127.0.0.1:1",
)
found = threading.Event()
ray._private.worker._global_node = node

def asked(nodes, timeout):
    if sys.argv[1] == "joined" and found.is_set():
        raise ray.exceptions.RpcError("Deadline Exceeded")
    return [node == "here" and not (sys.argv[1] == "stopped" and found.is_set()) for node in nodes]

client = SimpleNamespace(check_alive=asked)
ray._private.worker.global_worker = SimpleNamespace(gcs_client=client, current_node_id="here")
with end.ending_with_cluster("go on", lambda: print("no table")):
    time.sleep(0.2)
    found.set()
    time.sleep(2 if sys.argv[1] == "dashboard" else 60)
print("alive")
"""


@pytest.mark.parametrize(("kind", "code", "out", "err"), [
    ("embedded", 1, "no table\n",
     "error: Ray's raylet ended by SIGKILL, and with it the cluster of this process; go on\n"),
    ("stopped", 1, "no table\n",
     "error: Ray's GCS has given up the node of this process, whose raylet does not answer; go on\n"),
    ("joined", 1, "no table\n", "did not answer for 0.5 s; go on\n"),
    ("dashboard", 0, "alive\n", ""),
])  # fmt: skip
def test_a_cluster_that_is_gone(kind, code, out, err):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert (done.returncode, done.stdout) == (code, out), done.stderr
    assert done.stderr.endswith(err)
    assert done.stderr.count("error:") == code


@pytest.mark.parametrize(
    ("said", "patience_s"),
    [(None, 45), ("600", 450), ("20", 15), ("soon", 45)],
)
def test_a_head_may_be_away_for_less_than_ray_waits(said, patience_s):
    from trainers.on_ray.vital_signs import _patience_s

    assert (
        _patience_s(
            {}
            if said is None
            else {"RAY_gcs_rpc_server_reconnect_timeout_s": said}
        )
        == patience_s
    )


def sleeper(file, mode="ab"):
    """A process that has a file open, and no other sign of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open(mode) as opened:
        return subprocess.Popen(["sleep", "1000"], pass_fds=[opened.fileno()])


def test_what_outlives_the_driver_is_killed_even_if_it_was_stopped(tmp_path):
    session = tmp_path / "session_1"
    log = session / "logs" / "raylet.out"
    agent = sleeper(log)
    worker = sleeper(log)
    reader = sleeper(log, "rb")
    stranger = sleeper(tmp_path / "session_10" / "logs" / "raylet.out")
    psutil.Process(worker.pid).suspend()
    assert set(reaper.processes(str(session))) == {agent.pid, worker.pid}
    with subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, str(session)],
        stdin=subprocess.PIPE,
    ) as beside:
        assert (agent.poll(), worker.poll()) == (None, None)
    assert beside.returncode == 0
    assert (agent.wait(HANG_S), worker.wait(HANG_S)) == (-9, -9)
    for other in (reader, stranger):
        assert other.poll() is None
        other.kill()
        other.wait()
