"""The end of this process, with a sentence, when the cluster under it is gone (Ray).

Ray itself waits for its GCS to come back (a minute, RAY_gcs_rpc_server_reconnect_timeout_s), and then ends the process
from C++ without a word. The processes of an embedded cluster never come back; those of any other may.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from trainers.command_line import complain
from tune.sweep.terminal import Terminal

_NEEDED = ("gcs_server", "raylet")
_LOOK_S, _ANSWER_S = 1.0, 5.0
_PATIENCE_S = 45.0  # with a GCS on another machine, less than Ray's own


@contextmanager
def ending_with_cluster(terminal: Terminal, words: str) -> Iterator[None]:
    """Within the block, end this process (exit code 1) once its cluster is gone; `words` come last.

    Nothing can be cleaned up then: every call of Ray's waits for the dead.
    """
    over = threading.Event()
    node: Any = ray._private.worker._global_node
    worker: Any = ray._private.worker.global_worker

    def look() -> None:
        answered = time.monotonic()
        while not over.wait(_LOOK_S):
            what = _dead(node)
            if what is None and _answers(worker.gcs_client):
                answered = time.monotonic()
            elif what is not None or time.monotonic() - answered > _PATIENCE_S:
                terminal.close()
                complain(f"{what or f'Ray at {node.gcs_address} did not answer for {_PATIENCE_S:g} s'}; {words}")
                _kill(node)
                sys.stdout.flush()
                os._exit(1)

    watch = threading.Thread(target=look, name="cluster-end", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _dead(node: Any) -> str | None:
    """How a process that this one's own cluster cannot be without has ended; None where all live."""
    for kind, process in node.dead_processes():
        if kind in _NEEDED:
            code = process.returncode
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
            return f"Ray's {kind} {how}, and with it the cluster of this process"
    return None


def _kill(node: Any) -> None:
    """Kill what is left of an embedded cluster: a raylet that is killed alone leaves its agents behind."""
    for _, process in node.live_processes():
        for pid in [*_descendants(process.pid), process.pid]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """The processes below a process, on Linux; none elsewhere."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, file.read_text().split())
    return [*children, *(below for child in children for below in _descendants(child))]


def _answers(client: Any) -> bool:
    """Whether the GCS does: that of a stopped process still accepts connections."""
    try:
        client.internal_kv_exists(b"paceline", None, timeout=_ANSWER_S)
    except ray.exceptions.RayError:
        return False
    return True
