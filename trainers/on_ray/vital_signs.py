"""Notice when the cluster, or an actor in it, is gone (Ray).

Environment read: RAY_gcs_rpc_server_reconnect_timeout_s says how long Ray
waits for its GCS (60 s by default); this module waits three quarters of that.
"""

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray import cloudpickle

from trainers.causes import ended_by
from trainers.command_line import complain
from trainers.on_ray.internals import (
    actor_record,
    kv_delete,
    kv_get,
    kv_list,
    kv_put,
    own_node,
    own_node_is_alive,
)

logger = logging.getLogger(__name__)

_NEEDED = ("gcs_server", "raylet")
"""Processes without which an embedded cluster cannot work."""
_LOOK_S = 1.0
_ANSWER_S = 5.0
_RAYS_PATIENCE_S = 60.0
_PATIENCE_SHARE = 0.75
_BEAT_S = 5.0
"""Time between two signs of life of an actor; the driver looks for them as often."""
_LOOKS = 12
"""How many checks in a row must find nothing new before the driver kills an
actor. While a machine sleeps, or the driver itself is stopped, nothing is
checked or counted.
"""
_GIVEN_UP = "Ray's GCS has given up the node of this process, whose raylet does not answer"


@contextmanager
def ending_with_cluster(
    words: str, close: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Within the block, end this process once its cluster is gone.

    `close` is called first; the message printed ends with `words`. The exit
    code is 1.

    Ray itself would wait for its GCS to come back and, if the GCS does not, end
    the process from C++ without a message. An embedded cluster's processes
    never come back; those of another cluster may.

    Nothing can be cleaned up at that point, since every call to Ray waits for
    dead processes. What an embedded cluster leaves behind is killed by
    trainers/on_ray/_reaper.py.
    """
    over = threading.Event()
    patience_s = _patience_s(os.environ)
    node = own_node()

    def look() -> None:
        answered = time.monotonic()
        while not over.wait(_LOOK_S):
            what = _dead(node)
            alive = is_alive()
            now = time.monotonic()
            if alive:
                answered = now
            elif alive is False:
                what = what or _GIVEN_UP
            elif now - answered > patience_s:
                silent = f"did not answer for {patience_s:g} s"
                what = what or f"Ray at {node.gcs_address} {silent}"
            if what is not None:
                close()
                complain(f"{what}; {words}")
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
    """Return how long a remote GCS may be silent: less than Ray itself would wait."""
    rays_s = _RAYS_PATIENCE_S
    # Without a valid number, Ray uses its default, too.
    with contextlib.suppress(KeyError, ValueError):
        rays_s = float(environ["RAY_gcs_rpc_server_reconnect_timeout_s"])
    return _PATIENCE_SHARE * rays_s


def _dead(node: Any) -> str | None:
    """Say how a process that the cluster needs has ended; None if all are alive."""
    for kind, process in node.dead_processes():
        if kind in _NEEDED:
            how = ended_by(process.returncode)
            return f"Ray's {kind} ended {how}, and with it the cluster of this process"
    return None


def is_alive() -> bool | None:
    """Whether the GCS considers this process's node alive; None without an answer."""
    try:
        return own_node_is_alive(_ANSWER_S)
    except ray.exceptions.RayError:
        return None


def show_life() -> None:
    """Start signalling that this actor's process is alive, until the process ends.

    Does nothing in a process that is not an actor.
    """
    context = ray.get_runtime_context() if ray.is_initialized() else None
    if context is None or context.get_actor_id() is None:
        return
    name = f"{_prefix()}{context.get_actor_id()}"
    handle = cloudpickle.dumps(context.current_actor)
    thread = threading.Thread(target=_beat, args=(name, handle), daemon=True)
    thread.start()


def _prefix() -> str:
    return f"paceline/alive/{ray.get_runtime_context().get_job_id()}/"


def _beat(name: str, handle: bytes) -> None:
    for count in itertools.count():
        # The GCS may be unreachable; the next beat tries again.
        with contextlib.suppress(Exception):
            if count == 0:
                kv_put(f"{name}/handle", handle)
            kv_put(name, str(count))
        time.sleep(_BEAT_S)


class VitalSigns:
    """Within its block, kills actors of this driver that have fallen silent.

    Ray notices if a process dies, but not if it is stopped or hangs: whoever
    waits for its answer waits forever. So each actor signals every few
    seconds, in the key-value store of Ray's GCS, that it is alive
    (`show_life`). The driver kills an actor that has been silent for a minute;
    after that it is handled like any actor that died.
    """

    def __init__(self) -> None:
        self._heard: dict[bytes, bytes] = {}
        self._silent = Counter[bytes]()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._thread.join(_BEAT_S)
        # After an error the cluster may be gone and not answer; if no cluster
        # is joined, Ray would start another.
        has_ended = not self._thread.is_alive()
        if error[0] is None and has_ended and ray.is_initialized():
            with contextlib.suppress(Exception):
                kv_delete(_prefix(), del_by_prefix=True)

    def _watch(self) -> None:
        while not self._closing.wait(_BEAT_S):
            try:
                if ray.is_initialized():
                    self.look()
            except Exception as error:
                logger.debug("the actors could not be checked: %s", error)

    def look(self) -> None:
        """Check every actor once, and kill those that were silent for too long."""
        for name in kv_list(_prefix()):
            if name.endswith(b"/handle"):
                continue
            beat = kv_get(name)
            if beat != self._heard.get(name):
                self._silent[name] = -1
            self._silent[name] += 1
            self._heard[name] = beat
            if self._silent[name] == _LOOKS:
                self._end(name)

    def _end(self, name: bytes) -> None:
        """Kill a silent actor, unless it is dead already, and delete its entries."""
        handle = kv_get(name + b"/handle")
        known = actor_record(name.decode().rpartition("/")[2])
        kv_delete(name, del_by_prefix=True)
        if known.get("State") == "ALIVE":
            words = "%s (pid %s) has shown no life for %.0f s: it is killed, and what waits for it continues without it"
            logger.warning(
                words,
                known.get("ActorClassName"),
                known.get("Pid"),
                _LOOKS * _BEAT_S,
            )
            ray.kill(cloudpickle.loads(handle))
