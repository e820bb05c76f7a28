"""What a sweep takes from the store: kept in its directory, so that a resume and its report begin with the same."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainers.errors import CheckpointError, ConfigError
from trainers.storage import Storage
from tune.config import SweepConfig
from tune.knowledge.entry import MOST_TRIALS, Entry, Told
from tune.objective import Objective
from tune.search.frontier import Seen, past_of
from tune.search.frontier_grid import SPEED
from tune.search.history import Past
from tune.search.space import trial_tree
from tune.search.time_model import Place
from tune.trials.interval import Interval
from tune.trials.microbatch_bounds import PastBound
from tune.trials.record import Purpose

logger = logging.getLogger(__name__)

_FILE = "knowledge.json"
_MOST_TAKEN = 6
"""Sweeps: the nearest. What they tell overlaps, and the model's work grows with the cube."""
# Standard deviations of the logarithm by which a difference may change samples to the target, and throughput. They are
# judgements: what is further off than they allow is noticed (tune/search/history.py).
_OFF = {
    "the machine on another day": (0.05, 0.1),
    "versions": (0.05, 0.1),
    "hardware": (0.1, 0.7),
    "workers": (0.05, 0.5),
    "the task's code": (0.3, 0.3),
    "task_args": (0.4, 0.7),
    "the length of the run": (0.2, 0.0),
    "the target": (0.5, 0.0),
}
_NOT_COMPARED = (
    *("task", "task_args", "scaling", "seed", "epochs", "max_steps", "evaluate", "checkpoint", "failure"),
    *("log_every_steps", "max_time_s", "profile", "noise_scale", "global_batch_size", "batch_size_per_worker"),
)
_MEMORY = {"versions", "the task's code"}
_UNEXPLAINED = "the machine on another day"


@dataclass(frozen=True)
class Here:
    """What tells this sweep from others."""

    task: str
    code: str
    hardware: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Taken:
    """A sweep of the past that this one begins with."""

    entry: Entry
    differs: list[str]
    """In what this one differs from it: keys of `_OFF`."""


def choose(entries: Sequence[Entry], here: Here, config: SweepConfig, train: Mapping[str, Any]) -> list[Taken]:
    """Return the entries that are nearest to this sweep, nearest first, and in what each differs."""
    found = []
    for entry in entries:
        pairs = {
            "versions": (entry.versions, here.versions),
            "hardware": (entry.hardware, here.hardware),
            "workers": (entry.train.get("scaling"), train.get("scaling")),
            "the task's code": (entry.code or "unknown", here.code),
            "task_args": (entry.train.get("task_args"), train.get("task_args")),
            "the length of the run": _lengths(entry.train, train),
            "the target": (None, None) if _is_met(entry, config.objective) else (entry.target, config.objective.target),
        }
        found.append(Taken(entry, [name for name, (then, now) in pairs.items() if then != now]))
    return sorted(found, key=lambda one: sum(off(one.differs)))[:_MOST_TAKEN]


def _lengths(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    first, second = ([tree.get("epochs"), tree.get("max_steps")] for tree in (then, now))
    return first, second


def off(differs: Sequence[str]) -> tuple[float, float]:
    """Return how far another sweep may be off in samples to the target, and in throughput."""
    parts = [_OFF[name] for name in (_UNEXPLAINED, *differs) if name in _OFF]
    return math.hypot(*(part[0] for part in parts)), math.hypot(*(part[1] for part in parts))


def keep(sweep: Storage, taken: Sequence[Taken]) -> None:
    """Write what a sweep begins with into its directory."""
    sweep.write(_FILE, json.dumps([asdict(one) for one in taken]).encode())


def read(sweep: Storage) -> list[Taken] | None:
    """Return what a sweep began with; None where nobody has looked for anything."""
    try:
        return sweep.read_json(_FILE, list[Taken]) if sweep.exists(_FILE) else None
    except CheckpointError as error:
        logger.warning("%s: what earlier sweeps found does not count", error)
        return []


def past(sweep: Storage, config: SweepConfig, train: Mapping[str, Any]) -> list[Past]:
    """Return what search frontier hears of earlier sweeps; nothing for any other search."""
    taken = read(sweep) if config.search == "frontier" and config.knowledge else None
    found = []
    for one in taken or []:
        try:
            found += [_past(one, config, train)] if one.entry.trials else []
        except ConfigError as error:  # of a version with other keys
            logger.warning("what the sweep %s found does not count: %s", one.entry.id, error)
    return found


def past_bounds(taken: Sequence[Taken]) -> list[PastBound]:
    """Return which microbatches fitted: known for good where neither code nor versions differ."""
    return [
        PastBound(bound.key, bound.device, bound.fits, bound.misfit, not _MEMORY & {*one.differs})
        for one in taken
        for bound in one.entry.bounds
    ]


def _past(taken: Taken, config: SweepConfig, train: Mapping[str, Any]) -> Past:
    entry = taken.entry
    objective = config.objective if _is_met(entry, config.objective) else Objective(target=entry.target or None)
    # Its whole trials say something of this target only where it was theirs, or an easier one.
    seen = [_seen(one, _place(one, entry, config, train), objective) for one in entry.trials[:MOST_TRIALS]]
    found = past_of(entry.id, seen, *off(taken.differs))
    is_same = not {"versions", "hardware", "workers", "the task's code", "task_args"} & {*taken.differs}
    return found if is_same else replace(found, misfits=())


def _is_met(entry: Entry, objective: Objective) -> bool:
    """Whether a trial of it has come to this target."""
    return any(_reached(one, objective) is not None for one in entry.trials)


def _reached(one: Told, objective: Objective) -> int | None:
    metric = next(iter(objective.target or {}), "")
    return next((at for at, (_, value) in enumerate(one.curve) if objective.reached({metric: value})), None)


def _seen(one: Told, place: Place, objective: Objective) -> Seen:
    speed = None
    if one.samples_per_s:
        width = min(0.5, one.width)
        speed = Interval(one.samples_per_s, one.samples_per_s * (1 - width), one.samples_per_s * (1 + width))
    at, needed = _reached(one, objective), None
    if at is not None:
        before, last = one.curve[at - 1][0] if at else 0.0, one.curve[at][0]
        needed = Interval((before + last) / 2, before, last)
    # A trial that ended sooner than its run, at a target of its own, does not say that this one is out of reach.
    is_whole = at is not None or (one.whole is not None and one.samples >= 0.99 * one.whole) or one.status == "diverged"
    purpose: Purpose = "trial" if is_whole and one.curve else "probe"
    return Seen(place, purpose, one.samples, one.whole, needed, speed, one.noise_scale, one.status)


def _place(one: Told, entry: Entry, config: SweepConfig, train: Mapping[str, Any]) -> Place:
    """Return where a trial lies in this sweep's grid; what it differs in besides makes it another setting or kind."""
    tree = trial_tree(entry.train, one.config)
    keys = [key for key in config.space if key not in ("global_batch_size", "batch_size_per_worker")]
    setting = {key: _value(tree, key) for key in keys}
    kind = {key: value for key, value in setting.items() if key.partition(".")[0] not in SPEED}
    other = {
        key: tree.get(key)
        for key in sorted({*tree, *train} - {*_NOT_COMPARED} - {key.partition(".")[0] for key in keys})
        if key in train and key in tree and tree[key] != train[key]
    }
    learned = {key: value for key, value in other.items() if key not in SPEED}
    shown = [repr(values) + (f" {more!r}" if more else "") for values, more in ((setting, other), (kind, learned))]
    return Place(shown[0], shown[1], one.size)


def _value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree
