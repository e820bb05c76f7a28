"""The sweep as it runs: lanes, Ray Tune's Tuner over them, and the journal (Ray)."""

import contextlib
import logging
import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler

from cluster.health.check import require_sound
from trainers.config import TrainConfig
from trainers.config.overrides import override
from trainers.errors import (
    ConfigError,
    LeaseError,
    PacelineError,
    counted,
    first_line,
    last_line,
)
from trainers.launch.spec import FunctionSpec, RunSpec
from trainers.on_ray.capacity import nodes_at_most
from trainers.on_ray.cluster_end import ending_with_cluster
from trainers.on_ray.connect import check_cluster, connect, energy_is_counted
from trainers.on_ray.environment import run_environment, sweep_environment
from trainers.on_ray.internals import own_node
from trainers.on_ray.vital_signs import VitalSigns
from trainers.output import Output
from tune.forks.assignment import Assignment
from tune.forks.client import NoOutcomeError, Zygote
from tune.lanes.lanes import Lanes, start_mailbox
from tune.lanes.messages import Event, new_ticket
from tune.ray_internals import without_tags
from tune.report.words import duration, in_words, labels
from tune.search import ray_search
from tune.search.finalists import repeats_to_run
from tune.sweeps.plan import SweepPlan
from tune.sweeps.progress import Pace, Progress
from tune.sweeps.spec import Interrupted, SweepSpec, num_missing, save
from tune.sweeps.steered import Steered
from tune.sweeps.trial import LaneTrial
from tune.trials.journal import Journal, trial_id
from tune.trials.record import TrialRecord, make_record

logger = logging.getLogger(__name__)

# that a trial which the search has stopped may take to notice, or a lane to come up
_QUIET_S = 60.0
_LOOK_S = 0.5
_SAY_AFTER_S = 2.0
_ACTORS = 4
"""That Tune starts for one trial at most: its work is on a lane, and goes on without
them.
"""
_LEAST_ROOM_BYTES = 2**20


def run_sweep(
    spec: SweepSpec,
    checked: bool = True,
    facts: dict[str, str] | None = None,
    output: Output | None = None,
    zygote: Zygote | None = None,
) -> list[TrialRecord]:
    """Run every trial that has no record yet; returns the records of all.

    `checked`: after a look at the nodes. `facts` is given what the report must say of
    the sweep itself; `output` is what the user wants to be told; `zygote` is the
    sweep's, where it has been started already.

    Raises ConfigError (the cluster can never hold a trial), ClusterError (nodes are not
    in order), Interrupted when asked to stop, and PacelineError when it is cut off:
    what has ended until then is in the journal.
    """
    logging.getLogger("ray.tune").setLevel(
        logging.ERROR
    )  # it misses the result files that the journal replaces
    with contextlib.closing(zygote or spec.zygote()) as own:
        return _run_sweep(
            spec, _plan(spec, checked, own), facts, output or Output(), own
        )


def _run_sweep(
    spec: SweepSpec,
    plan: SweepPlan,
    facts: dict[str, str] | None,
    output: Output,
    zygote: Zygote,
) -> list[TrialRecord]:
    records = Journal(spec.storage).records()
    kept = {record.id for record in records}
    # Trials without a record, or the repeats of finalists.
    to_run = max(1, num_missing(spec.config, records))
    first_lanes = min(plan.num_lanes, to_run)
    shape = f"{counted(first_lanes, 'lane')} of {counted(plan.train.scaling.max_workers, 'worker')}"
    logger.info(
        "%s: %s trials in %s; the lanes are starting",
        spec.config.name,
        plan.num_trials,
        shape,
    )
    # A grid and a random search come to their old trials again; optuna goes on from
    # them.
    goes_on = spec.config.search == "optuna"
    before = (
        [record for record in records if record.purpose == "trial"] if goes_on else []
    )
    at_a_time = plan.num_at_once if plan.is_independent else plan.num_lanes
    search = ray_search.searcher(
        spec.config, at_a_time, before, int(spec.train.get("seed", 0))
    )
    lanes = _lanes(spec, plan, zygote)
    mailbox = lanes.mailbox
    is_auto = spec.config.lanes == "auto"
    pace = Pace(search, mailbox, plan.num_trials if plan.is_independent else None)

    def grow() -> None:
        """Start further lanes where the cluster has grown."""
        count = min(
            to_run,
            SweepPlan.make(spec, _nodes_up(), nodes_at_most(), plan.use_gpu).num_lanes,
        )
        if count > lanes.count:
            logger.info(
                "the cluster holds %d lanes by now: another %d start",
                count,
                count - lanes.count,
            )
        lanes.grow(count)
        pace.lanes_started(lanes.count)

    progress = Progress(spec, plan, mailbox, pace, grow if is_auto else None, output)
    progress.seen.update({record.id: record.config for record in before})
    progress.records.update({record.id: record for record in records})
    steered = Steered(spec, mailbox, progress)
    progress.steer = steered.look
    try:
        ending = ending_with_cluster(_goes_on(spec), progress.terminal.close)
        with (
            ending,
            progress.heeding_signals(),
            progress.terminal,
            VitalSigns(),
            run_environment(),
        ):
            steered.look()
            lanes.grow(first_lanes)
            began = time.monotonic()
            budget_s = spec.config.time_budget_s
            with sweep_environment(), without_tags():
                _tuner(spec, plan, mailbox, search, progress, len(before)).fit()
            pace.over()

            def is_over_budget() -> bool:
                return time.monotonic() - began >= (budget_s or math.inf)

            while True:
                while steered.has_clones and not is_over_budget():
                    progress.tick()
                    time.sleep(_LOOK_S)
                progress.record_rest(is_over_budget())
                if is_over_budget() or steered.is_extended:
                    break
                with steered.alone():
                    repeats = _run_repeats(spec, plan, lanes, progress)
                progress.records |= repeats
                for name in repeats.keys() - kept:
                    progress.tell(repeats[name])
                if not steered.has_clones:
                    break
            progress.restore_records()
            save(spec)
            if restarts := _restarts(ray.get(mailbox.restarts.remote())):
                progress.terminal.say(f"lanes started again: {restarts}")
                (facts if facts is not None else {})["lane_restarts"] = restarts
        lanes.close()
        ray.kill(
            mailbox
        )  # Tune's copy of its handle would keep it for as long as this process lives
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
        if isinstance(error, Interrupted | ConfigError) or not isinstance(
            cause, Exception
        ):
            raise
        raise PacelineError(f"{_why(cause, spec)}; {_goes_on(spec)}") from error
    names = dict.fromkeys([*progress.seen, *progress.records])
    return [progress.records[name] for name in names if name in progress.records]


def _lanes(spec: SweepSpec, plan: SweepPlan, zygote: Zygote) -> Lanes:
    """Return the lanes of a sweep, none of which has started."""
    mailbox = start_mailbox(spec.storage)
    return Lanes(
        mailbox,
        plan.train.scaling,
        plan.use_gpu,
        zygote.name,
        zygote.preload,
        spec.storage,
        plan.num_at_once,
        is_patient=spec.config.lanes == "auto",
        of_function=spec.is_of_function,
    )


def _restarts(restarts: Sequence[tuple[float, str]]) -> str:
    """What lanes that started again have cost, and why they did; empty where none has."""
    reasons = Counter(
        re.sub(r"\d+", "#", why) for _, why in restarts
    )  # threads and trials are numbered
    shown = "; ".join(f"{why} ({count})" for why, count in reasons.most_common(5))
    times = "once" if len(restarts) == 1 else f"{len(restarts)} times"
    return (
        f"{times}, {duration(sum(time_s for time_s, _ in restarts))}: {shown}"
        if restarts
        else ""
    )


def _goes_on(spec: SweepSpec) -> str:
    """What a sweep that was cut off says last."""
    return f"what has ended is in the journal, and `{spec.resume()}` goes on"


def _why(error: Exception, spec: SweepSpec) -> str:
    """What has cut the sweep off, in a line; of what follows from a full disk or a dead
    actor, that.
    """
    node = own_node()
    places = [node.get_session_dir_path()] if node is not None else []
    for place in [*places, *[spec.storage.path] * spec.storage.is_local]:
        with contextlib.suppress(OSError):
            if shutil.disk_usage(place).free < _LEAST_ROOM_BYTES:
                return f"no space is left on the disk of {place} ({last_line(error)})"
    if isinstance(
        error, ray.exceptions.RayActorError
    ):  # all that the driver itself asks of an actor, it asks of this
        return f"the sweep's mailbox, an actor, has died ({first_line(error)})"
    return (
        last_line(error)
        if isinstance(error, PacelineError)
        else f"{type(error).__name__}: {last_line(error)}"
    )


def _plan(spec: SweepSpec, checked: bool, zygote: Zygote) -> SweepPlan:
    """Connect, check the task and the cluster, and plan the sweep on it."""
    given = spec.train, spec.path, spec.source, spec.uri
    run: Any = FunctionSpec(*given) if spec.is_of_function else RunSpec(*given)
    connect(show_workers=False)
    device_type = check_cluster(run)
    if checked:
        require_sound(spec.uri)
    needs_energy = (
        spec.config.objective.metric == "energy_j" and not spec.is_of_function
    )
    if needs_energy and not energy_is_counted(device_type):
        rule = "cannot be measured: no GPU's driver (NVML) tells it"
        raise ConfigError(
            "objective.metric",
            "energy_j",
            rule,
            "remove it, or run on GPUs that count it",
            spec.source,
        )
    plan = SweepPlan.make(spec, _nodes_up(), nodes_at_most(), device_type == "cuda")
    wrong = _wrong(run, plan, device_type, zygote)
    if wrong is not None:
        raise wrong
    return plan


def _wrong(
    run: Any, plan: SweepPlan, device_type: str, zygote: Zygote
) -> PacelineError | None:
    """What is wrong with the task, or the function, on the cluster: asked of a process
    that has imported torch.
    """
    try:
        fork = zygote.fork("tune.forks.task:check", run, plan.precisions, device_type)
        found: PacelineError | None = fork.serve(None)
    except (NoOutcomeError, TimeoutError) as error:
        return PacelineError(f"what {run.source} names cannot be imported: {error}")
    return found


def _nodes_up() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _driver_node() -> str:
    """The resource of the driver's own node: a trial's actor there does not go with a
    node that comes and goes.
    """
    [own] = [
        node
        for node in ray.nodes()
        if node["NodeID"] == ray.get_runtime_context().get_node_id()
    ]
    names = ("node:__internal_head__", f"node:{own['NodeManagerAddress']}")
    return next(name for name in names if name in own["Resources"])


def _tuner(
    spec: SweepSpec,
    plan: SweepPlan,
    mailbox: Any,
    search: Any,
    progress: Progress,
    num_before: int,
) -> tune.Tuner:
    config = spec.config
    objective = spec.config.objective
    trainable = tune.with_resources(
        tune.with_parameters(
            LaneTrial,
            mailbox=mailbox,
            sweep=spec.storage,
            train=spec.train,
            objective=objective.model_dump(),
            usd_per_hour=plan.lane_usd_per_hour,
        ),
        {
            _driver_node(): 1e-4
        },  # Tune refuses a trial without resources; this one takes nothing from the lanes
    )
    scheduler: TrialScheduler | None = None
    if config.ends_beaten:
        scheduler = ray_search.BeatenScheduler(
            objective, progress.records, progress.reasons
        )
    if config.scheduler == "asha":
        scheduler = AsyncHyperBandScheduler(
            metric="objective", mode=objective.direction, max_t=10_000
        )
    return tune.Tuner(
        trainable,
        param_space=ray_search.tune_space(config),
        tune_config=tune.TuneConfig(
            num_samples=ray_search.num_samples(config, num_before),
            search_alg=search,
            scheduler=scheduler,
            reuse_actors=True,
            time_budget_s=config.time_budget_s,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=spec.uri,
            verbose=0,
            # it says nothing; a notebook's clears the cell before that
            progress_reporter=tune.CLIReporter(),
            callbacks=[progress],
            checkpoint_config=tune.CheckpointConfig(
                checkpoint_at_end=False
            ),  # it would be an empty one
            failure_config=tune.FailureConfig(max_failures=_ACTORS - 1),
        ),
    )


def _run_repeats(
    spec: SweepSpec, plan: SweepPlan, lanes: Lanes, progress: Progress
) -> dict[str, TrialRecord]:
    """Run the repeats that have no record yet, until the order of the first is decided,
    cannot be, or their time is used up; returns the records of all, by id.
    """
    journal = Journal(spec.storage)
    records = journal.records()
    ended = {record.id: record for record in records if record.purpose == "repeat"}
    wanted = repeats_to_run(spec.config, spec.train, records)
    if not wanted:
        return ended
    names = labels(spec.config, records)
    say = progress.terminal.say
    num_finalists = len({finalist.id for finalist, _ in wanted})
    say(
        f"the {num_finalists} finalists again, alone and in turn, until it is clear which is first"
    )
    _await_quiet(lanes, progress)
    while wanted:
        finalist, seed = wanted[0]
        record = _repeat(spec, plan, lanes.mailbox, finalist, seed, progress)
        journal.append(record)
        records.append(record)
        ended[record.id] = record
        reached = (
            "not reached"
            if record.time_to_target_s is None
            else f"reached in {record.time_to_target_s:.3g} s"
        )
        say(
            f"repeat {len(ended)}  {in_words(names, finalist)}  seed {seed}  {record.status}  {reached}"
        )
        wanted = repeats_to_run(spec.config, spec.train, records)
    return ended


def _await_quiet(lanes: Lanes, progress: Progress) -> None:
    """Wait until no lane works, nor starts, which takes as much of the machine as a
    trial; for a minute at most.
    """
    began = time.monotonic()
    is_said = False
    while (waited_s := time.monotonic() - began) < _QUIET_S:
        busy = [*lanes.settle(), *ray.get(lanes.mailbox.watch.remote())["running"]]
        if not busy:
            return
        if waited_s > _SAY_AFTER_S and not is_said:
            is_said = True
            progress.terminal.say(
                f"waiting until lanes {busy} are quiet, {_QUIET_S:.0f} s at most"
            )
        progress.tick()
        time.sleep(_LOOK_S)


def _repeat(
    spec: SweepSpec,
    plan: SweepPlan,
    mailbox: Any,
    finalist: TrialRecord,
    seed: int,
    progress: Progress,
) -> TrialRecord:
    """Have a lane run one repeat to its end."""
    trial = trial_id(finalist.config, "repeat", seed)
    tree = override(TrainConfig, spec.train, {**finalist.config, "seed": seed})
    objective = spec.config.objective
    started = time.time()
    repeat = Assignment(
        new_ticket(trial), trial, tree, target=objective.goal, watches=objective.watched
    )
    ticket = ray.get(mailbox.submit.remote(repeat))
    curve: list[dict[str, float]] = []
    event = _next_event(mailbox, ticket, 0, progress)
    while event.outcome is None:
        curve.append(event.row)
        event = _next_event(mailbox, ticket, len(curve), progress)
    mailbox.forget.remote(ticket)
    price = plan.lane_usd_per_hour
    return make_record(
        trial,
        finalist.config,
        objective,
        started,
        curve,
        event.outcome,
        price,
        "repeat",
        seed,
    )


def _next_event(mailbox: Any, ticket: str, index: int, progress: Progress) -> Event:
    reference = mailbox.next_event.remote(ticket, index)
    while not ray.wait([reference], timeout=_LOOK_S)[0]:
        progress.tick()
    event: Event = ray.get(reference)
    return event


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
