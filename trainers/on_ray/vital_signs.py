"""Whether the actors of a run or sweep are alive.

Each says so every few seconds, in the key-value store of Ray's GCS.

Ray notices that a process has died, and not that it was stopped or hangs: who waits for
its answer waits forever. The driver kills an actor that has been silent for a minute,
so that there follows what follows a death.
"""

import contextlib
import itertools
import logging
import threading
import time
from types import TracebackType

import ray
from ray import cloudpickle

from trainers.on_ray.internals import actor_record, kv_delete, kv_get, kv_list, kv_put

logger = logging.getLogger(__name__)

_BEAT_S = 5.0
_LOOKS = 12
"""How many times in a row, a beat apart, the driver hears nothing new before it kills:
a machine that sleeps, or a driver that was stopped itself, hears nothing and counts
nothing.
"""


def show_life() -> None:
    """Begin to say that the process of this actor is alive, until it ends.

    Nothing happens in any other process.
    """
    context = ray.get_runtime_context() if ray.is_initialized() else None
    if context is None or context.get_actor_id() is None:
        return
    name = f"{_prefix()}{context.get_actor_id()}"
    handle = cloudpickle.dumps(context.current_actor)
    threading.Thread(
        target=_beat, args=(name, handle), name="vital-signs", daemon=True
    ).start()


def _prefix() -> str:
    return f"paceline/alive/{ray.get_runtime_context().get_job_id()}/"


def _beat(name: str, handle: bytes) -> None:
    for count in itertools.count():
        with contextlib.suppress(
            Exception
        ):  # the GCS is away: it cannot be asked either
            if count == 0:
                kv_put(f"{name}/handle", handle)
            kv_put(name, str(count))
        time.sleep(_BEAT_S)


class VitalSigns:
    """Kills the actors of this driver that have fallen silent, while its block runs."""

    def __init__(self) -> None:
        self._heard: dict[bytes, bytes] = {}
        self._silent: dict[bytes, int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="vital-signs", daemon=True
        )

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._thread.join(_BEAT_S)
        # After an error the cluster may be gone, and would not answer; without one Ray
        # would start another.
        if error is None and not self._thread.is_alive() and ray.is_initialized():
            with contextlib.suppress(Exception):
                kv_delete(_prefix(), del_by_prefix=True)

    def _watch(self) -> None:
        while not self._closing.wait(_BEAT_S):
            try:
                if ray.is_initialized():
                    self.look()
            except Exception as error:
                logger.debug("nobody could be heard: %s", error)

    def look(self) -> None:
        """Hear every actor once, and kill those that have been silent for too long."""
        for name in kv_list(_prefix()):
            if name.endswith(b"/handle"):
                continue
            beat = kv_get(name)
            self._silent[name] = (
                self._silent.get(name, 0) + 1 if beat == self._heard.get(name) else 0
            )
            self._heard[name] = beat
            if self._silent[name] == _LOOKS:
                self._end(name)

    def _end(self, name: bytes) -> None:
        """Kill a silent actor; one that is dead has nothing more to say."""
        handle = kv_get(name + b"/handle")
        known = actor_record(name.decode().rpartition("/")[2])
        kv_delete(name, del_by_prefix=True)
        if known.get("State") == "ALIVE":
            words = "%s (pid %s) has shown no life for %.0f s: it is killed, and what waits for it goes on without it"
            logger.warning(
                words, known.get("ActorClassName"), known.get("Pid"), _LOOKS * _BEAT_S
            )
            ray.kill(cloudpickle.loads(handle))
