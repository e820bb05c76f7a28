"""The lanes of a mailbox: which are up on which device, which are down and why, and which are to start again."""

import time
from collections import defaultdict
from typing import Any


class Roll:
    """One for each sweep."""

    def __init__(self) -> None:
        self.starts: dict[str, dict[int, Any]] = defaultdict(dict)
        """Facts of the lanes' starts, each by lane."""
        self.up: dict[int, str] = {}
        """The models of device of the lanes that are up."""
        self._known: dict[int, str] = {}
        """Of those that are down, too, for as long as they come back."""
        self._down: dict[int, tuple[float, str]] = {}
        self.restarts: list[tuple[float, str]] = []
        """How long lanes that started again took no trials, s, and why they had to."""

    @property
    def devices(self) -> list[str]:
        """The models of device of all lanes that are up or come back."""
        return sorted(set(self._known.values()))

    def device(self, lane: int) -> str | None:
        """Return a lane's model of device; None of a lane that there is none of any more."""
        return self._known.get(lane)

    def comes(self, lane: int, device: str) -> None:
        """Note that a lane is up."""
        self.up[lane] = self._known[lane] = device
        if lane in self._down:
            since, why = self._down.pop(lane)
            self.restarts.append((time.monotonic() - since, why))

    def goes(self, lane: int, why: str) -> None:
        """Note that a lane is up no more, if it was; where it is down for another reason already, that one stays."""
        if self.up.pop(lane, None) is not None:
            self._down.setdefault(lane, (time.monotonic(), why))

    def starts_again(self, lane: int, why: str) -> bool:
        """Note why a lane starts again; returns whether that is a new reason."""
        is_new = all(why != known for _, known in (*self.restarts, *self._down.values()))
        self._down[lane] = time.monotonic(), why
        return is_new

    def ends(self, lane: int) -> None:
        """Note that a lane does not come back."""
        self._known.pop(lane, None)
