"""How far a sweep is: `progress.json`, which its driver writes every few seconds.

Who watches needs no connection to the cluster. A driver that was killed leaves what it
wrote last: whether it is alive the directory's lease tells.
"""

import contextlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainers.errors import CheckpointError, StorageError
from trainers.storage import Storage
from tune.trials.record import Name, UnixTime

PROGRESS = "progress.json"
WRITE_EVERY_S = 3.0


@dataclass(frozen=True)
class Running:
    """A trial on a lane."""

    trial: Name
    lane: int
    started: UnixTime
    """When the lane took it, Unix time, s."""
    config: dict[str, Any] = field(default_factory=dict)
    """Of a repeat of a finalist with its seed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Its newest evaluation."""


@dataclass(frozen=True)
class Live:
    """All that the file says."""

    state: Literal["running", "ended", "cut off"]
    total: int | None = None
    """Trials that are planned, where that is known."""
    num_lanes: int = 0
    """Lanes that are up."""
    running: list[Running] = field(default_factory=list)


def write_live(sweep: Storage, live: Live) -> None:
    """Write it once; where that fails, or the lease is another's, the sweep goes on."""
    with contextlib.suppress(StorageError), sweep.writer(PROGRESS) as stream:
        stream.write(json.dumps(asdict(live)).encode())


def read_live(sweep: Storage) -> Live | None:
    """Return what it says; None where there is none, or it is damaged."""
    if not sweep.exists(PROGRESS):
        return None
    try:
        return sweep.read_json(PROGRESS, Live, finite=False)
    except CheckpointError:
        return None
