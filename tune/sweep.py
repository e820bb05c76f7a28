"""Builds and runs the sweep: lanes, Ray Tune's Tuner over them, the journal, and the answer at the end (Ray)."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import trainers.ray_env  # noqa: F401 (before Ray, which reads it at import)

# isort: split
import ray
from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler
from ray.tune.search import BasicVariantGenerator

from cluster.capacity import worker_groups
from trainers.config import TrainConfig
from trainers.errors import ConfigError
from trainers.run import RunSpec, check_precision, check_task
from trainers.torch_trainer import capacity, check_cluster, connect, wants_gpu
from tune.journal import Journal, TrialRecord, trial_id
from tune.lanes import Lanes, start_mailbox
from tune.space import chosen, planned_trials, tune_space
from tune.spec import SweepSpec
from tune.trial import LaneTrial, make_record

logger = logging.getLogger(__name__)


class Interrupted(Exception):  # noqa: N818 (a wish, not an error)
    """Ctrl-C, or SIGTERM from `ray job stop`."""


def run_sweep(spec: SweepSpec) -> list[TrialRecord]:
    """Run every trial that has no record yet; returns the records of all.

    Raises ConfigError (the cluster can never hold a trial), and Interrupted when asked to stop: what has ended until
    then is in the journal.
    """
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it misses the result files that the journal replaces
    run = RunSpec(spec.train, spec.path, spec.source, spec.uri)
    check_task(run)
    connect(show_workers=False)
    device_type = check_cluster(run)
    for precision in _precisions(spec):
        check_precision(replace(run, tree={**spec.train, "precision": precision}), device_type)
    train = run.config
    lanes_wanted = _lanes(spec, train)
    journal = Journal(spec.storage)
    mailbox = start_mailbox()
    lanes = Lanes(
        mailbox,
        lanes_wanted,
        train,
        spec.path,
        wants_gpu(train, capacity()),
        spec.storage.child("lanes").uri,
        spec.config.isolation == "fresh",
    )
    total = planned_trials(spec.config)
    workers = train.scaling.max_workers
    logger.info(
        "%s: %s trials in %d lane%s of %d worker%s; the lanes are starting",
        spec.config.name,
        total or "?",
        lanes_wanted,
        "s" if lanes_wanted > 1 else "",
        workers,
        "s" if workers > 1 else "",
    )
    progress = _Progress(spec, journal, mailbox, total)
    try:
        with progress.interrupts:
            lanes.start()
            _tuner(spec, mailbox, lanes_wanted, progress).fit()
        lanes.close()
    except BaseException:
        lanes.abandon()
        raise
    progress.record_stopped()
    records = {record.id: record for record in journal.records()}
    return [records[trial] for trial in progress.seen if trial in records]


def _precisions(spec: SweepSpec) -> list[str]:
    """Every precision that a trial may have."""
    values = spec.config.space.get("precision", [spec.train["precision"]])
    return list(values if isinstance(values, list) else values.choice or [])


def _lanes(spec: SweepSpec, train: TrainConfig) -> int:
    """As many lanes as asked for, or as the cluster's nodes hold now; never more than there are trials."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = train.scaling.gpus_per_worker if wants_gpu(train, capacity()) else 0.0
    fits = worker_groups(nodes, train.scaling.min_workers, train.scaling.cpus_per_worker, gpus)
    if spec.config.lanes != "auto":
        if spec.config.lanes > max(fits, 1):
            raise ConfigError(
                "lanes",
                spec.config.lanes,
                f"must be at most the {fits} worker groups that fit on the cluster now",
                "lower it, or set `lanes: auto`",
                spec.source,
            )
        return spec.config.lanes
    return max(1, min(fits, planned_trials(spec.config) or fits))


def _tuner(spec: SweepSpec, mailbox: Any, lanes: int, progress: _Progress) -> tune.Tuner:
    config, objective = spec.config, spec.config.objective
    trainable = tune.with_resources(
        tune.with_parameters(
            LaneTrial, mailbox=mailbox, uri=spec.uri, train=spec.train, objective=objective.model_dump()
        ),
        {"memory": 1},  # Tune refuses a trial without resources; a byte takes nothing from the lanes
    )
    scheduler = None
    if config.scheduler == "asha":
        scheduler = AsyncHyperBandScheduler(metric="objective", mode=objective.direction, max_t=10_000)
    return tune.Tuner(
        trainable,
        param_space=tune_space(config),
        tune_config=tune.TuneConfig(
            num_samples=config.budget.trials or 1 if config.search == "random" else 1,
            search_alg=BasicVariantGenerator(max_concurrent=lanes, random_state=config.seed),
            scheduler=scheduler,
            reuse_actors=True,
            time_budget_s=config.budget.time_s,
        ),
        run_config=tune.RunConfig(name="tune", storage_path=spec.uri, verbose=0, callbacks=[progress]),
    )


class _Interrupts:
    """SIGINT and SIGTERM while the sweep runs: noted here, acted on between two of Tune's steps.

    Raising from the handler itself would be lost in whatever `except` happens to be running.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Interrupts, ())  # Tune pickles its callbacks; the handlers found here belong to this process

    def __enter__(self) -> _Interrupts:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def __exit__(self, *exc: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)


@dataclass
class _Progress(tune.Callback):
    """A line on the terminal as each trial ends; records the trials that the search stopped."""

    spec: SweepSpec
    journal: Journal
    mailbox: Any
    total: int | None
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    ended: int = 0
    interrupts: _Interrupts = field(default_factory=_Interrupts)

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if self.interrupts.signal_name is not None:
            raise Interrupted(self.interrupts.signal_name)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        name = trial_id(chosen(trial.config))
        self.seen[name] = chosen(trial.config)
        self.started.setdefault(name, time.time())

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        name = trial_id(chosen(trial.config))
        record = self.journal.find(name) or self._stopped(name)
        if record is None:
            return
        self.ended += 1
        shown = "  ".join(f"{key.rsplit('.', 1)[-1]} {value}" for key, value in record.config.items())
        figures = "  ".join(f"{key} {value:.4f}" for key, value in record.metrics.items() if key.startswith("val_"))
        speed = f"{record.samples_per_s:,.0f} samples/s  " if record.samples_per_s else ""
        logger.info(
            "trial %d/%s  %s  %s  %s%s%s",
            self.ended,
            self.total or "?",
            shown,
            record.status,
            speed,
            figures,
            f"  {record.message}" if record.message else "",
        )

    def _stopped(self, name: str) -> TrialRecord | None:
        reports = ray.get(self.mailbox.reports.remote(name))
        if not reports:
            return None
        record = make_record(
            name,
            self.seen[name],
            self.spec.config.objective,
            self.started[name],
            reports,
            {"status": "stopped", "message": "stopped by the search"},
        )
        self.journal.append(record)
        return record

    def record_stopped(self) -> None:
        """Record what the end of a budget cut off."""
        for name in self.seen:
            if self.journal.find(name) is None:
                self._stopped(name)


def environment() -> dict[str, str]:
    """Versions and nodes that the figures depend on."""
    import torch

    from trainers.device import environment as worker_environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nodes = [node for node in ray.nodes() if node["Alive"]]
    totals = ray.cluster_resources()
    return worker_environment(device) | {
        "nodes": str(len(nodes)),
        "cluster_cpus": f"{totals.get('CPU', 0):g}",
        "cluster_gpus": f"{totals.get('GPU', 0):g}",
    }


def disconnect() -> None:
    """Leave the cluster; an embedded one ends."""
    ray.shutdown()
