"""The end of this process, with a sentence, when the cluster under it is gone.

Ray itself waits for its GCS to come back, and then ends the process from C++ without a
word. The processes of an embedded cluster never come back; those of any other may.

Environment read: RAY_gcs_rpc_server_reconnect_timeout_s, how long Ray waits (60): three
quarters of it are waited here.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray

from trainers.command_line import complain
from trainers.on_ray.internals import own_node, own_node_is_alive

_NEEDED = ("gcs_server", "raylet")
_LOOK_S = 1.0
_ANSWER_S = 5.0
_RAYS_PATIENCE_S = 60.0
_SHARE = 0.75


@contextmanager
def ending_with_cluster(
    words: str, close: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Within the block, `close` and end this process once its cluster is gone.

    The exit code is 1; `words` come last.

    Nothing can be cleaned up then: every call of Ray's waits for the dead. What an
    embedded cluster leaves is killed by trainers/on_ray/reaper.py.
    """
    over = threading.Event()
    patience_s = _patience_s(os.environ)
    node = own_node()

    def look() -> None:
        answered = time.monotonic()
        while not over.wait(_LOOK_S):
            what = _dead(node)
            alive = is_alive()
            if alive is False:
                what = (
                    what
                    or "Ray's GCS has given up the node of this process, whose raylet does not answer"
                )
            if what is None and alive:
                answered = time.monotonic()
            elif what is not None or time.monotonic() - answered > patience_s:
                close()
                complain(
                    f"{what or f'Ray at {node.gcs_address} did not answer for {patience_s:g} s'}; {words}"
                )
                sys.stdout.flush()
                os._exit(1)

    watch = threading.Thread(target=look, name="cluster-end", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _patience_s(environ: Mapping[str, str]) -> float:
    """How long a GCS on another machine may be away: less than Ray's own patience."""
    try:
        return _SHARE * float(
            environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", _RAYS_PATIENCE_S)
        )
    except ValueError:  # Ray takes its default, too
        return _SHARE * _RAYS_PATIENCE_S


def _dead(node: Any) -> str | None:
    """Say how a process that this one's own cluster needs has ended; None: all live."""
    for kind, process in node.dead_processes():
        if kind in _NEEDED:
            code = process.returncode
            how = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"has ended with exit code {code}"
            )
            return f"Ray's {kind} {how}, and with it the cluster of this process"
    return None


def is_alive() -> bool | None:
    """Whether the GCS counts this process's node as alive; None: it does not answer."""
    try:
        return own_node_is_alive(_ANSWER_S)
    except ray.exceptions.RayError:
        return None
