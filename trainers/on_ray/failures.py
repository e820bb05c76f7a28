"""Whether a failed worker group starts again: decided in Ray's controller."""

import logging
import re
from collections import Counter
from typing import Any

from ray.train import UserCallback

from trainers.causes import failure_of
from trainers.config.sections import FailureConfig
from trainers.errors import POLICIES, RunFailedError, Status
from trainers.loop.watchdog import read_hang, saved_hangs
from trainers.on_ray.internals import CONTROLLER_LOGGER, FAILURE_LOGGER
from trainers.storage import Storage

logger = logging.getLogger(__name__)


class FailurePolicy(UserCallback):
    """Gives each kind of failure its own budget of restarts.

    Ray itself is told to retry for ever (`max_failures=-1`); an exception raised here
    ends the run.
    """

    def __init__(self, budgets: FailureConfig, storage: Storage) -> None:
        self._budgets = budgets
        self._met: Counter[str] = Counter()
        self._storage = storage
        self._hangs = saved_hangs(storage)

    def after_exception(
        self, run_context: Any, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Called by Ray with the exception of each failed rank.

        Raises:
            RunFailedError: no budget is left for the kind of failure.
        """
        cause = RunFailedError.first(
            [as_failure(rank, error) for rank, error in worker_exceptions.items()]
        )
        before = self._hangs
        self._hangs = saved_hangs(self._storage)
        new = [
            read_hang(self._storage, name) for name in self._hangs if name not in before
        ]
        if new and (
            cause.status in ("node_lost", "hung") or cause.follows
        ):  # a watchdog's exit is a death to Ray
            cause = RunFailedError.first(new)
        self._met[cause.status] += 1
        budget = 0 if cause.config else budget_of(self._budgets, cause.status)
        if cause.smaller:  # sizes halve: this ends by itself
            budget = -1
        # Ray's own words are tracebacks of its controller, and what ranks raised as it
        # was, secrets too.
        logging.getLogger(FAILURE_LOGGER).setLevel(logging.CRITICAL)
        if budget != -1 and self._met[cause.status] > budget:
            logging.getLogger(CONTROLLER_LOGGER).setLevel(logging.CRITICAL)
            raise cause
        restart = f"restart {self._met[cause.status]} of {'no limit' if budget == -1 else budget}"
        failed = f"worker group failed as {cause.status} ({cause.message})"
        logger.warning("%s; %s from the newest checkpoint", failed, restart)


def budget_of(budgets: FailureConfig, status: Status) -> int:
    """How often a run starts again after a kind of failure; -1: without limit."""
    budget: int = getattr(budgets, status, POLICIES[status].restarts)
    return budget


def as_failure(rank: int, error: BaseException) -> RunFailedError:
    """Return a rank's exception as ours, freed of the wrappers that Ray puts around it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RunFailedError):
            return seen
        error = seen
        # A worker that died is reported as a failed health check, whose cause Ray keeps
        # in an attribute.
        inner = (
            getattr(seen, "health_check_failure", None)
            or getattr(seen, "cause", None)
            or seen.__cause__
        )
        seen = inner if isinstance(inner, BaseException) and inner is not seen else None
    failure = failure_of(error, rank)
    why = re.search(r"(?:is dead|died) because (.+?)(?:\.|$)", str(error), re.MULTILINE)
    if failure.status not in ("node_lost", "preempted") or why is None:
        return failure
    named = dict(re.findall(r"^\s*(pid|ip): (\S+)$", str(error), re.MULTILINE))
    who = f"rank {rank} (pid {named.get('pid', 'unknown')} on {named.get('ip', 'its node')}) died"
    # Ray learns of a process that its connection broke, and not the signal.
    killed = "connection error code" in str(error)
    how = (
        "without an exception: SIGKILL, a crash or os._exit ended its process"
        if killed
        else f"because {why[1]}"
    )
    return RunFailedError(failure.status, f"{who} {how}", failure.when)
