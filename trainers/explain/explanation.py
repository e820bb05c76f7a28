"""`python -m trainers explain`: where a run's time goes, what would change it, and by how much."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trainers.config.model import build
from trainers.config.overrides import override
from trainers.config.train import TrainConfig
from trainers.errors import ConfigError, PacelineError, first_line
from trainers.explain.advice import Advice, Explanation
from trainers.explain.profile import ProfileJob, changed
from trainers.explain.readings import Profile, Suspicion
from trainers.explain.recorded import Recorded, run_shares, suspect_records
from trainers.explain.suspect import WORTH
from trainers.explain.verify import CompareJob
from trainers.launch.local import run_spawn
from trainers.launch.run_directory import open_run
from trainers.launch.spec import RunSpec, make_spec, read_file
from trainers.measure.result import RunResult
from trainers.measure.run_log import read_log
from trainers.storage import Storage

logger = logging.getLogger(__name__)

_VERIFIED = 3


def explain(location: str, seconds: float, profile: bool = True, verify: bool = False) -> Explanation:
    """Explain the run in a directory or at a URI, or that of a YAML file, which has no records; ConfigError where there
    is none.

    With `profile` workers of this machine take steps of it for about `seconds`, which are thrown away; with `verify`
    the changed configurations run beside the old one. Nothing is written to the run.
    """
    if location.endswith((".yaml", ".yml")):
        tree, directory = read_file(location)
        storage, recorded = None, Recorded(build(TrainConfig, tree, location))
    else:
        storage, config = open_run(location)
        tree, directory = config.tree(), Path(storage.path) if storage.is_local else None
        recorded = _recorded(storage, config)
    spec, measured, note = None, None, "" if profile else "not profiled"
    if profile:
        try:
            spec = _here(tree, recorded.config, location, directory)
            measured = run_spawn(ProfileJob(**asdict(spec), seconds=seconds))
        except PacelineError as error:
            note = f"not profiled: {first_line(error)}"
    advice = list(advise(recorded, measured))
    step_s = measured.readings.step_s if measured is not None else None
    if verify and spec is not None and step_s is not None:
        advice = [
            _verified(one, spec, seconds, step_s) if number < _VERIFIED else one for number, one in enumerate(advice)
        ]
    shares = run_shares(recorded, measured)
    return Explanation(
        location if storage is None else storage.uri,
        shares,
        advice,
        step_s,
        measured is not None,
        storage is not None,
        note,
    )


def explanation_of(name: str, config: TrainConfig, measured: Profile) -> Explanation:
    """Explain steps of a configuration by their profile alone."""
    recorded = Recorded(config)
    shares, advice = run_shares(recorded, measured), list(advise(recorded, measured))
    return Explanation(name, shares, advice, measured.readings.step_s, profiled=True, recorded=False)


def advise(recorded: Recorded, measured: Profile | None) -> Iterable[Advice]:
    """Return what is worth a change, the largest gain first; of a cause that both show, what is larger."""
    part = 1.0 if recorded.result is None else recorded.training_s / recorded.wall_s
    readings = measured.readings if measured is not None else None
    found: dict[str, Suspicion] = {}
    steps = measured.suspicions if measured is not None else []
    for one in (*steps, *suspect_records(recorded, readings)):
        gain = one.gain if one.of_run else one.gain.scaled(part)
        if gain.value > WORTH and (one.kind not in found or gain.value > found[one.kind].gain.value):
            found[one.kind] = replace(one, gain=gain)
    for one in sorted(found.values(), key=lambda one: -one.gain.value):
        yield Advice(one.kind, one.words, one.changes, one.fix, one.gain)


def _recorded(storage: Storage, config: TrainConfig) -> Recorded:
    result = storage.read_json("result.json", RunResult, finite=False) if storage.exists("result.json") else None
    return Recorded(config, result, read_log(storage))


def _here(tree: dict[str, Any], config: TrainConfig, source: str, directory: Path | None) -> RunSpec:
    """The run as workers of this machine can take its steps; ConfigError where they do not fit."""
    if config.changes_batch:
        rule = "gives steps that differ in size, of which no profile is made"
        fix = "explain a copy of the configuration with one of the sizes as `global_batch_size`"
        raise ConfigError("batch_schedule", config.batch_sizes, rule, fix, source)
    changes = {"scaling.num_workers": config.scaling.max_workers, "launcher": "spawn"}
    return replace(make_spec(override(TrainConfig, tree, changes), source, directory), quiet=True)


def _verified(advice: Advice, spec: RunSpec, seconds: float, step_s: float) -> Advice:
    """Return the advice with what its change gives, where a key of the configuration is one."""
    if not advice.changes:
        return advice
    try:
        new = changed(spec.tree, advice.changes, spec.source)
        job = CompareJob(**asdict(spec), new=new, seconds=seconds, step_s=step_s)
        return replace(advice, verified=run_spawn(job).gain)
    except (ConfigError, PacelineError) as error:
        logger.warning("%s could not be run: %s", advice.changes, first_line(error))
        return advice
