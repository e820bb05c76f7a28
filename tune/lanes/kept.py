"""Lanes that stay up between the sweeps of one driver, for as long as nobody else wants what they hold (Ray)."""

import contextlib
import logging
import time
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined] # (it has no stubs)
from ray.autoscaler.v2.sdk import get_cluster_resource_state

from trainers.on_ray.coordinator import requesters
from tune.lanes.lanes import Lanes

logger = logging.getLogger(__name__)


class Kept:
    """The lanes that the last sweep has left, and until when they stay."""

    def __init__(self) -> None:
        self._lanes: Lanes | None = None
        self._key: Any = None
        self._until = self._keep_s = 0.0
        self._known: set[str] = set()
        """Who had asked for resources before: the lanes themselves."""

    def take(self, key: Any) -> Lanes | None:
        """Hand out the lanes that were kept for a key; ends them where it is another's."""
        if self._key != key or not self._is_whole():
            self.end()
        lanes, self._lanes = self._lanes, None
        return lanes

    def keep(self, lanes: Lanes, key: Any, keep_s: float) -> None:
        """Keep the lanes of a sweep that has ended, for some seconds."""
        self._keep_s = keep_s
        self.keep_again(lanes, key)

    def keep_again(self, lanes: Lanes, key: Any) -> None:
        """Keep the lanes for as long as at the last time."""
        self._lanes, self._key, self._until = lanes, key, time.monotonic() + self._keep_s
        self._known = requesters()

    def why_not(self) -> str | None:
        """Why they are not to be kept any longer; None where they are."""
        if self._lanes is None or not self._is_whole():
            return "there are none"
        if time.monotonic() > self._until:
            return "no sweep has come"
        state: Any = get_cluster_resource_state(GcsClient(ray.get_runtime_context().gcs_address))
        wanted = [*state.pending_resource_requests, *state.pending_gang_resource_requests]
        return "somebody waits for resources" if wanted or requesters() - self._known else None

    def end(self) -> None:
        """End the lanes."""
        if self._lanes is not None:
            lanes, self._lanes = self._lanes, None
            lanes.close()
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(lanes.mailbox)

    def status(self) -> dict[str, float]:
        """How many there are, and for how long they still stay, s."""
        count = 0 if self._lanes is None else self._lanes.num_alive
        return {"lanes": count, "for_s": max(0.0, self._until - time.monotonic())}

    def _is_whole(self) -> bool:
        try:
            known = {} if self._lanes is None else ray.get(self._lanes.mailbox.watch.remote(), timeout=10)
            return any(known.get(name) for name in ("lanes", "renewed"))
        except ray.exceptions.RayError:
            return False


resident: list[Kept] = []
"""What keeps the lanes of this process's sweeps; empty: they end with their sweep."""
