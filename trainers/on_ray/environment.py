"""What Ray reads from the environment.

The user's settings are never overridden, and no import changes a variable.

While an embedded cluster, or later its dashboard, starts:
  PYTHONWARNINGS: hides a warning of Ray 2.60 about its own code.
  RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER: 127.0.0.1 is not replaced by another
    address of this machine, where nothing listens.
  RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION: nobody asks the dashboard which
    controllers are dead, since they end with the cluster.

Until an embedded cluster ends:
  RAY_AUTH_MODE: the cluster asks for a token; see cluster.py.
  RAY_AUTH_TOKEN_PATH: where the cluster's own token is, if the user has none.

While an embedded cluster starts, and while Ray Train is running lanes or one
of our runs:
  RAY_WARN_BLOCKING_GET_INSIDE_ASYNC: hides a warning about blocking calls, as
    Ray's `fit` does for its controller.
  RAY_TRAIN_ENABLE_STATE_TRACKING: the run is visible in the dashboard.
  RAY_TRAIN_ENABLE_PRINT_PATCH: what a worker prints appears once.
  RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S: how long a placement may be pending
    before the size of the group is chosen again.
  RAY_TRAIN_HEALTH_CHECK_INTERVAL_S: the run's end is noticed sooner than
    after 2 s.
  RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S: a stopped worker is noticed sooner
    than after 600 s.
  RAY_TRAIN_ENABLE_PREEMPTION_WATCHER: off on an embedded node, which is never
    drained, to save an actor per group; otherwise explicitly on, because the
    controller's process has no RAY_ADDRESS.

While a task's workers, but not a training function's, train or do another job:
  RAY_CHDIR_TO_TRIAL_DIR: a task's relative paths mean the same as under the
    other launchers.

While a sweep of ours runs:
  RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING: lanes' controllers are
    threads of the driver, which has its own loggers.
  RAY_AIR_NEW_OUTPUT: the terminal is Paceline's, not Tune's.
  TUNE_DISABLE_AUTO_CALLBACK_LOGGERS: Paceline's journal is the record.
  TUNE_DISABLE_STRICT_METRIC_CHECKING: a failed trial has no metric.
  TUNE_DISABLE_SIGINT_HANDLER: Paceline handles Ctrl-C.
  TUNE_PRINT_ALL_TRIAL_ERRORS: Paceline reports errors.
"""

import contextlib
import os
from collections.abc import Iterator

from trainers.launch.process import embedded

_EMBEDDED = {
    "PYTHONWARNINGS": "ignore:`ExecutionOptions.exclude_resources`",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",
}
_RUN = {
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "180",
}
_TASK = {"RAY_CHDIR_TO_TRIAL_DIR": "0"}
_SWEEP = {
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}


def cluster_environment() -> contextlib.AbstractContextManager[None]:
    """For a block that starts an embedded cluster, set variables that are not set yet."""
    return _set_for(
        _RUN | _EMBEDDED | {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
    )


def run_environment() -> contextlib.AbstractContextManager[None]:
    """For a block that uses Ray Train, set variables that are not set yet."""
    return _set_for(
        _RUN
        | {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0" if embedded() else "1"}
    )


def task_environment() -> contextlib.AbstractContextManager[None]:
    """For a block that starts a task's workers, set variables that are not set yet."""
    return _set_for(_TASK)


def sweep_environment() -> contextlib.AbstractContextManager[None]:
    """For a block that runs a sweep, set variables that are not set yet."""
    return _set_for(_SWEEP)


@contextlib.contextmanager
def _set_for(values: dict[str, str]) -> Iterator[None]:
    added = {
        name: value for name, value in values.items() if name not in os.environ
    }
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
