"""What Ray reads from the environment.

The user's own settings are never overridden, and no import changes any.

while an embedded cluster starts, and later its dashboard, which inherit it:
PYTHONWARNINGS                          hides a warning of Ray 2.60 about its own code
RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER       127.0.0.1 is no other address of this machine,
                                        where nothing listens
RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION
                                        nobody asks the dashboard which controllers are
                                        dead: they end with the cluster
until an embedded cluster ends:
RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH      a token of the cluster's own, where the user has
                                        none: see cluster.py
while an embedded cluster starts, and while Ray Train has a run of ours, or lanes
(others are as Ray has them):
RAY_WARN_BLOCKING_GET_INSIDE_ASYNC      hides another, as Ray's `fit` does for its
                                        controller
RAY_TRAIN_ENABLE_STATE_TRACKING         the run is visible in the dashboard
RAY_TRAIN_ENABLE_PRINT_PATCH            what a worker prints comes once
RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S  how long a placement may pend before the size of
                                        the group is chosen anew
RAY_TRAIN_HEALTH_CHECK_INTERVAL_S       its end is noticed sooner than after 2 s
RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S a worker that was stopped is noticed sooner than
                                        after 600 s
RAY_TRAIN_ENABLE_PREEMPTION_WATCHER     off on an embedded node, which is never drained:
                                        one actor less for each group; else on,
                                        explicitly: the controller's process has no
                                        RAY_ADDRESS
while a task's workers train or do another job (a training function's are as in Ray):
RAY_CHDIR_TO_TRIAL_DIR                  a task's relative paths mean what they mean under
                                        the other launchers
and while a sweep of ours runs:
RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING
                                        lanes' controllers are threads of the driver,
                                        whose loggers are its own
RAY_AIR_NEW_OUTPUT                      the terminal is Paceline's, not Tune's
TUNE_DISABLE_AUTO_CALLBACK_LOGGERS, TUNE_DISABLE_STRICT_METRIC_CHECKING
                                        the journal is the record; a failed trial has no
                                        metric
TUNE_DISABLE_SIGINT_HANDLER             Ctrl-C is Paceline's too
TUNE_PRINT_ALL_TRIAL_ERRORS             and so are its sentences
"""

import contextlib
import os
from collections.abc import Iterator

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


def embedded() -> bool:
    """Whether this process starts the cluster on this machine, and ends it."""
    return os.environ.get("RAY_ADDRESS", "") in ("", "local")


def cluster_environment() -> contextlib.AbstractContextManager[None]:
    """In a block in which an embedded cluster starts, set what the user has not set."""
    return _set_for(_RUN | _EMBEDDED | {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"})


def run_environment() -> contextlib.AbstractContextManager[None]:
    """In a block in which Ray Train has a run of ours, set what the user has not set."""
    return _set_for(
        _RUN | {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0" if embedded() else "1"}
    )


def task_environment() -> contextlib.AbstractContextManager[None]:
    """In a block in which Ray starts a task's workers, set what the user has not set."""
    return _set_for(_TASK)


def sweep_environment() -> contextlib.AbstractContextManager[None]:
    """In a block in which a sweep of ours runs, set what the user has not set."""
    return _set_for(_SWEEP)


@contextlib.contextmanager
def _set_for(values: dict[str, str]) -> Iterator[None]:
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
