"""What a user has a running sweep do: one file an action in `<sweep>/steering/`.

Anybody may add one.

The driver looks there every second, and a resumed sweep reads all of them again: what
they come to follows from the files alone, whoever reads them and however often.
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
    """One of them."""

    kind: Kind
    trial: Annotated[str, Field(pattern=r"^(\w[\w.-]*)?$", max_length=200)] = ""
    """Its id, of those that mean one; the trial that is cloned."""
    keys: Tree = field(default_factory=dict)
    """The whole configuration of a clone; dotted keys of the sweep that an extension
    sets.
    """
    goes_on: bool = False
    """Whether a clone is its trial again, though maybe longer, and may begin with the
    checkpoint of that.
    """
    time: UnixTime = field(default_factory=time.time)

    def __str__(self) -> str:
        keys = f" {self.keys}" if self.keys else ""
        return f"{self.kind} {self.trial}".rstrip() + keys


@dataclass(frozen=True)
class Steering:
    """What all actions come to."""

    paused: bool = False
    """Whether lanes take no further trial."""
    stopped: frozenset[str] = frozenset()
    """Trials that end at their next evaluation, or never start."""
    first: tuple[str, ...] = ()
    """Trials that start before the others, in this order."""
    clones: dict[str, Action] = field(default_factory=dict)
    """By their own ids."""
    extension: Tree = field(default_factory=dict)
    """Dotted keys of the sweep."""


def steered(actions: Iterable[Action]) -> Steering:
    """Return what actions, in order, come to."""
    paused = False
    stopped: set[str] = set()
    first: list[str] = []
    clones: dict[str, Action] = {}
    extension: Tree = {}
    for action in actions:
        if action.kind == "stop":
            stopped.add(action.trial)
        elif action.kind == "first":
            first = [action.trial, *(trial for trial in first if trial != action.trial)]
        elif action.kind == "clone":
            clones.setdefault(trial_id(action.keys, "clone"), action)
        elif action.kind == "extend":
            extension |= action.keys
        else:
            paused = action.kind == "pause"
    return Steering(paused, frozenset(stopped), tuple(first), clones, extension)


class Actions:
    """The actions of a sweep's directory."""

    def __init__(self, sweep: Storage) -> None:
        self._storage = sweep.child("steering")
        self._known: dict[str, Action | None] = {}
        self._news: list[Action] = []

    def add(self, action: Action) -> None:
        """Write an action; return when it is durable."""
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}.json"
        self._storage.write(name, json.dumps(asdict(action)).encode())

    def read(self) -> Steering:
        """Return what the actions come to; a damaged file is left out."""
        for name in self._storage.names():
            if name.endswith(".json") and name not in self._known:
                action = self._known[name] = self._read(name)
                if action is not None:
                    self._news.append(action)
        actions = [self._known[name] for name in sorted(self._known)]
        return steered(filter(None, actions))

    def news(self) -> list[Action]:
        """Return the actions that were read since the last call."""
        news = self._news
        self._news = []
        return news

    def _read(self, name: str) -> Action | None:
        try:
            return self._storage.read_json(name, Action)
        except CheckpointError as error:
            logger.warning("%s: the action is left out", error)
            return None
