"""The end of a sweep whose cluster is gone: a process that waits for the dead ends, with a sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.waits import HANG_S

# A driver's process without Ray: its cluster is what the node says.
SCRIPT = """
import sys, threading, time
from types import SimpleNamespace
import ray
import trainers.on_ray.cluster_end as end

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
     "error: Ray's raylet was killed by SIGKILL, and with it the cluster of this process; go on\n"),
    ("stopped", 1, "no table\n",
     "error: Ray's GCS has given up the node of this process, whose raylet does not answer; go on\n"),
    ("joined", 1, "no table\n", "did not answer for 0.5 s; go on\n"),
    ("dashboard", 0, "alive\n", ""),
])  # fmt: skip
def test_a_cluster_that_is_gone(kind: str, code: int, out: str, err: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind], cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.returncode, done.stdout) == (code, out), done.stderr
    assert done.stderr.endswith(err)
    assert done.stderr.count("error:") == code


@pytest.mark.parametrize(("said", "patience_s"), [(None, 45), ("600", 450), ("20", 15), ("soon", 45)])
def test_a_head_may_be_away_for_less_than_ray_waits(said: str | None, patience_s: float) -> None:
    from trainers.on_ray.cluster_end import _patience_s

    assert _patience_s({} if said is None else {"RAY_gcs_rpc_server_reconnect_timeout_s": said}) == patience_s
