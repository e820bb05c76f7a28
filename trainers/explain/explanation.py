"""`python -m trainers explain`: where a run's time goes, what would change it, and by how much."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

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
from trainers.launch.spec import Job, R, RunSpec, make_spec, read_file
from trainers.measure.result import RunResult
from trainers.measure.run_log import read_log
from trainers.storage import Storage

logger = logging.getLogger(__name__)

_VERIFIED = 3


class Workers(Protocol):
    """Has workers do a job, as many as its configuration says, and returns its result; PacelineError."""

    def __call__(self, job: Job[R]) -> R:
        """Do it."""


@dataclass(frozen=True)
class Subject:
    """What is to be explained."""

    location: str
    """A run's URI, or a YAML file, which has no records."""
    tree: dict[str, Any]
    directory: Path | None
    recorded: Recorded
    has_records: bool


def read_subject(location: str) -> Subject:
    """Read the run in a directory or at a URI, or that of a YAML file; ConfigError where there is none."""
    if location.endswith((".yaml", ".yml")):
        tree, directory = read_file(location)
        return Subject(location, tree, directory, Recorded(build(TrainConfig, tree, location)), has_records=False)
    storage, config = open_run(location)
    directory = Path(storage.path) if storage.is_local else None
    return Subject(storage.uri, config.tree(), directory, _recorded(storage, config), has_records=True)


def explain(
    subject: Subject, seconds: float, profile: bool = True, verify: bool = False, cluster: Workers | None = None
) -> Explanation:
    """Explain a run.

    With `profile` workers take steps of it for about `seconds`, which are thrown away; with `verify` the changed
    configurations run beside the old one. They are `cluster`'s, or without one this machine's. Nothing is written to
    the run.
    """
    recorded, workers = subject.recorded, cluster or run_spawn
    spec, measured, note = None, None, "" if profile else "not profiled"
    if profile:
        try:
            spec = _measurable(subject, on_cluster=cluster is not None)
            measured = workers(ProfileJob(**asdict(spec), seconds=seconds))
        except PacelineError as error:
            note = f"not profiled: {first_line(error)}"
    advice = list(advise(recorded, measured))
    step_s = measured.readings.step_s if measured is not None else None
    if verify and spec is not None and step_s is not None:
        advice = [
            _verified(one, spec, seconds, step_s, workers) if number < _VERIFIED else one
            for number, one in enumerate(advice)
        ]
    shares = run_shares(recorded, measured)
    return Explanation(subject.location, shares, advice, step_s, measured is not None, subject.has_records, note)


def explanation_of(name: str, config: TrainConfig, measured: Profile) -> Explanation:
    """Explain steps of a configuration by their profile alone."""
    recorded = Recorded(config)
    shares, advice = run_shares(recorded, measured), list(advise(recorded, measured))
    return Explanation(name, shares, advice, measured.readings.step_s, profiled=True, recorded=False)


def advise(recorded: Recorded, measured: Profile | None) -> Iterable[Advice]:
    """Return what is worth a change, the largest gain first; of a cause that both show, what is larger."""
    readings = measured.readings if measured is not None else None
    found: dict[str, Suspicion] = {}
    steps = measured.suspicions if measured is not None else []
    for one in (*steps, *suspect_records(recorded, readings)):
        of_run = one.scaled(recorded.part(one))
        if of_run.gain.value > WORTH and (one.kind not in found or of_run.own > found[one.kind].own):
            found[one.kind] = of_run
    for one in sorted(found.values(), key=lambda one: -one.own):
        yield Advice(one.kind, one.words, one.changes, one.fix, one.gain)


def _recorded(storage: Storage, config: TrainConfig) -> Recorded:
    result = storage.read_json("result.json", RunResult, finite=False) if storage.exists("result.json") else None
    return Recorded(config, result, read_log(storage))


def _measurable(subject: Subject, on_cluster: bool) -> RunSpec:
    """The run as workers can take its steps; ConfigError where those of this machine do not fit."""
    config, source = subject.recorded.config, subject.location
    if config.changes_batch:
        rule = "gives steps that differ in size, of which no profile is made"
        fix = "explain a copy of the configuration with one of the sizes as `global_batch_size`"
        raise ConfigError("batch_schedule", config.batch_sizes, rule, fix, source)
    changes = {"scaling.num_workers": config.scaling.max_workers, "launcher": "ray" if on_cluster else "spawn"}
    tree = override(TrainConfig, subject.tree, changes)
    return replace(make_spec(tree, source, subject.directory, own_workers=not on_cluster), quiet=True)


def _verified(advice: Advice, spec: RunSpec, seconds: float, step_s: float, workers: Workers) -> Advice:
    """Return the advice with what its change gives, where a key of the configuration is one."""
    if not advice.changes:
        return advice
    try:
        new = changed(spec.tree, advice.changes, spec.source)
        with spec.storage.beside() as place:
            job = CompareJob(**asdict(spec), new=new, seconds=seconds, step_s=step_s, place=place.uri)
            return replace(advice, verified=workers(job).gain)
    except (ConfigError, PacelineError) as error:
        logger.warning("%s could not be run: %s", advice.changes, first_line(error))
        return advice
