"""Run a sweep: its lanes, Ray Tune's Tuner on them, and user actions (Ray)."""

import logging
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import TrialScheduler

from cluster.health.check import require_sound
from trainers.errors import (
    ConfigError,
    LeaseError,
    PacelineError,
    StorageError,
    counted,
    first_line,
    last_line,
)
from trainers.launch.spec import FunctionSpec, RunSpec
from trainers.on_ray.capacity import nodes_at_most
from trainers.on_ray.cluster import check_cluster, connect
from trainers.on_ray.environment import (
    run_environment,
    sweep_environment,
    task_environment,
)
from trainers.on_ray.internals import own_node
from trainers.on_ray.vital_signs import VitalSigns, ending_with_cluster
from trainers.output import Output
from tune.forks.client import NoOutcomeError, Zygote
from tune.lanes.lanes import Lanes, start_mailbox
from tune.ray_internals import without_tags
from tune.search import ray_search
from tune.search.finalists import contenders, repeats_to_run
from tune.search.space import open_trials
from tune.sweeps._progress import Pace, Progress
from tune.sweeps._trial import LaneTrial
from tune.sweeps.plan import SweepPlan
from tune.sweeps.spec import Interrupted, SweepSpec, num_missing
from tune.trials.journal import Journal
from tune.trials.record import TrialRecord, trial_id
from tune.trials.steering import Action, Actions, Steering

logger = logging.getLogger(__name__)

_QUIET_TIMEOUT_S = 60.0
"""How long to wait until stopped trials have ended, and starting lanes are up."""
_LOOK_S = 0.5
_SOON_S = 0.1
_MAX_ACTORS = 4
"""Actors that Tune may start for a trial; the trial's lane continues without them."""
_LEAST_ROOM_BYTES = 2**20


class Steered:
    """Reads the actions of users, carries them out, and remembers their effect."""

    def __init__(
        self, spec: SweepSpec, mailbox: Any, progress: Progress
    ) -> None:
        self._spec = spec
        self._mailbox = mailbox
        self._progress = progress
        self._actions = Actions(spec.storage)
        self._journal = Journal(spec.storage)
        known = self._actions.read()
        self._actions.news()  # dropped: an earlier start has logged these
        if known.paused:
            words = "paused by hand: lanes take no trial until `python -m tune steer %s go-on`"
            logger.info(words, spec.uri)
        self._steering = Steering(extension=known.extension)
        self._begun: set[str] = set()
        self._is_alone = False
        self.is_extended = False
        """Whether the sweep was extended: it continues with another
        configuration once its trials have ended.
        """

    @property
    def has_clones(self) -> bool:
        """Whether clones are running or about to start."""
        return bool(
            self._progress.extras or self._steering.clones.keys() - self._begun
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Start no clones inside the block."""
        self._is_alone = True
        yield
        self._is_alone = False

    def look(self) -> None:
        """Carry out new actions, and record the clones and repeats that have ended."""
        steering = self._steering
        with suppress(StorageError):
            steering = self._actions.read()
        if steering != self._steering:
            self._do(steering)
        for action in self._actions.news():
            logger.info("by hand: %s", action)
        if not self._is_alone:
            for name in sorted(steering.clones.keys() - self._begun):
                self._begin(name, steering.clones[name])
        for name in list(self._progress.extras):
            self._progress.has_ended(name)

    def _do(self, steering: Steering) -> None:
        """Pass new actions to the mailbox; submit trials that should run first."""
        before = self._steering
        self._steering = steering
        ray.get(self._mailbox.steer.remote(steering))
        for trial in open_trials(self._spec.config, self._journal.records()):
            name = trial_id(trial)
            if name in steering.first and name not in before.first:
                self._progress.hurry(trial)
        self.is_extended = (
            self.is_extended or steering.extension != before.extension
        )

    def _begin(self, name: str, clone: Action) -> None:
        """Submit a clone, unless it has a record already."""
        self._begun.add(name)
        known = self._journal.find(name)
        if known is not None:
            self._progress.count_clone(known)
            return
        source = None
        states = self._spec.storage.child("states", clone.trial)
        has_ended = self._journal.find(clone.trial) is not None
        if clone.goes_on and has_ended and states.exists():
            source = states
        self._progress.add(clone.keys, "clone", source=source)


def run_sweep(
    spec: SweepSpec,
    checked: bool = True,
    output: Output | None = None,
    zygote: Zygote | None = None,
) -> list[TrialRecord]:
    """Run every trial that has no record yet.

    Args:
        spec: The sweep, whose directory is ready.
        checked: Whether to check the nodes first.
        output: How to report to the user.
        zygote: The sweep's zygote, if it has been started already.

    Returns:
        The records of all trials.

    Raises:
        ConfigError: The cluster can never hold a trial.
        ClusterError: The check of the nodes found errors.
        Interrupted: The sweep was asked to stop.
        PacelineError: The sweep was cut off; trials that had ended are in the
            journal.
    """
    # Tune warns that result files are missing, which the journal replaces.
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    # The mailbox reports why a lane restarts.
    logging.getLogger("ray.train").setLevel(logging.CRITICAL)
    with closing(zygote or spec.zygote()) as own:
        run = _Run(spec, _plan(spec, checked, own), own, output or Output())
        run.to_end()
    return run.records()


class Budget:
    """How long a sweep may take, from this object's creation on."""

    def __init__(self, budget_s: float) -> None:
        """`budget_s` may be infinite."""
        self._deadline = time.monotonic() + budget_s
        self._wall_deadline = time.time() + budget_s

    @property
    def is_used_up(self) -> bool:
        """Whether either clock has passed its deadline.

        Ray Tune ends a sweep by the wall clock, which may be set, and which
        continues while the machine is suspended; the monotonic clock does not.
        """
        return (
            time.monotonic() >= self._deadline
            or time.time() >= self._wall_deadline
        )


class _Run:
    """One start of a sweep: its lanes, and the trials that run on them."""

    def __init__(
        self, spec: SweepSpec, plan: SweepPlan, zygote: Zygote, output: Output
    ) -> None:
        self._spec = spec
        self._plan = plan
        records = Journal(spec.storage).records()
        # An earlier start may have had another price, or other lanes. Without
        # a price, dollars are a training function's own.
        if plan.lane_usd_per_hour is not None:
            records = Journal(spec.storage).price(plan.lane_usd_per_hour)
        # If only repeats of finalists are left, they need one lane.
        self._num_to_run = max(1, num_missing(spec.config, records))
        self._budget = Budget(math.inf)
        # Searches that do not learn propose their old trials again.
        self._before: list[TrialRecord] = []
        if spec.config.learns:
            self._before = [
                record for record in records if record.purpose == "trial"
            ]
        at_a_time = plan.num_at_once if plan.is_independent else plan.num_lanes
        self._search = ray_search.searcher(
            spec.config,
            at_a_time,
            self._before,
            int(spec.train.get("seed", 0)),
        )
        self._lanes = _lanes(spec, plan, zygote)
        self._mailbox = self._lanes.mailbox
        num_trials = plan.num_trials if plan.is_independent else None
        self._pace = Pace(self._search, self._mailbox, num_trials)
        grow = self._grow if spec.config.lanes == "auto" else None
        self._progress = Progress(
            spec, plan, self._mailbox, self._pace, grow, output
        )
        for record in self._before:
            self._progress.seen[record.id] = record.config
        self._progress.records.update(
            {record.id: record for record in records}
        )
        self._steered = Steered(spec, self._mailbox, self._progress)
        self._progress.steer = self._steered.look

    def records(self) -> list[TrialRecord]:
        """Return the records of all trials, in the order in which they were seen."""
        known = self._progress.records
        names = dict.fromkeys([*self._progress.seen, *known])
        return [known[name] for name in names if name in known]

    def to_end(self) -> None:
        """Run the search, then clones and repeats."""
        try:
            self._with_signals()
            self._lanes.close()
            # Tune holds a copy of the handle, which would keep the actor alive
            # as long as this process.
            ray.kill(self._mailbox)
            Journal(self._spec.storage).tidy()
        except BaseException as error:
            self._cut_off()
            reason = self._reason(error)
            if reason is error:
                raise
            raise reason from error

    def _with_signals(self) -> None:
        ending = ending_with_cluster(
            _goes_on(self._spec), self._progress.terminal.close
        )
        of_function = self._spec.is_of_function
        with (
            ending,
            self._progress.heeding_signals(),
            self._progress.terminal,
            VitalSigns(),
            run_environment(),
            sweep_environment(),
            nullcontext() if of_function else task_environment(),
        ):
            self._run_search()

    def _run_search(self) -> None:
        num_lanes = min(self._plan.num_lanes, self._num_to_run)
        workers = counted(self._plan.train.scaling.max_workers, "worker")
        logger.info(
            "%s: %s in %s of %s; the lanes are starting",
            self._spec.config.name,
            counted(self._plan.num_trials, "trial"),
            counted(num_lanes, "lane"),
            workers,
        )
        self._steered.look()
        self._lanes.grow(num_lanes)
        self._budget = Budget(self._spec.config.time_budget_s or math.inf)
        with without_tags():
            self._tuner().fit()
        self._pace.over()
        while True:
            while self._steered.has_clones and not self._budget.is_used_up:
                self._progress.tick()
                time.sleep(_LOOK_S)
            is_over_budget = self._budget.is_used_up
            self._progress.record_rest(is_over_budget)
            if is_over_budget:
                logger.info("the sweep ends here: the budget is used up")
            if is_over_budget or self._steered.is_extended:
                return
            with self._steered.alone():
                self._run_repeats()
            if not self._steered.has_clones:
                return

    def _grow(self) -> None:
        """Start further lanes if the cluster has grown."""
        plan = SweepPlan.make(
            self._spec, _nodes_up(), nodes_at_most(), self._plan.use_gpu
        )
        count = min(self._num_to_run, plan.num_lanes)
        more = count - self._lanes.count
        if more > 0:
            words = "the cluster now holds %d lanes: %d more start"
            logger.info(words, count, more)
        self._lanes.grow(count)
        self._pace.lanes_started(self._lanes.count)

    def _cut_off(self) -> None:
        """End the lanes and the mailbox."""
        self._lanes.end()
        with suppress(ray.exceptions.RayError):
            ray.kill(self._mailbox)

    def _reason(self, error: BaseException) -> BaseException:
        """Return the exception to raise for an error that has cut the sweep off."""
        cause = self._progress.failure or error
        if isinstance(cause, LeaseError):
            return cause
        if isinstance(error, Interrupted | ConfigError):
            return error
        if not isinstance(cause, Exception):
            return error
        return PacelineError(
            f"{_why(cause, self._spec)}; {_goes_on(self._spec)}"
        )

    def _tuner(self) -> tune.Tuner:
        config = self._spec.config
        trainable = tune.with_parameters(
            LaneTrial,
            mailbox=self._mailbox,
            sweep=self._spec.storage,
            train=self._spec.train,
            objective=config.objective.model_dump(),
            usd_per_hour=self._plan.lane_usd_per_hour,
        )
        # Tune refuses a trial without resources; this resource takes nothing
        # from the lanes.
        trainable = tune.with_resources(trainable, {_driver_node(): 1e-4})
        return tune.Tuner(
            trainable,
            param_space=ray_search.tune_space(config),
            tune_config=tune.TuneConfig(
                num_samples=ray_search.num_samples(config, len(self._before)),
                search_alg=self._search,
                scheduler=self._scheduler(),
                reuse_actors=True,
                time_budget_s=config.time_budget_s,
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=self._spec.uri,
                verbose=0,
                # This reporter prints nothing. The default one in a notebook
                # would still clear the cell.
                progress_reporter=tune.CLIReporter(),
                callbacks=[self._progress],
                # The checkpoint would be empty.
                checkpoint_config=tune.CheckpointConfig(
                    checkpoint_at_end=False
                ),
                failure_config=tune.FailureConfig(
                    max_failures=_MAX_ACTORS - 1
                ),
            ),
        )

    def _scheduler(self) -> TrialScheduler | None:
        config = self._spec.config
        if config.scheduler == "asha":
            price = self._plan.lane_usd_per_hour
            return ray_search.AshaScheduler(
                config.objective, self._progress.records, price
            )
        if config.ends_beaten:
            return ray_search.BeatenScheduler(
                config.objective,
                self._progress.records,
                self._progress.reasons,
            )
        return None

    def _run_repeats(self) -> None:
        """Run the repeats of finalists that have no record yet.

        They end when the race is decided or cannot be decided, or when the
        time for repeats or the sweep's budget is used up.
        """
        wanted = self._wanted_repeats()
        if wanted:
            race = contenders(self._spec.config, self.records())
            words = "the %d finalists run again, one at a time, until the fastest is clear or the time for repeats is used up"
            logger.info(words, len(race))
            self._await_quiet()
        while wanted:
            finalist, seed = wanted[0]
            name = self._progress.add(finalist.config, "repeat", seed)
            while not self._progress.has_ended(name):
                if self._budget.is_used_up:
                    logger.info("repeats end here: the budget is used up")
                    return
                self._progress.tick()
                time.sleep(_SOON_S)
            wanted = self._wanted_repeats()

    def _wanted_repeats(self) -> list[tuple[TrialRecord, int]]:
        """Return the finalist and the seed of each repeat that is due."""
        records = Journal(self._spec.storage).records()
        return repeats_to_run(self._spec.config, self._spec.train, records)

    def _await_quiet(self) -> None:
        """Wait, for a minute at most, until no lane is running a trial or starting.

        A lane that is starting loads the machine as much as a trial does.
        """
        deadline = time.monotonic() + _QUIET_TIMEOUT_S
        while time.monotonic() < deadline:
            running = ray.get(self._mailbox.watch.remote())["running"]
            if not self._lanes.settle() and not running:
                return
            self._progress.tick()
            time.sleep(_LOOK_S)


def _lanes(spec: SweepSpec, plan: SweepPlan, zygote: Zygote) -> Lanes:
    """Return the lanes of a sweep, with its mailbox; none is started yet."""
    return Lanes(
        start_mailbox(spec.storage),
        plan.train.scaling,
        plan.use_gpu,
        zygote.name,
        zygote.preload,
        spec.storage,
        plan.num_at_once,
        is_patient=spec.config.lanes == "auto",
        of_function=spec.is_of_function,
    )


def _goes_on(spec: SweepSpec) -> str:
    """Return words on how to continue a sweep that was cut off."""
    return f"trials that have ended are kept, and `{spec.resume()}` continues the sweep"


def _why(error: Exception, spec: SweepSpec) -> str:
    """Return the cause in one line: a full disk, a dead mailbox, or else `error`."""
    places = [spec.storage.path] if spec.storage.is_local else []
    node = own_node()
    if node is not None:
        places.insert(0, node.get_session_dir_path())
    for place in places:
        with suppress(OSError):
            if shutil.disk_usage(place).free < _LEAST_ROOM_BYTES:
                return f"no space is left on the disk of {place} ({last_line(error)})"
    # The driver itself calls no other actor.
    if isinstance(error, ray.exceptions.RayActorError):
        return f"the sweep's mailbox, an actor, has died ({first_line(error)})"
    if isinstance(error, PacelineError):
        return last_line(error)
    return f"{type(error).__name__}: {last_line(error)}"


def _plan(spec: SweepSpec, checked: bool, zygote: Zygote) -> SweepPlan:
    """Connect to the cluster, check it and the task, and plan the sweep."""
    kind: Any = FunctionSpec if spec.is_of_function else RunSpec
    run = kind(spec.train, spec.path, spec.source, spec.uri)
    connect(show_workers=False)
    device_type = check_cluster(run)
    if checked:
        require_sound(spec.uri)
    plan = SweepPlan.make(
        spec, _nodes_up(), nodes_at_most(), device_type == "cuda"
    )
    wrong = _wrong(run, plan, device_type, zygote)
    if wrong is not None:
        raise wrong
    return plan


def _wrong(
    run: Any, plan: SweepPlan, device_type: str, zygote: Zygote
) -> PacelineError | None:
    """Return the error that the task or function raises on this cluster, or None.

    The check runs in a fork of the zygote, which has imported torch already.
    """
    try:
        fork = zygote.fork(
            "tune.forks.task:check", run, plan.precisions, device_type
        )
        found: PacelineError | None = fork.serve(None)
    except (NoOutcomeError, TimeoutError) as error:
        return PacelineError(
            f"the task or function of {run.source} could not be loaded: {error}"
        )
    return found


def _nodes_up() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _driver_node() -> str:
    """Return Ray's resource name of the driver's node, which outlives the sweep."""
    node_id = ray.get_runtime_context().get_node_id()
    [own] = [node for node in ray.nodes() if node["NodeID"] == node_id]
    head = "node:__internal_head__"
    return (
        head
        if head in own["Resources"]
        else f"node:{own['NodeManagerAddress']}"
    )


def environment() -> dict[str, str]:
    """Return the versions and nodes that the figures depend on."""
    import torch

    from trainers.versions import environment as worker_environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    totals = ray.cluster_resources()
    return worker_environment(device) | {
        "nodes": str(len(_nodes_up())),
        "cluster_cpus": f"{totals.get('CPU', 0):g}",
        "cluster_gpus": f"{totals.get('GPU', 0):g}",
    }
