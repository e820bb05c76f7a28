"""Builds and runs the sweep: lanes, Ray Tune's Tuner over them, the journal, and the answer at the end (Ray)."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler

from cluster.files.capacity import worker_groups
from cluster.health.check import require_sound
from trainers.config import TrainConfig
from trainers.launch.spec import RunSpec, check_precision
from trainers.on_ray.capacity import capacity, nodes_at_most
from trainers.on_ray.connect import check_cluster, connect, wants_gpu
from tune.lanes.lanes import Lanes, start_mailbox
from tune.report.answer import objective_value
from tune.search.ray_search import (
    member_name,
    num_samples,
    population_scheduler,
    population_space,
    searcher,
    tune_space,
)
from tune.search.space import planned_trials
from tune.sweep.pace import Pace
from tune.sweep.plan import lanes_for, starts_at_once
from tune.sweep.population_trial import PopulationTrial
from tune.sweep.progress import Interrupted, Progress
from tune.sweep.repeats import run_repeats
from tune.sweep.spec import SweepSpec
from tune.sweep.trial import LaneTrial
from tune.trials.journal import Journal
from tune.trials.record import TrialRecord

logger = logging.getLogger(__name__)

__all__ = ["Interrupted", "disconnect", "environment", "run_sweep"]


def run_sweep(spec: SweepSpec, checked: bool = True) -> list[TrialRecord]:
    """Run every trial that has no record yet; returns the records of all. `checked`: after a look at the nodes.

    Raises ConfigError (the cluster can never hold a trial), ClusterError (nodes are not in order), and Interrupted when
    asked to stop: what has ended until then is in the journal.
    """
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it misses the result files that the journal replaces
    run = RunSpec(spec.train, spec.path, spec.source, spec.uri)
    run.load_task()
    connect(show_workers=False)
    device_type = check_cluster(run)
    if checked:
        require_sound(spec.uri)
    for precision in _precisions(spec):
        check_precision(replace(run, tree={**spec.train, "precision": precision}), device_type)
    train = run.config
    lanes_wanted = _lanes(spec, train)
    journal = Journal(spec.storage)
    mailbox = start_mailbox(spec.storage)
    # A grid and a random search come to their old trials again; optuna and frontier go on from them.
    before = journal.records() if spec.config.search in ("optuna", "frontier") else []
    worst = math.inf if spec.config.objective.direction == "min" else -math.inf
    values = [objective_value(spec.config.objective, record) for record in before]
    told = [(record.config, worst if value is None else value) for record, value in zip(before, values, strict=True)]
    at_once = starts_at_once(
        lanes_wanted,
        _fits(train, _nodes_up()),
        [node.get("CPU", 0.0) for node in _nodes_up()],
        train.scaling.max_workers,
    )
    total = None if spec.config.search == "frontier" else planned_trials(spec.config)  # it ends when it is sure
    # Other searches, and a population, may wait for what they hear of trials.
    unhurried = total is not None and spec.config.search in ("grid", "random") and spec.config.scheduler != "pbt"
    search = searcher(spec.config, at_once if unhurried else lanes_wanted, told, spec.train, journal.records)
    lanes = Lanes(
        mailbox,
        lanes_wanted,
        train,
        spec.path,
        wants_gpu(train, capacity()),
        spec.storage,
        spec.config.isolation == "fresh",
        at_once,
        patient=spec.config.lanes == "auto",
    )
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
    usd_per_hour = spec.config.usd_per_hour and spec.config.usd_per_hour / lanes_wanted

    pace = Pace(search, mailbox, total if unhurried else None)

    def grow() -> None:
        """Further lanes where the cluster has grown."""
        if spec.config.lanes == "auto":
            lanes.grow(_lanes(spec, train))
            pace.lanes_started(lanes.count)

    progress = Progress(spec, journal, mailbox, total, usd_per_hour, grow, pace)
    progress.seen.update({record.id: record.config for record in before})
    try:
        with progress.interrupts, progress.terminal:
            lanes.start()
            lanes.await_first(lambda: progress.interrupts.signal_name is not None)
            began = time.monotonic()
            _tuner(spec, mailbox, search, progress, len(before)).fit()
            pace.over()
            progress.record_stopped()
            if time.monotonic() - began < (spec.config.time_budget_s or math.inf):
                look = functools.partial(progress.on_step_begin, 0, [])
                progress.seen |= run_repeats(spec, mailbox, usd_per_hour, look, progress.terminal.say)
        lanes.close()
        ray.kill(mailbox)  # Tune's copy of its handle would keep it for as long as this process lives
    except BaseException:
        lanes.end()
        raise
    records = {record.id: record for record in journal.records()}
    return [records[trial] for trial in progress.seen if trial in records]


def _precisions(spec: SweepSpec) -> list[str]:
    """Every precision that a trial may have."""
    values = spec.config.space.get("precision", [spec.train["precision"]])
    return list(values if isinstance(values, list) else values.choice or [])


def _lanes(spec: SweepSpec, train: TrainConfig) -> int:
    """As many lanes as asked for, or as the cluster holds or may grow to; never more than there are trials.

    Those for which there is no node yet wait for one: that is what makes the cluster grow.
    """
    most = max(_fits(train, _nodes_up()), _fits(train, nodes_at_most()))
    return lanes_for(spec.config.lanes, most, planned_trials(spec.config), spec.source)


def _nodes_up() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _fits(train: TrainConfig, nodes: Sequence[Mapping[str, float]]) -> int:
    gpus = train.scaling.gpus_per_worker if wants_gpu(train, capacity()) else 0.0
    return worker_groups(nodes, train.scaling.min_workers, train.scaling.cpus_per_worker, gpus)


def _tuner(spec: SweepSpec, mailbox: Any, search: Any, progress: Progress, before: int) -> tune.Tuner:
    config, objective = spec.config, spec.config.objective
    population = config.scheduler == "pbt"
    trainable = tune.with_resources(
        tune.with_parameters(
            PopulationTrial if population else LaneTrial,
            mailbox=mailbox,
            uri=spec.uri,
            train=spec.train,
            objective=objective.model_dump(),
            usd_per_hour=progress.usd_per_hour,
            **({"interval": config.pbt.perturbation_interval} if population else {}),
        ),
        {"memory": 1},  # Tune refuses a trial without resources; a byte takes nothing from the lanes
    )
    scheduler = None
    if config.scheduler == "asha":
        scheduler = AsyncHyperBandScheduler(metric="objective", mode=objective.direction, max_t=10_000)
    elif population:
        scheduler = population_scheduler(config)
    return tune.Tuner(
        trainable,
        param_space=population_space(config, Journal(spec.storage)) if population else tune_space(config),
        tune_config=tune.TuneConfig(
            num_samples=num_samples(config, before),
            search_alg=search,
            scheduler=scheduler,
            reuse_actors=True,
            time_budget_s=config.time_budget_s,
            trial_name_creator=member_name if population else None,
        ),
        run_config=tune.RunConfig(name="tune", storage_path=spec.uri, verbose=0, callbacks=[progress]),
    )


def environment() -> dict[str, str]:
    """Versions and nodes that the figures depend on."""
    import torch

    from trainers.devices.device import environment as worker_environment

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
