"""What the driver hears of a lane's start, by way of the mailbox."""

from __future__ import annotations

from typing import Any


class LaneStarts:
    """Who controls each lane, which has workers, and what is reserved for them."""

    def __init__(self) -> None:
        self._controllers: dict[int, bytes] = {}
        self._started: set[int] = set()
        self._reservations: dict[int, Any] = {}

    async def controlled(self, lane: int, controller: bytes) -> None:
        """Ray's controller of a lane has started: its pickled handle, which would import all of Ray Train here."""
        self._controllers[lane] = controller

    async def controllers(self) -> dict[int, bytes]:
        """The pickled handle of the actor that controls each lane; it may have ended."""
        return self._controllers

    async def started(self, lane: int) -> None:
        """The workers of a lane are processes by now, with all their imports before them."""
        self._started.add(lane)

    async def any_started(self) -> bool:
        """Whether some lane has had workers."""
        return bool(self._started)

    async def reserved(self, lane: int, placement_group: Any) -> None:
        """What holds the resources of a lane's workers."""
        self._reservations[lane] = placement_group

    async def reservations(self) -> dict[int, Any]:
        """The placement group that each lane had when its workers were last up; it may be gone."""
        return self._reservations
