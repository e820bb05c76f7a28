"""The end of this process when the embedded cluster under it is gone, with a sentence (Ray).

Ray itself waits for a minute in the hope that its GCS comes back, and then ends the process from C++ without a word.
A cluster that RAY_ADDRESS names has nodes of its own, and may well come back.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from trainers.command_line import complain
from tune.sweep.terminal import Terminal

_NEEDED = ("gcs_server", "raylet")
_LOOK_S = 0.5


@contextmanager
def ending_with_cluster(terminal: Terminal, words: str) -> Iterator[None]:
    """Within the block, end this process (exit code 1) once a process of its own cluster has died; `words` come last.

    Nothing can be cleaned up then: every call of Ray's waits for the dead.
    """
    over = threading.Event()
    node = ray._private.worker._global_node

    def look() -> None:
        while not over.wait(_LOOK_S):
            for kind, process in node.dead_processes():
                if kind in _NEEDED:
                    code = process.returncode
                    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                    terminal.close()
                    complain(f"Ray's {kind} was {how}, and with it the cluster of this process; {words}")
                    node.kill_all_processes(check_alive=False)
                    sys.stdout.flush()
                    os._exit(1)

    is_ours = node is not None and any(kind in _NEEDED for kind, _ in node.live_processes())
    watch = threading.Thread(target=look, name="cluster-end", daemon=True)
    if is_ours:
        watch.start()
    try:
        yield
    finally:
        over.set()
        if is_ours:
            watch.join()
