"""A trial's driver, in its own process (Ray).

A driver is a function that makes a TorchTrainer and calls `fit`. The trials'
actors and the lanes' workers import this file, so it must not import torch:
the import takes seconds, and only the forks, which already have torch, need it.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.pool import (  # type: ignore[attr-defined] # (no stubs)
    ExceptionWithTraceback,
    RemoteTraceback,
)
from numbers import Number
from typing import Any

import ray
import ray.train
from ray import cloudpickle
from ray.tune.result import DEFAULT_METRIC

from trainers.config.model import Tree
from trainers.on_ray.internals import without_cleaner
from tune.forks.child import Channel, TrialStopped, make_absolute
from tune.forks.client import Zygote
from tune.lanes.controller import NoGroup
from tune.ray._controller import (
    Answers,
    LaneController,
    own_place,
    reports_of_trial,
    stops,
)
from tune.ray_internals import (
    DataParallelTrainer,
    DatasetsCallback,
    get_session,
    set_session,
)


class DriverSession:
    """Tune's session in a driver's process; forwards calls to the trial's actor."""

    def __init__(self, channel: Channel) -> None:
        self.ask = channel.call

    def __getattr__(self, name: str) -> Any:
        return self.ask("attribute", name)

    def report(self, metrics: Tree, checkpoint: Any = None) -> None:
        """Report through the session of the trial's actor."""
        make_absolute(checkpoint)
        self.ask("report", metrics, checkpoint=checkpoint)

    def _get_or_create_inter_actor_queue(self) -> Any:
        return Reports()


class Reports:
    """Placeholder that unpickles as the report queue of the trial's actor."""

    def __reduce__(self) -> tuple[Any, ...]:
        return reports_of_trial, ()


def run_driver(channel: Channel, driver: bytes, config: bytes) -> Any:
    """Call a pickled driver; return whether it failed, and its result or exception.

    The exception arrives with the driver's traceback as its cause, because
    pickling it drops its own.
    """
    from trainers.on_ray.internals import read_token_again
    from tune.forks.function import as_new_process, picklable, unpickled

    as_new_process([])
    read_token_again()  # the zygote may be older than Ray's token
    session = DriverSession(channel)
    set_session(session)
    try:
        returned = unpickled(driver)(unpickled(config))
        if inspect.isgenerator(returned):
            _report_all(session, returned)
            returned = None
        # A value that cannot be pickled counts as the driver's error.
        cloudpickle.dumps(returned)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        failure = picklable(error)
        # Ray's thread would take these exceptions for an end without an error.
        if isinstance(error, SystemExit | StopIteration):
            words = f"the driver raised {type(error).__name__}: {error}"
            failure = RuntimeError(words)
        return (True, ExceptionWithTraceback(failure, error.__traceback__))
    return (False, returned)


def _report_all(session: DriverSession, yielded: Iterable[Any]) -> None:
    """Report what a driver yields, as Ray does: mappings or single numbers."""
    for value in yielded:
        metrics = (
            {DEFAULT_METRIC: value} if isinstance(value, Number) else value
        )
        if value:
            session.report(metrics)


class Asked:
    """What the driver's process can call in its trial's actor."""

    def __init__(self, pool: Any, zygote: str) -> None:
        self._pool = pool
        self._zygote = zygote

    def fit(
        self, function: bytes, given: Tree, backend: str, timeout_s: float
    ) -> Any:
        """Train on the workers of a lane, and return Ray's result.

        Args:
            function: The pickled training function with its configuration: a
                callable without arguments.
            given: The other arguments of the TorchTrainer.
            backend: Backend of the ranks' process group.
            timeout_s: How long a rank waits for the others in a collective.
        """
        forked = ForkedFunction(function, self._zygote, backend, timeout_s)
        if validation := given["validation_config"]:
            # Not within the trial's placement group, which has no CPU.
            validation.ray_remote_kwargs.setdefault(
                "scheduling_strategy", "DEFAULT"
            )
        trainer = _InLane(forked, backend_config=NoGroup(backend), **given)
        trainer.pool = self._pool
        return trainer.fit()

    def attribute(self, name: str) -> Any:
        """Return an attribute of Tune's session."""
        return getattr(get_session(), name)

    def report(self, metrics: Tree, checkpoint: Any) -> None:
        """Report to Tune.

        Raises:
            TrialStopped: The search has stopped or paused the trial.
        """
        found = get_session()
        assert found is not None
        try:
            found.report(metrics, checkpoint=checkpoint)
        except SystemExit:
            raise TrialStopped(0) from None


class _InLane(DataParallelTrainer):
    """Ray's TorchTrainer without torch, in a trial's actor, on the workers of a lane."""

    pool: Any

    def _initialize_and_run_controller(self, **given: Any) -> Any:
        # The pool takes back a dead trial's lane, and a trial without datasets
        # needs no actor for them.
        needless = () if self.datasets else (DatasetsCallback,)
        given["callbacks"] = without_cleaner(given["callbacks"], *needless)
        return LaneController(self.pool, **given).fit()


@dataclass(frozen=True)
class ForkedFunction:
    """A training function that runs in a fork of its node's zygote.

    While it runs, the worker that called it answers the fork's calls.
    """

    function: bytes
    zygote: str
    backend: str
    timeout_s: float

    def __call__(self) -> Any:
        """Run the function in a fork; called by Ray in each worker."""
        place, files = own_place(self.backend, self.timeout_s)
        context = ray.train.get_context()
        fork = Zygote.of_functions(self.zygote).fork(
            "tune.forks.function:run_function",
            self.function,
            place,
            [str(gpu) for gpu in ray.get_gpu_ids()],
            context.get_experiment_name(),
            context.get_storage(),
            files=[file.fileno() for file in files],
        )
        try:
            outcome = fork.serve(Answers(), lambda: not stops(), look_s=0.1)
        except (InterruptedError, TrialStopped):
            return None
        finally:
            for file in files:
                file.close()
        if "raised" in outcome:
            raise outcome["raised"] from RemoteTraceback(outcome["traceback"])
        return outcome.get("returned")
