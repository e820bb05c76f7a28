"""How many trials Tune runs at a time: as many as there are lanes for them, each in an actor that is kept."""

from __future__ import annotations

from typing import Any


class Pace:
    """Tune starts an actor for every trial that it runs at a time (3 s), and hands it on from trial to trial."""

    def __init__(self, search: Any, mailbox: Any, total: int | None) -> None:
        """`total`: how many trials Tune will start, where the search asks for them one after the other whatever it
        hears; None: any other search has as many at a time as there are lanes, started or not.
        """
        self._search, self._mailbox, self._total = search, mailbox, total
        self._started: set[str] = set()

    def lanes_started(self, count: int) -> None:
        """So many lanes wait for a node, come up, or are up."""
        if self._total is None:
            self._allow(count)

    def lanes_up(self, count: int) -> None:
        """So many lanes take trials: an actor sooner than that would only hold up their start."""
        if self._total is not None:
            self._allow(count)
            self._expect(self._search.max_concurrent if len(self._started) < self._total else 0)

    def trial_started(self, name: str) -> None:
        """Tune has given an actor to one of its trials."""
        self._started.add(name)
        if len(self._started) == self._total:
            self._expect(0)

    def over(self) -> None:
        """Tune starts no further trial."""
        self._total = None
        self._expect(0)

    def _allow(self, count: int) -> None:
        self._search.max_concurrent = max(self._search.max_concurrent, count)

    def _expect(self, count: int) -> None:
        self._mailbox.expect.remote(count)
