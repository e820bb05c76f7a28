"""Whether a failed worker group starts again: decided in Ray's controller, by the kind of failure."""

import logging
import time
from collections import Counter
from typing import Any

from ray.train import UserCallback

from trainers.config.sections import FailureConfig
from trainers.errors import POLICIES, RunFailedError, classify, first_line
from trainers.loop.watchdog import count_hangs
from trainers.storage import Storage

logger = logging.getLogger(__name__)


class FailurePolicy(UserCallback):
    """Gives each kind of failure its own budget of restarts.

    Ray itself is told to retry for ever (`max_failures=-1`); an exception raised here ends the run.
    """

    def __init__(self, budgets: FailureConfig, storage: Storage) -> None:
        self._budgets = budgets.model_dump()
        self._met: Counter[str] = Counter()
        self._storage, self._hangs = storage, count_hangs(storage)

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called by Ray with the exception of each failed rank; raises RunFailedError where no budget is left."""
        cause = RunFailedError.first([as_failure(rank, error) for rank, error in worker_exceptions.items()])
        hangs = count_hangs(self._storage)
        if cause.status == "node_lost" and hangs > self._hangs:
            cause = RunFailedError("hung", f"no step was made; see {self._storage.locate('hangs')}", cause.when)
        self._hangs = hangs
        self._met[cause.status] += 1
        budget = 0 if cause.config else self._budgets.get(cause.status, POLICIES[cause.status].restarts)
        if cause.smaller:  # sizes halve: this ends by itself
            budget = -1
        if budget != -1 and self._met[cause.status] > budget:
            raise cause
        restart = f"restart {self._met[cause.status]} of {'no limit' if budget == -1 else budget}"
        failed = f"worker group failed as {cause.status} ({cause.message})"
        logger.warning("%s; %s from the newest checkpoint", failed, restart)


def as_failure(rank: int, error: BaseException) -> RunFailedError:
    """Return a rank's exception as ours, freed of the wrappers that Ray puts around it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RunFailedError):
            return seen
        error = seen
        # A worker that died is reported as a failed health check, whose cause Ray keeps in an attribute.
        inner = getattr(seen, "health_check_failure", None) or getattr(seen, "cause", None) or seen.__cause__
        seen = inner if isinstance(inner, BaseException) and inner is not seen else None
    return RunFailedError(classify(error), f"rank {rank}: {type(error).__name__}: {first_line(error)}", time.time())
