"""`python -m trainers explain`: where a run's time goes, what takes it, and what a change gives where both are run."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from trainers.config.model import build
from trainers.config.overrides import override
from trainers.config.train import TrainConfig
from trainers.errors import ConfigError, PacelineError, first_line
from trainers.explain.causes import WORTH, Cause, name_causes, run_shares
from trainers.explain.steps import ProfileJob
from trainers.explain.verify import CompareJob
from trainers.launch.run_directory import open_run
from trainers.launch.spec import Job, R, RunSpec, make_spec, read_file
from trainers.measure.ranks import findings
from trainers.measure.result import RunResult

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
    config: TrainConfig
    result: RunResult | None = None
    """None of a run that goes on, or has failed."""


@dataclass(frozen=True)
class Explanation:
    """Where a run's time goes, and what takes it."""

    uri: str
    shares: dict[str, float]
    """Of the run's time, by part; they add up to 1."""
    causes: list[Cause] = field(default_factory=list)
    """The largest share first."""
    step_s: float | None = None
    """Mean time of a step in the profile."""
    notes: list[str] = field(default_factory=list)
    """What the ranks' own figures show, and why there is no profile."""

    def __str__(self) -> str:
        lines = [f"{self.uri}: where the time goes"]
        for name, share in sorted(self.shares.items(), key=lambda item: -item[1]):
            lines.append(f"  {share * 1e2:5.1f} %  {name}")
        lines += self.notes
        for number, cause in enumerate(self.causes, 1):
            head, *rest = cause.lines()
            lines += [f"{number}. {head}", *rest]
        if not self.causes:
            lines.append(f"nothing that can be named takes more than {WORTH:.0%}")
        return "\n".join(lines)


def read_subject(location: str) -> Subject:
    """Read the run in a directory or at a URI, or that of a YAML file; ConfigError where there is none."""
    if location.endswith((".yaml", ".yml")):
        tree, directory = read_file(location)
        return Subject(location, tree, directory, build(TrainConfig, tree, location))
    storage, config = open_run(location)
    result = storage.read_json("result.json", RunResult, finite=False) if storage.exists("result.json") else None
    directory = Path(storage.path) if storage.is_local else None
    return Subject(storage.uri, config.tree(), directory, config, result)


def explain(
    subject: Subject,
    workers: Workers,
    seconds: float,
    launcher: str = "spawn",
    profile: bool = True,
    verify: bool = False,
) -> Explanation:
    """Explain a run.

    With `profile` workers of `launcher` take steps of it for about `seconds`, which are thrown away; with `verify` the
    changed configurations run beside the old one. Nothing is written to the run.
    """
    result = subject.result
    notes = [sentence for _, sentence in findings(result.ranks)] if result is not None else []
    spec, measured = None, None
    if profile:
        try:
            spec = _measurable(subject, launcher)
            measured = workers(ProfileJob(**asdict(spec), seconds=seconds))
        except PacelineError as error:
            notes.append(f"not profiled: {first_line(error)}")
    causes = name_causes(subject.config, result, measured)
    step_s = measured.step_s if measured is not None else None
    if verify and spec is not None and step_s is not None:
        tried = [cause for cause in causes if cause.changes and cause.of_steps][:_VERIFIED]
        steps = int(seconds / step_s)
        causes = [_verified(cause, spec, steps, workers) if cause in tried else cause for cause in causes]
    return Explanation(subject.location, run_shares(result, measured), causes, step_s, notes)


def _measurable(subject: Subject, launcher: str) -> RunSpec:
    """The run as workers can take its steps; ConfigError where those of this machine do not fit."""
    config, source = subject.config, subject.location
    if config.changes_batch:
        fix = "explain a copy of the configuration with one of the sizes as `global_batch_size`"
        raise ConfigError("batch_schedule", config.batch_sizes, "gives steps that differ in size", fix, source)
    changes = {"scaling.num_workers": config.scaling.max_workers, "launcher": launcher}
    tree = override(TrainConfig, subject.tree, changes)
    return replace(make_spec(tree, source, subject.directory, own_workers=launcher != "ray"), quiet=True)


def _verified(cause: Cause, spec: RunSpec, steps: int, workers: Workers) -> Cause:
    """Return the cause with what its change gives."""
    try:
        new = override(TrainConfig, spec.tree, cause.changes)
        build(TrainConfig, new, spec.source)
        with spec.storage.beside() as place:
            job = CompareJob(**asdict(spec), new=new, steps=steps, place=place.uri)
            return replace(cause, gain=workers(job))
    except PacelineError as error:
        logger.warning("%s could not be run: %s", cause.changes, first_line(error))
        return cause
