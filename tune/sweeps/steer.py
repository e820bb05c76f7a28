"""Steer a sweep, wherever it runs: an action in its directory, where its driver looks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from trainers.errors import MISSING, ConfigError
from trainers.launch.from_python import plain
from tune.search.space import check_trial, open_trials
from tune.sweeps.spec import SweepSpec, read_kept
from tune.trials.journal import Journal
from tune.trials.live import read_live
from tune.trials.record import trial_id
from tune.trials.steering import Action, Actions

Steer = Literal["stop", "pause", "go-on", "clone", "first"]
_OF_TRIALS = ("stop", "clone", "first")
_LENGTHS = {"epochs", "max_steps"}


@dataclass(frozen=True)
class Trial:
    """A trial that is known."""

    config: dict[str, Any]
    status: str


def steer(
    directory: str | os.PathLike[str], action: Steer, trial: str = "", **keys: Any
) -> str:
    """Stop, clone or prefer a trial of a sweep, or pause it: `python -m tune steer`.

    A sweep that runs does it within a second or two, another one when it is resumed.

    Args:
        directory: The sweep's, a path or URI.
        action: stop: a trial ends at its next evaluation, or never starts. clone: a
            trial again, with other keys. first: a trial that waits runs next. pause: no
            further trial starts, until go-on.
        trial: The trial's id, or how it begins; none for pause and go-on.
        keys: Of a clone, dotted keys and their values: `**{"optimizer.lr": 0.01}`.

    Returns:
        The id of the trial that was meant; of a clone, its own.

    Raises:
        ConfigError: The sweep has no such trial, or a clone could not be trained.
    """
    spec = read_kept(os.fspath(directory))
    if action not in get_args(Steer):
        raise ConfigError(
            "ACTION",
            action,
            f"must be one of {', '.join(get_args(Steer))}",
            "choose one of them",
        )
    if (action in _OF_TRIALS) != bool(trial):
        rule = "needs a trial" if action in _OF_TRIALS else "is for the whole sweep"
        fix = (
            f"name one that `python -m tune steer {spec.uri}` lists"
            if action in _OF_TRIALS
            else "leave out the trial"
        )
        raise ConfigError("TRIAL", trial or MISSING, f"{action} {rule}", fix)
    if keys and action != "clone":
        raise ConfigError(next(iter(keys)), MISSING, "is for a clone", "leave it out")
    actions = Actions(spec.storage)
    if not trial:
        actions.add(Action(action))
        return ""
    trials = known_trials(spec)
    name = _meant(trial, trials, spec.uri)
    if action != "clone":
        if trials[name].status not in ("waiting", "running"):
            raise ConfigError(
                "TRIAL",
                name,
                f"has ended already: {trials[name].status}",
                "name one that has not",
            )
        actions.add(Action(action, name))
        return name
    changed = {
        **trials[name].config,
        **cast("dict[str, Any]", plain(keys, "steer()", [])),
    }
    check_trial(spec.train, changed, spec.source)
    actions.add(Action("clone", name, changed, goes_on=keys.keys() <= _LENGTHS))
    return trial_id(changed, "clone")


def known_trials(spec: SweepSpec) -> dict[str, Trial]:
    """Return a sweep's trials by id: those that have ended, run, or are known to come."""
    records = Journal(spec.storage).records()
    found = {record.id: Trial(record.config, record.status) for record in records}
    for trial in open_trials(spec.config, records):
        found[trial_id(trial)] = Trial(trial, "waiting")
    clones = Actions(spec.storage).read().clones
    found |= {
        name: Trial(clone.config, "waiting")
        for name, clone in clones.items()
        if name not in found
    }
    ended = {record.id for record in records}
    live = read_live(spec.storage)
    for running in live.running if live is not None else ():
        if running.trial not in ended:
            found[running.trial] = Trial(running.config, "running")
    return found


def _meant(text: str, names: Iterable[str], uri: str) -> str:
    """Return the only trial whose id is, or begins with, a text."""
    found = [name for name in names if name.startswith(text)]
    if len(found) != 1:
        rule = (
            f"is how {len(found)} trials begin: {', '.join(found)}"
            if found
            else "is no trial of this sweep"
        )
        raise ConfigError(
            "TRIAL", text, rule, f"`python -m tune steer {uri}` lists them"
        )
    return found[0]
