"""Change a sweep while it runs, by actions, or extend it with another configuration.

An action is a file in the sweep's directory, which the sweep's driver watches.
"""

import logging
import math
import os
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from trainers.config import TrainConfig
from trainers.config.function import build_run
from trainers.config.model import Tree
from trainers.config.yaml import dump_yaml, parse_typed
from trainers.errors import MISSING, ConfigError, counted
from trainers.launch.from_python import plain
from trainers.lease import is_held
from tune.config import sample_values
from tune.search.space import check_trial, open_trials, trial_tree, value_at
from tune.sweeps.spec import (
    SAVED,
    SweepSpec,
    prepare,
    read_kept,
    read_saved,
    refuse_untrue,
    with_defaults,
)
from tune.trials.journal import Journal, Live, read_live
from tune.trials.record import (
    BY_BUDGET,
    Records,
    TrialRecord,
    num_lanes,
    time_to_target,
    trial_id,
)
from tune.trials.steering import Action, Actions

logger = logging.getLogger(__name__)

_LENGTHS = ("epochs", "max_steps")
_FREE = {*_LENGTHS, "checkpoint", "failure"}
"""Sections of a run that an extension, but no start, may change."""
_HOW = "from their checkpoints, unless none was kept or the learning rate depends on the number of steps"
Steer = Literal["stop", "pause", "go-on", "clone", "first"]
_OF_TRIALS = ("stop", "clone", "first")


def order_extension(location: str, overrides: Tree) -> SweepSpec:
    """Order an extension of a sweep with other keys, and return the extended sweep.

    Raises ConfigError if the sweep cannot be extended that way.
    """
    spec = read_saved(location, overrides)
    _check(kept_sweep(location), spec)
    if overrides:
        Actions(spec.storage).add(Action("extend", keys=overrides))
    return spec


def kept_sweep(location: str) -> SweepSpec:
    """Read the sweep in a directory, as it was begun or last extended."""
    kept = read_kept(location)
    return replace(kept, train=with_defaults(kept.train, kept.source))


def _check(old: SweepSpec, new: SweepSpec) -> None:
    """Raise ConfigError if a sweep's trials would not belong to the extended sweep."""
    fix = "start a new sweep from your YAML file, with another `--name`"
    if new.uri != old.uri:
        is_renamed = new.config.name != old.config.name
        key = "name" if is_renamed else "storage_path"
        rule = f"would move the sweep out of {old.uri}"
        raise ConfigError(key, getattr(new.config, key), rule, fix, new.source)
    is_drawn = (old.config.search, old.config.space)
    is_redrawn = is_drawn != (new.config.search, new.config.space)
    if new.config.redraws and is_redrawn:
        rule = "would draw all trials anew, without those that have ended"
        better = (
            "add `--search optuna`, which builds on the trials that have ended"
        )
        raise ConfigError("search", new.config.search, rule, better)
    # Trials override swept keys, so both sides of the comparison get the new
    # space's first value of each, and of new keys the value of such a trial.
    swept = {
        key: sample_values(values)[0]
        for key, values in new.config.space.items()
        if key in old.config.space
    }
    then = with_defaults(trial_tree(old.train, swept), old.source)
    own = _own_values(swept, old, new)
    now = with_defaults(trial_tree(new.train, own), old.source)
    refuse_untrue(new, _learned(then), _learned(now), fix)
    for key in _LENGTHS:
        was = then.get(key)
        if was is not None and not now.get(key, 0) >= was:
            rule = f"must be at least {was}, as in the trials so far"
            raise ConfigError(
                f"train.{key}", now.get(key), rule, f"raise it, or {fix}"
            )


def _learned(train: Tree) -> Tree:
    """Return the keys that determine a trial's figures, named as the sweep's keys."""
    return {f"train.{key}": train[key] for key in train.keys() - _FREE}


def apply_extension(spec: SweepSpec) -> int:
    """Convert a sweep's records and saved configuration to the extended sweep.

    The caller holds the lease. Returns how many recorded trials stay valid.
    """
    old = kept_sweep(spec.uri)
    journal = Journal(spec.storage)
    if content(old) == content(spec):
        return prepare(spec, False)
    _check(old, spec)
    records = journal.records()
    num_shorter = 0
    for record in records:
        carried = _carried(record, old, spec)
        if carried is None:
            num_shorter += 1
        elif carried != record:
            journal.append(carried)
        if carried is None or carried.id != record.id:
            journal.set_aside(record)
    usd_per_hour = spec.config.usd_per_hour
    if (
        old.config.objective != spec.config.objective
        or old.config.usd_per_hour != usd_per_hour
    ):
        journal.price(usd_per_hour and usd_per_hour / num_lanes(records))
    spec.storage.write(
        f"before/sweep-{time.time():.0f}.yaml", spec.storage.read(SAVED)
    )
    spec.storage.write(SAVED, dump_yaml(spec.saved()).encode())
    num_kept = len(records) - num_shorter
    words = f"the results of {counted(num_kept, 'trial')} are kept"
    if num_shorter:
        words += f"; {counted(num_shorter, 'trial')} will train longer, {_HOW}"
    logger.info("%s is extended: %s", spec.uri, words)
    return num_kept


def content(spec: SweepSpec) -> tuple[Tree, Tree]:
    """Return what identifies a sweep, regardless of where its task's files are."""
    train = spec.train | {"task_dir": None}
    return spec.config.model_dump(exclude={"train"}), train


def _carried(
    record: TrialRecord, old: SweepSpec, new: SweepSpec
) -> TrialRecord | None:
    """Convert a record to the extended sweep; None if the trial must train longer."""
    time_s = time_to_target(new.config.objective, record.curve)
    if record.status == "done" and _goes_on(record, old, new, time_s):
        return None
    was_s = old.config.time_budget_s or math.inf
    now_s = new.config.time_budget_s or math.inf
    if record.message == BY_BUDGET and now_s > was_s:
        return None
    config = _own_values(record.config, old, new)
    # The action that added a clone names it by the keys of then.
    name = record.id
    if record.purpose != "clone":
        name = trial_id(config, record.purpose, record.seed)
    return replace(record, id=name, config=config, time_to_target_s=time_s)


def _own_values(trial: Tree, old: SweepSpec, new: SweepSpec) -> Tree:
    """Return a trial's values, with those that it had of the space's new keys."""
    names = old.train.get("keys") or {}
    tree = with_defaults(trial_tree(old.train, trial), old.source)
    return {
        key: value_at(tree, names.get(key, key)) for key in new.config.space
    } | trial


def _goes_on(
    record: TrialRecord, old: SweepSpec, new: SweepSpec, time_s: float | None
) -> bool:
    """Return whether a completed trial would train longer in the extended sweep.

    A trial that ended early because of its own evaluations would not train
    longer.
    """
    if new.config.objective.ends_at_target and time_s is not None:
        return False
    if _is_whole(record, new):
        return False
    had_target = old.config.objective.ends_at_target
    was_cut = had_target and record.time_to_target_s is not None
    return was_cut or _is_whole(record, old)


def _is_whole(record: TrialRecord, spec: SweepSpec) -> bool:
    """Return whether a trial was trained to the last step that `spec` has.

    The end of a training function is not known.
    """
    run = build_run(trial_tree(spec.train, record.config), spec.source)
    end = record.curve[-1] if record.curve else {}
    if not isinstance(run, TrainConfig):
        return False
    if run.max_steps is not None:
        return end.get("step", 0) >= run.max_steps
    return end.get("epoch", 0) + 1e-9 >= (run.epochs or math.inf)


@dataclass(frozen=True)
class Trial:
    """A known trial of a sweep: its configuration and status."""

    config: Tree
    status: str


def steer(
    directory: str | os.PathLike[str],
    action: Steer,
    trial: str = "",
    /,
    **keys: Any,
) -> str:
    """Stop, clone or prioritize a trial, or pause a sweep: `python -m tune steer`.

    A running sweep carries the action out within a second or two, any other
    sweep when it is resumed.

    Args:
        directory: The sweep's directory, a path or URI.
        action: stop: the trial ends at its next evaluation, or never starts.
            clone: the trial runs again, with other keys. first: the waiting
            trial runs next. pause: no further trial starts until go-on.
        trial: The trial's id, or the first digits of it; leave it out for
            pause and go-on.
        keys: For a clone, dotted keys and their values: `**{"optimizer.lr":
            0.01}`.

    Returns:
        The trial's id; after clone the clone's id, after pause and go-on an
        empty text.

    Raises:
        ConfigError: The sweep has no such trial, or a clone could not be
            trained.
    """
    spec = read_kept(os.fspath(directory))
    if action not in get_args(Steer):
        rule = f"must be one of {', '.join(get_args(Steer))}"
        raise ConfigError("ACTION", action, rule, "choose one of them")
    is_of_trial = action in _OF_TRIALS
    given = list(keys) if action != "clone" else []
    if trial and not is_of_trial:
        given.insert(0, "TRIAL")
    if given:
        raise ConfigError(
            given[0], MISSING, f"is not for {action}", "leave it out"
        )
    actions = Actions(spec.storage)
    if not is_of_trial:
        actions.add(Action(action))
        return ""
    trials = known_trials(spec)
    name = named_trial(trial, trials, spec.uri)
    if action != "clone":
        if trials[name].status not in ("waiting", "running"):
            rule = f"has ended already: {trials[name].status}"
            raise ConfigError(
                "TRIAL", name, rule, "name a trial that has not ended"
            )
        actions.add(Action(action, name))
        return name
    changed = trials[name].config | plain(keys, "steer()", [])
    check_trial(spec.train, changed, spec.source)
    clone = trial_id(changed, "clone")
    if clone in trials:
        rule = f"has this clone already: {clone}, {trials[clone].status}"
        raise ConfigError("TRIAL", name, rule, "change a key, such as seed=1")
    is_longer = keys.keys() <= set(_LENGTHS)
    actions.add(Action("clone", name, changed, is_longer))
    return clone


def steer_in_words(
    directory: str, action: str, trial: str = "", *assignments: str
) -> str:
    """Call `steer` with a clone's keys as typed on a command line: KEY=VALUE, in YAML."""
    keys: Tree = {}
    for word in assignments:
        key, _, text = word.partition("=")
        keys[key] = parse_typed(text, f"command line, {key}")
    return steer(directory, cast(Steer, action), trial, **keys)


def known_trials(spec: SweepSpec) -> dict[str, Trial]:
    """Return a sweep's trials by ID: those ended, running, or known to follow."""
    records = Journal(spec.storage).records()
    clones = Actions(spec.storage).read().clones
    # A driver that was killed leaves its trials in the progress file.
    live = read_live(spec.storage) if is_held(spec.storage) else None
    return trials_of(spec, records, clones, live)


def trials_of(
    spec: SweepSpec,
    records: Records,
    clones: Mapping[str, Action],
    live: Live | None,
) -> dict[str, Trial]:
    """Do the same as `known_trials`, with records and actions already read."""
    found: dict[str, Trial] = {}
    for trial in open_trials(spec.config, records):
        found[trial_id(trial)] = Trial(trial, "waiting")
    for name, clone in clones.items():
        found[name] = Trial(clone.keys, "waiting")
    if live is not None:
        for running in live.running:
            found[running.trial] = Trial(running.config, "running")
    ended = {
        record.id: Trial(record.config, record.status) for record in records
    }
    return ended | found | ended


def named_trial(text: str, names: Iterable[str], uri: str) -> str:
    """Return the only trial whose ID begins with `text`; ConfigError otherwise."""
    found = [name for name in names if name.startswith(text)]
    if text and len(found) == 1:
        return found[0]
    rule = "is not a trial of this sweep"
    if not text:
        rule = "is needed"
    elif found:
        rule = f"matches {len(found)} trials: {', '.join(found)}"
    fix = f"list the trials with `python -m tune steer {shlex.quote(uri)}`"
    raise ConfigError("TRIAL", text or MISSING, rule, fix)
