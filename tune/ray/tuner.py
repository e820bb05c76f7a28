"""Ray's Tuner, whose trials share a pool of lanes (Ray)."""

import contextlib
import copy
import inspect
import os
import sys
import time
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Self

import ray
import ray.train
from ray import cloudpickle, tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
)
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Searcher

from trainers.config.model import Tree
from trainers.on_ray.cluster import started_as_ray
from tune.forks.child import TrialStopped
from tune.forks.client import Zygote
from tune.lanes.controller import beside_driver
from tune.ray._controller import is_stopped, report_in_process
from tune.ray._driver import Asked
from tune.ray._pool import Pool
from tune.ray_internals import without_tags

_LOOK_S = 0.5
_HOLD_S = 60.0
"""The longest that an ended trial waits for others to begin."""
_WAIT_S = 0.02
_END_S = "60"
"""How many seconds Tune waits for the end of a stopped trial.

Tune gives the stopped trial's actor to the next trial, and fails the next trial
if the stopped one takes longer to end. Tune's default of 2 s may be too short
on a busy machine.
"""
_PAYS = 4.0
"""More lanes start only if the remaining trials take this many times a lane's
start.

A start slows the running trials; twice as many lanes then halve the remaining
time.
"""
_PAUSES_NONE = FIFOScheduler, AsyncHyperBandScheduler, MedianStoppingRule
"""Schedulers that work even if only one trial runs at a time.

Subclasses of them (PBT, HyperBand) compare trials that run at the same time.
"""
_TOKEN: dict[str, float] = {"cpu": 0, "memory": 1}
"""Resources of a trial's actor, which only waits for a lane; Tune requires some."""


def in_lanes(driver: Callable[[Tree], Any], pool: str) -> Any:
    """Return a trainable for Tune: it runs a driver in a fork, and trainers in lanes.

    Args:
        driver: The function that makes a trainer and calls `fit`.
        pool: The name of the pool of lanes, and of the zygotes.
    """
    packed = _Packed(driver)

    def run(config: Tree) -> Any:
        lanes: Any = ray.get_actor(pool)
        actor = str(ray.get_runtime_context().get_actor_id())
        # If the driver calls Ray, its process joins this cluster.
        os.environ.setdefault(
            "RAY_ADDRESS", ray.get_runtime_context().gcs_address
        )
        os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", _END_S)
        report_in_process()
        sys.unraisablehook = without_exits
        ray.get(lanes.enter.remote(actor))
        try:
            fork = Zygote.of_functions(pool).fork(
                "tune.ray._driver:run_driver",
                packed,
                cloudpickle.dumps(config),
            )
            has_failed, returned = fork.serve(
                Asked(lanes, pool), lambda: not is_stopped(), look_s=0.1
            )
        # Tune would report a returned value, but takes no more reports of this
        # trial.
        except (
            TrialStopped,
            InterruptedError,
        ):
            raise TrialStopped(0) from None
        except BaseException:
            _wait_for_others(lanes, actor)
            raise
        _wait_for_others(lanes, actor)
        if has_failed:
            raise returned
        return returned

    run.__name__ = getattr(driver, "__name__", run.__name__)
    run.__qualname__ = getattr(driver, "__qualname__", run.__qualname__)
    return tune.with_resources(run, _TOKEN)


class _Packed:
    """A driver, which Tune pickles late, and as bytes: only forks unpickle it."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (cloudpickle.dumps(self._driver),)


def without_exits(unraisable: Any) -> None:
    """Ignore an exit that Python cannot raise.

    Ray ends a trial's actor by a SIGTERM, whose SystemExit may be raised
    during garbage collection.
    """
    if not isinstance(unraisable.exc_value, SystemExit):
        sys.__unraisablehook__(unraisable)


def _wait_for_others(pool: Any, actor: str) -> None:
    """Delay the end of a trial whose driver has ended until enough drivers are running."""
    deadline = time.monotonic() + _HOLD_S
    while not ray.get(pool.may_leave.remote(actor)):
        if is_stopped() or time.monotonic() > deadline:
            return
        time.sleep(_WAIT_S)


def _new_name() -> str:
    return f"paceline-lanes-{uuid.uuid4().hex[:12]}"


class Tuner(tune.Tuner):
    """Replaces `ray.tune.Tuner`: the same arguments, the same ResultGrid.

    A function without a TorchTrainer runs as Ray runs it.
    """

    def __init__(
        self,
        trainable: Any = None,
        *,
        param_space: dict[str, Any] | None = None,
        tune_config: tune.TuneConfig | None = None,
        run_config: tune.RunConfig | None = None,
        **given: Any,
    ) -> None:
        self._driver: Any = None
        self.restarts: list[str] = []
        """Why lanes had to start again."""
        if makes_trainer(trainable):
            tune_config = copy.copy(tune_config) or tune.TuneConfig()
            run_config = copy.copy(run_config) or tune.RunConfig()
            tune_config.reuse_actors = True
            pool = _new_name()
            self._drive(trainable, pool, tune_config, run_config)
            trainable = in_lanes(trainable, pool)
        super().__init__(
            trainable,
            param_space=param_space,
            tune_config=tune_config,
            run_config=run_config,
            **given,
        )

    def _drive(
        self, driver: Any, pool: str, tune_config: Any, run_config: Any
    ) -> None:
        """Set up this tuner to run a driver's trials in the lanes of a pool."""
        self._driver = driver
        self._pool_name = pool
        pace = _Pace(pool)
        pace.limit(tune_config)
        run_config.callbacks = [*(run_config.callbacks or []), pace]

    @classmethod
    def restore(
        cls, path: str, trainable: Any, *more: Any, **given: Any
    ) -> Self:
        """Continue the trials of a sweep that was cut off, as Ray's `restore` does."""
        drives = makes_trainer(trainable)
        pool = _new_name()
        driver = trainable
        if drives:
            trainable = in_lanes(driver, pool)
        internal: Any = tune.Tuner.restore(
            path, trainable, *more, **given
        )._local_tuner
        restored = cls(_tuner_internal=internal)
        if drives:
            restored._drive(
                driver, pool, internal._tune_config, internal._run_config
            )
        return restored

    def fit(self) -> tune.ResultGrid:
        """Run the trials as Ray's `fit` does, then end the lanes."""
        if self._driver is None:
            return super().fit()
        with (
            contextlib.closing(Zygote.of_functions(self._pool_name)),
            started_as_ray(),
        ):
            return self._fit()

    def _fit(self) -> tune.ResultGrid:
        sweep = str(self._local_tuner.get_run_config().name)  # type: ignore[union-attr]
        options = beside_driver()
        actor: Any = ray.remote(Pool).options(name=self._pool_name, **options)
        pool = actor.remote(self._pool_name, sweep)
        try:
            with without_tags():
                return super().fit()
        finally:
            self.restarts = ray.get(pool.close.remote())
            ray.kill(pool)


class _Pace(tune.Callback):
    """Raises the number of trials that run at a time as lanes come up.

    Starting a trial's process costs as much as starting a lane.
    """

    def __init__(self, pool: str) -> None:
        self._pool_name = pool
        self._search: Any = None
        self._most = 0
        self._num_samples = 0
        self._looked = time.monotonic()
        self._first_ended = self._looked

    def __reduce__(self) -> tuple[Any, ...]:
        # Tune pickles its callbacks; for this one, it gets one that does nothing.
        return (tune.Callback, ())

    def limit(self, config: tune.TuneConfig) -> None:
        """Control how many trials run at a time, unless the scheduler compares them."""
        if type(config.scheduler or FIFOScheduler()) not in _PAUSES_NONE:
            return
        search: Any = config.search_alg or BasicVariantGenerator()
        most = int(
            config.max_concurrent_trials
            or getattr(search, "max_concurrent", None)
            or 0
        )
        if isinstance(search, Searcher) and not isinstance(
            search, ConcurrencyLimiter
        ):
            search = ConcurrencyLimiter(search, max_concurrent=1)
        if not hasattr(search, "max_concurrent"):
            return
        # Stored in the search, which a restored sweep loads.
        self._most = search.most_at_once = getattr(
            search, "most_at_once", most
        )
        search.max_concurrent = 1
        config.search_alg = search
        config.max_concurrent_trials = None
        self._search = search
        self._num_samples = (
            sys.maxsize if config.num_samples == -1 else config.num_samples
        )

    def on_step_begin(
        self, iteration: int, trials: list[Any], **info: Any
    ) -> None:
        """Allow more trials at a time if that pays; called by Tune in its loop."""
        now = time.monotonic()
        has_begun = any(trial.status != Trial.PENDING for trial in trials)
        # The pool may still be starting, and Tune's loop would wait for it.
        if (
            self._search is None
            or not has_begun
            or now - self._looked < _LOOK_S
        ):
            return
        self._looked = now
        pool: Any = ray.get_actor(self._pool_name)
        state = ray.get(pool.state.remote())
        count = self._search.max_concurrent
        ended = sum(trial.is_finished() for trial in trials)
        if not ended:
            self._first_ended = now
        # The first trials start new processes, so their duration means nothing
        # until as much time has passed as a lane takes to start.
        if (
            state["up"] < count
            or min(state["serving_s"], state["last_up_s"]) < state["start_s"]
        ):
            return
        # The first trial is the slowest, and the others' time is not known
        # yet.
        left_s = state["serving_s"]
        if ended > 1:
            left_s = (
                (self._total() - ended)
                * (now - self._first_ended)
                / (ended - 1)
            )
        more = min(2 * count, self._most or state["most"], state["most"])
        if more > count and left_s >= _PAYS * state["start_s"]:
            self._search.max_concurrent = more
            self._expect(len(trials))

    def on_trial_start(
        self, iteration: int, trials: list[Any], trial: Any, **info: Any
    ) -> None:
        """Update what the pool expects; called by Tune when a trial has its actor."""
        if self._search is not None and self._search.max_concurrent > 1:
            self._expect(len(trials))

    def _total(self) -> int:
        """Return how many trials there will be."""
        return int(
            getattr(self._search, "total_samples", 0) or self._num_samples
        )

    def _expect(self, num_trials: int) -> None:
        """Tell the pool to hold trials' ends back while more trials are to come."""
        pool: Any = ray.get_actor(self._pool_name)
        pool.expect.remote(
            self._search.max_concurrent if num_trials < self._total() else 0
        )


def makes_trainer(driver: Any) -> bool:
    """Return whether a trial's function, or one that it uses, refers to a TorchTrainer.

    If not, the function needs no lane: it trains in the trial's own process.
    """
    pending = [driver]
    seen = set[int]()
    while pending:
        found: Any = inspect.unwrap(pending.pop())
        function = getattr(found, "func", found)  # of a partial
        if isinstance(function, type) and function.__name__ == "TorchTrainer":
            return True
        code = getattr(function, "__code__", None)
        outside = getattr(function, "__globals__", {})
        if not isinstance(code, types.CodeType) or id(function) in seen:
            continue
        seen.add(id(function))
        names = set(_names(code))
        if "TorchTrainer" in names:
            return True
        used = [outside[name] for name in names & outside.keys()]
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # it is empty
                used.append(cell.cell_contents)
        for module in filter(inspect.ismodule, list(used)):
            # Not by `getattr`, because some modules import what they are asked
            # for.
            used += [vars(module).get(name) for name in names]
        pending += filter(callable, used)
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield all names that a code object and the functions inside it use."""
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
