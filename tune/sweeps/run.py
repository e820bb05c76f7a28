"""The sweep as it runs: lanes, Ray Tune's Tuner over them, and the journal (Ray)."""

import contextlib
import logging
import math
import re
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler

from cluster.health.check import require_sound
from trainers.errors import ConfigError, LeaseError, PacelineError, first_line, last_line
from trainers.launch.spec import FunctionSpec, RunSpec, check_precision
from trainers.on_ray.capacity import nodes_at_most
from trainers.on_ray.cluster_end import ending_with_cluster
from trainers.on_ray.connect import check_cluster, connect, energy_is_counted
from trainers.on_ray.environment import run_environment, sweep_environment
from trainers.on_ray.vital_signs import VitalSigns
from trainers.output import Output
from tune.knowledge.taken import past_bounds
from tune.lanes.kept import resident
from tune.lanes.lanes import Lanes, start_mailbox
from tune.report.words import duration
from tune.search import ray_search
from tune.sweeps.explained import explain_best
from tune.sweeps.learning import here, leave, take, words
from tune.sweeps.plan import SweepPlan
from tune.sweeps.population_trial import PopulationTrial
from tune.sweeps.progress import Interrupted, Pace, Progress
from tune.sweeps.repeats import run_repeats
from tune.sweeps.spec import SweepSpec, save
from tune.sweeps.trial import LaneTrial
from tune.trials.journal import Journal
from tune.trials.microbatch_bounds import PastBound
from tune.trials.record import TrialRecord

logger = logging.getLogger(__name__)

_ACTORS = 4
"""That Tune starts for one trial at most: its work is on a lane, and goes on without them."""
_LEAST_ROOM_BYTES = 2**20


def run_sweep(
    spec: SweepSpec, checked: bool = True, facts: dict[str, str] | None = None, output: Output | None = None
) -> list[TrialRecord]:
    """Run every trial that has no record yet; returns the records of all. `checked`: after a look at the nodes.
    `facts` is given what the report must say of the sweep itself; `output` is what the user wants to be told.

    Raises ConfigError (the cluster can never hold a trial), ClusterError (nodes are not in order), Interrupted when
    asked to stop, and PacelineError when it is cut off: what has ended until then is in the journal.
    """
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it misses the result files that the journal replaces
    _time_left_s(spec)
    plan = _plan(spec, checked)
    journal = Journal(spec.storage)
    # A grid and a random search come to their old trials again; optuna and frontier go on from them.
    before = journal.records() if spec.config.search in ("optuna", "frontier") else []
    at_a_time = plan.num_at_once if plan.is_independent else plan.num_lanes
    where = here(spec, plan.use_gpu)
    taken = take(spec, where)
    given = spec.train, journal.records, spec.past()
    search = ray_search.searcher(spec.config, at_a_time, _objectives(spec, before), *given)
    lanes, keep = _lanes(spec, plan, past_bounds(taken))
    mailbox, is_auto = lanes.mailbox, spec.config.lanes == "auto"
    pace = Pace(search, mailbox, plan.total if plan.is_independent else None)

    def grow() -> None:
        """Start further lanes where the cluster has grown."""
        count = SweepPlan.make(spec, _nodes_up(), nodes_at_most(), plan.use_gpu).num_lanes
        if count > lanes.count:
            logger.info("the cluster holds %d lanes by now: another %d start", count, count - lanes.count)
        lanes.grow(count)
        pace.lanes_started(lanes.count)

    progress = Progress(spec, plan, mailbox, pace, grow if is_auto else None, output or Output())
    progress.seen.update({record.id: record.config for record in before})
    progress.records.update({record.id: record for record in before})
    try:
        ending = ending_with_cluster(_goes_on(spec), progress.terminal.close)
        with ending, progress.heeding_signals(), progress.terminal, VitalSigns(bool(resident)), run_environment():
            lanes.grow(plan.num_lanes)
            lanes.await_first(lambda: progress.signal_name is not None)
            began, left_s = time.monotonic(), _time_left_s(spec)
            with sweep_environment():
                _tuner(spec, plan, mailbox, search, progress, len(before), left_s).fit()
            pace.over()
            is_over_budget = time.monotonic() - began >= (left_s or math.inf)
            progress.record_rest(is_over_budget)
            if not is_over_budget:
                repeats = run_repeats(spec, plan, mailbox, lanes.settle, progress.tick, progress.terminal.say)
                progress.records |= repeats
                for record in repeats.values():
                    progress.tell(record)
                explain_best(spec, list(progress.records.values()), mailbox, lanes.settle, progress.tick)
            progress.restore_records()
            save(spec)
            if taken:
                (facts if facts is not None else {})["knowledge"] = words(taken)
            leave(spec, where, list(progress.records.values()), ray.get(mailbox.learned.remote()))
            if restarts := _restarts(ray.get(mailbox.restarts.remote())):
                progress.terminal.say(f"lanes started again: {restarts}")
                (facts if facts is not None else {})["lane_restarts"] = restarts
        keep()
    except BaseException as error:
        with contextlib.suppress(PacelineError):
            progress.restore_records()
            save(spec)
        lanes.end()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(mailbox)
        cause = progress.failure or error
        if isinstance(cause, LeaseError):
            raise cause from None
        if isinstance(error, Interrupted | ConfigError) or not isinstance(cause, Exception):
            raise
        raise PacelineError(f"{_why(cause, spec)}; {_goes_on(spec)}") from error
    names = dict.fromkeys([*progress.seen, *progress.records])
    return [progress.records[name] for name in names if name in progress.records]


def _lanes(spec: SweepSpec, plan: SweepPlan, bounds: Sequence[PastBound]) -> tuple[Lanes, Callable[[], None]]:
    """Return the lanes of a sweep, kept ones where there are, and what to call once it has ended well."""
    is_fresh, is_patient = spec.config.isolation == "fresh", spec.config.lanes == "auto"
    compares = spec.is_of_function and spec.config.compare and not is_fresh
    given = spec.storage, spec.path, compares, bounds
    scaling, use_gpu, at_once = plan.train.scaling, plan.use_gpu, plan.num_at_once
    key = scaling, use_gpu, spec.is_of_function
    kept = resident[0] if resident else None
    if kept is not None and not is_fresh and (lanes := kept.take(key)) is not None:
        ray.get(lanes.mailbox.begin.remote(*given))
        lanes.begin(spec.storage, at_once, is_patient)
    else:
        at = start_mailbox(*given), scaling, use_gpu, is_fresh, spec.storage, at_once
        lanes = Lanes(*at, is_patient=is_patient, of_function=spec.is_of_function)

    def end() -> None:
        if kept is not None and not is_fresh and spec.config.keep_lanes_s:
            lanes.settle()  # a start would be in the way of the next sweep
            if compares:
                ray.get(lanes.mailbox.renew.remote())
            kept.keep(lanes, key, spec.config.keep_lanes_s)
            return
        lanes.close()
        ray.kill(lanes.mailbox)  # Tune's copy of its handle would keep it for as long as this process lives

    return lanes, end


def _restarts(restarts: Sequence[tuple[float, str]]) -> str:
    """What lanes that started again have cost, and why they did; empty where none has."""
    reasons = Counter(re.sub(r"\d+", "#", why) for _, why in restarts)  # threads and trials are numbered
    shown = "; ".join(f"{why} ({count})" for why, count in reasons.most_common(5))
    times = "once" if len(restarts) == 1 else f"{len(restarts)} times"
    return f"{times}, {duration(sum(time_s for time_s, _ in restarts))}: {shown}" if restarts else ""


def _goes_on(spec: SweepSpec) -> str:
    """What a sweep that was cut off says last."""
    return f"what has ended is in the journal, and `python -m tune resume {shlex.quote(spec.uri)}` goes on"


def _why(error: Exception, spec: SweepSpec) -> str:
    """What has cut the sweep off, in a line; of what follows from a full disk or a dead actor, that."""
    node: Any = ray._private.worker._global_node
    places = [node.get_session_dir_path()] if node is not None else []
    for place in [*places, *[spec.storage.path] * spec.storage.is_local]:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(place).free < _LEAST_ROOM_BYTES:
                return f"no space is left on the disk of {place} ({last_line(error)})"
    if isinstance(error, ray.exceptions.RayActorError):  # all that the driver itself asks of an actor, it asks of this
        return f"the sweep's mailbox, an actor, has died ({first_line(error)})"
    return last_line(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {last_line(error)}"


def _plan(spec: SweepSpec, checked: bool) -> SweepPlan:
    """Connect, check the task and the cluster, and plan the sweep on it."""
    given = spec.train, spec.path, spec.source, spec.uri
    run: Any = FunctionSpec(*given) if spec.is_of_function else RunSpec(*given)
    run.load() if spec.is_of_function else run.load_task()
    connect(show_workers=False)
    device_type = check_cluster(run)
    if checked:
        require_sound(spec.uri)
    if "energy_j" in spec.config.objective.decisive and not spec.is_of_function and not energy_is_counted(device_type):
        key = "objective.metrics" if spec.config.objective.metrics else "objective.metric"
        rule = "cannot be measured: no GPU's driver (NVML) tells it"
        raise ConfigError(key, "energy_j", rule, "remove it, or run on GPUs that count it", spec.source)
    plan = SweepPlan.make(spec, _nodes_up(), nodes_at_most(), device_type == "cuda")
    for precision in () if spec.is_of_function else plan.precisions:
        check_precision(replace(run, tree={**spec.train, "precision": precision}), device_type)
    lanes, workers = plan.num_lanes, plan.train.scaling.max_workers
    groups = f"{lanes} lane{'s' * (lanes > 1)} of {workers} worker{'s' * (workers > 1)}"
    logger.info("%s: %s trials in %s; the lanes are starting", spec.config.name, plan.total or "?", groups)
    return plan


def _nodes_up() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _driver_node() -> str:
    """The resource of the driver's own node: a trial's actor there does not go with a node that comes and goes."""
    [own] = [node for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id()]
    names = ("node:__internal_head__", f"node:{own['NodeManagerAddress']}")
    return next(name for name in names if name in own["Resources"])


def _time_left_s(spec: SweepSpec) -> float | None:
    """Return the seconds that the sweep has from now on; raise ConfigError where its deadline has passed."""
    left_s = spec.config.time_left_s(0.0, time.time())
    if left_s is not None and left_s <= 0:
        rule = f"has passed; `python -m tune report {spec.uri}` answers from the trials that have ended"
        raise ConfigError("deadline", spec.config.deadline, rule, "give a later one", spec.source)
    return left_s


def _objectives(spec: SweepSpec, records: Sequence[TrialRecord]) -> list[tuple[dict[str, Any], list[float]]]:
    """The configurations of ended trials and their objectives, the worst for those that have none."""
    objective = spec.config.objective
    return [(one.config, ray_search.values_of(objective, one)) for one in records]


def _tuner(
    spec: SweepSpec,
    plan: SweepPlan,
    mailbox: Any,
    search: Any,
    progress: Progress,
    num_before: int,
    time_left_s: float | None,
) -> tune.Tuner:
    config, objective = spec.config, spec.config.objective
    population = config.scheduler == "pbt"
    trainable = tune.with_resources(
        tune.with_parameters(
            PopulationTrial if population else LaneTrial,
            mailbox=mailbox,
            sweep=spec.storage,
            train=spec.train,
            objective=objective.model_dump(),
            usd_per_hour=plan.lane_usd_per_hour,
            **({"interval": config.pbt.perturbation_interval} if population else {}),
        ),
        {_driver_node(): 1e-4},  # Tune refuses a trial without resources; this one takes nothing from the lanes
    )
    scheduler = ray_search.population_scheduler(config) if population else None
    if config.ends_beaten:
        scheduler = ray_search.BeatenScheduler(objective, progress.records, plan.lane_usd_per_hour, progress.reasons)
    if config.scheduler == "asha":
        scheduler = AsyncHyperBandScheduler(metric="objective", mode=objective.direction, max_t=10_000)
    journal = Journal(spec.storage)
    space = ray_search.population_space(config, journal) if population else ray_search.tune_space(config)
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            num_samples=ray_search.num_samples(config, num_before),
            search_alg=search,
            scheduler=scheduler,
            reuse_actors=True,
            time_budget_s=time_left_s,
            trial_name_creator=ray_search.member_name if population else None,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=spec.uri,
            verbose=0,
            progress_reporter=tune.CLIReporter(),  # it says nothing; a notebook's clears the cell before that
            callbacks=[progress],
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # it would be an empty one
            failure_config=tune.FailureConfig(max_failures=_ACTORS - 1),
        ),
    )


def environment() -> dict[str, str]:
    """The versions and nodes that the figures depend on."""
    import torch

    from trainers.devices.device import environment as worker_environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    totals = ray.cluster_resources()
    return worker_environment(device) | {
        "nodes": str(len(_nodes_up())),
        "cluster_cpus": f"{totals.get('CPU', 0):g}",
        "cluster_gpus": f"{totals.get('GPU', 0):g}",
    }
