"""Steer a sweep, wherever it runs: an action in its directory, where its driver looks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from trainers.config.yaml import parse_yaml
from trainers.errors import MISSING, ConfigError
from trainers.launch.from_python import plain
from tune.search.space import check_trial, open_trials
from tune.sweeps.spec import SweepSpec, read_kept
from tune.trials.journal import Journal
from tune.trials.live import Live, read_live
from tune.trials.record import TrialRecord, trial_id
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
    directory: str | os.PathLike[str], action: Steer, trial: str = "", /, **keys: Any
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
    if action in _OF_TRIALS and not trial:
        fix = f"name one that `python -m tune steer {spec.uri}` lists"
        raise ConfigError("TRIAL", MISSING, f"{action} needs a trial", fix)
    given = list(keys) if action != "clone" else []
    if trial and action not in _OF_TRIALS:
        given.insert(0, "TRIAL")
    if given:
        raise ConfigError(given[0], MISSING, f"is not for {action}", "leave it out")
    actions = Actions(spec.storage)
    if not trial:
        actions.add(Action(action))
        return ""
    trials = known_trials(spec)
    name = named_trial(trial, trials, spec.uri)
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
    changed = trials[name].config | plain(keys, "steer()", [])
    check_trial(spec.train, changed, spec.source)
    actions.add(Action("clone", name, changed, goes_on=keys.keys() <= _LENGTHS))
    return trial_id(changed, "clone")


def steer_in_words(
    directory: str, action: str, trial: str = "", *assignments: str
) -> str:
    """Steer with a clone's keys as they are typed: KEY=VALUE, the value in YAML."""
    keys: dict[str, Any] = {}
    for word in assignments:
        key, _, text = word.partition("=")
        keys[key] = parse_yaml(text, f"command line, {key}")
    return steer(directory, cast(Steer, action), trial, **keys)


def known_trials(spec: SweepSpec) -> dict[str, Trial]:
    """Return a sweep's trials by id: those that have ended, run, or are known to come."""
    records = Journal(spec.storage).records()
    clones = Actions(spec.storage).read().clones
    return trials_of(spec, records, clones, read_live(spec.storage))


def trials_of(
    spec: SweepSpec,
    records: list[TrialRecord],
    clones: Mapping[str, Action],
    live: Live | None,
) -> dict[str, Trial]:
    """Return what `known_trials` returns, from what has been read already."""
    found = {record.id: Trial(record.config, record.status) for record in records}
    for trial in open_trials(spec.config, records):
        found[trial_id(trial)] = Trial(trial, "waiting")
    for name, clone in clones.items():
        found.setdefault(name, Trial(clone.keys, "waiting"))
    ended = {record.id for record in records}
    if live is not None:
        for running in live.running:
            if running.trial not in ended:
                found[running.trial] = Trial(running.config, "running")
    return found


def named_trial(text: str, names: Iterable[str], uri: str) -> str:
    """Return the only trial whose id is, or begins with, a text."""
    found = [name for name in names if name.startswith(text)]
    if len(found) != 1:
        rule = "is no trial of this sweep"
        if found:
            rule = f"is how {len(found)} trials begin: {', '.join(found)}"
        raise ConfigError(
            "TRIAL", text, rule, f"`python -m tune steer {uri}` lists them"
        )
    return found[0]
