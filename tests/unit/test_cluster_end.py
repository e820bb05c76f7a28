"""The end of a sweep whose cluster is gone: a process that waits for the dead ends, with a sentence."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import psutil
import pytest

from tests.conftest import REPOSITORY

# A driver's process without Ray: its cluster is what the node says.
SCRIPT = """
import subprocess, sys, threading, time
from types import SimpleNamespace
import ray
import tune.sweep.cluster_end as end

end._LOOK_S, end._PATIENCE_S = 0.05, 0.5
dead = {"embedded": [("raylet", SimpleNamespace(returncode=-9))], "dashboard": [("dashboard", None)]}
node = SimpleNamespace(
    dead_processes=lambda: dead.get(sys.argv[1], []) if found.is_set() else [],
    gcs_address="127.0.0.1:1",
    live_processes=lambda: [("gcs_server", head)],
)
head = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
print(head.stdout.readline().strip())
found = threading.Event()
ray._private.worker._global_node = node

def asked(key, namespace, timeout):
    if sys.argv[1] == "joined" and found.is_set():
        raise ray.exceptions.RpcError("Deadline Exceeded")

ray._private.worker.global_worker = SimpleNamespace(gcs_client=SimpleNamespace(internal_kv_exists=asked))
with end.ending_with_cluster(SimpleNamespace(close=lambda: print("no table")), "go on"):
    time.sleep(0.2)
    found.set()
    time.sleep(2 if sys.argv[1] == "dashboard" else 60)
print("alive")
end._kill(node)
"""


@pytest.mark.parametrize(("kind", "code", "out", "err"), [
    ("embedded", 1, "no table\n",
     "error: Ray's raylet was killed by SIGKILL, and with it the cluster of this process; go on\n"),
    ("joined", 1, "no table\n", "did not answer for 0.5 s; go on\n"),
    ("dashboard", 0, "alive\n", ""),
])  # fmt: skip
def test_a_cluster_that_is_gone(kind: str, code: int, out: str, err: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    agent, _, rest = done.stdout.partition("\n")
    assert (done.returncode, rest) == (code, out), done.stderr
    with contextlib.suppress(psutil.NoSuchProcess):  # what the cluster's processes had started
        psutil.Process(int(agent)).wait(60)
    assert done.stderr.endswith(err)
    assert done.stderr.count("error:") == code
