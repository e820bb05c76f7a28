"""User actions on a running sweep, one file per action in `<sweep>/steering/`.

Any process may add a file.

The driver looks there every second, and a resumed sweep reads all files again.
The combined effect of the actions depends only on the files, not on who reads
them or how often.
"""

import json
import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from trainers.config.model import Tree
from trainers.errors import CheckpointError
from trainers.storage import Storage
from tune.trials.record import UnixTime, trial_id

logger = logging.getLogger(__name__)

Kind = Literal["stop", "pause", "go-on", "clone", "first", "extend"]


@dataclass(frozen=True)
class Action:
    """One action of a user."""

    kind: Kind
    trial: Annotated[str, Field(pattern=r"^(\w[\w.-]*)?$", max_length=200)] = (
        ""
    )
    """The ID of the trial to stop, prefer or clone; empty for other kinds."""
    keys: Tree = field(default_factory=dict)
    """For a clone, its whole configuration; for an extension, the dotted keys
    of the sweep that it sets.
    """
    goes_on: bool = False
    """Whether a clone differs from its trial only in length, so that it may
    start from that trial's checkpoint.
    """
    time: UnixTime = field(default_factory=time.time)

    def __str__(self) -> str:
        keys = f" {self.keys}" if self.keys else ""
        return f"{self.kind} {self.trial}".rstrip() + keys


@dataclass(frozen=True)
class Steering:
    """The combined effect of all actions."""

    paused: bool = False
    """Whether lanes take no further trial."""
    stopped: frozenset[str] = frozenset()
    """Trials that end at their next evaluation, or never start."""
    first: tuple[str, ...] = ()
    """Trials that start before the others, in this order."""
    clones: dict[str, Action] = field(default_factory=dict)
    """The actions that added clones, by the clones' IDs."""
    extension: Tree = field(default_factory=dict)
    """The dotted keys of the sweep that extensions set, with their values."""


def steered(actions: Iterable[Action]) -> Steering:
    """Return the combined effect of actions, given in order."""
    paused = False
    stopped: set[str] = set()
    first: list[str] = []
    clones: dict[str, Action] = {}
    extension: Tree = {}
    for action in actions:
        if action.kind == "stop":
            stopped.add(action.trial)
        elif action.kind == "first":
            first = [
                action.trial,
                *(trial for trial in first if trial != action.trial),
            ]
        elif action.kind == "clone":
            clones.setdefault(trial_id(action.keys, "clone"), action)
        elif action.kind == "extend":
            # Keys are set in this order, and sections may overlap.
            for key in action.keys:
                extension.pop(key, None)
            extension |= action.keys
        else:
            paused = action.kind == "pause"
    return Steering(
        paused, frozenset(stopped), tuple(first), clones, extension
    )


class Actions:
    """The actions of a sweep's directory."""

    def __init__(self, sweep: Storage) -> None:
        self._storage = sweep.child("steering")
        self._known: dict[str, Action | None] = {}
        self._news: list[Action] = []

    def add(self, action: Action) -> None:
        """Write an action; return once it is durable."""
        # Also after the last action if this clock is behind the one of then.
        place = time.time_ns()
        newest = max(self._storage.names(), default="")[:20]
        if newest.isdecimal():
            place = max(place, int(newest) + 1)
        name = f"{place:020d}-{secrets.token_hex(4)}.json"
        self._storage.write(name, json.dumps(asdict(action)).encode())

    def read(self) -> Steering:
        """Return the combined effect of all actions; damaged files are ignored."""
        for name in self._storage.names():
            if name.endswith(".json") and name not in self._known:
                action = self._known[name] = self._read(name)
                if action is not None:
                    self._news.append(action)
        actions = [self._known[name] for name in sorted(self._known)]
        return steered(filter(None, actions))

    def news(self) -> list[Action]:
        """Return the actions that `read` has found since the last call of `news`."""
        news = self._news
        self._news = []
        return news

    def _read(self, name: str) -> Action | None:
        try:
            return self._storage.read_json(name, Action)
        except CheckpointError as error:
            logger.warning("%s; the action is ignored", error)
            return None
