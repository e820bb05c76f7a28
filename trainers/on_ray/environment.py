"""What Ray reads from the environment at import. The user's own settings are never overridden.

RAY_TRAIN_ENABLE_STATE_TRACKING         runs are visible in the dashboard
RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S  how long a placement may pend before the size of the group is chosen anew
RAY_TRAIN_HEALTH_CHECK_INTERVAL_S       a run's end is noticed sooner than after 2 s
RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S a worker that was stopped is noticed sooner than after 600 s
RAY_USAGE_STATS_ENABLED                 nothing is sent anywhere
on a cluster that RAY_ADDRESS names:
RAY_TRAIN_ENABLE_PREEMPTION_WATCHER     set explicitly: Ray hands it to the run's controller, whose process has no
                                        RAY_ADDRESS and would switch it off
and, for an embedded cluster (no RAY_ADDRESS):
RAY_AUTH_MODE                           token, as Ray's own default for a new cluster, without its warning
RAY_TRAIN_ENABLE_PREEMPTION_WATCHER     an embedded node is never drained: one actor less for each worker group
PYTHONWARNINGS                          hides a warning of Ray 2.60 about its own code
RAY_WARN_BLOCKING_GET_INSIDE_ASYNC      hides another, as Ray's `fit` does for its controller
and, while a sweep runs, which is when Tune reads it (a Tuner of the user's is as Ray has it):
RAY_AIR_NEW_OUTPUT                      the terminal is Paceline's, not Tune's
TUNE_DISABLE_AUTO_CALLBACK_LOGGERS, TUNE_DISABLE_STRICT_METRIC_CHECKING
                                        the journal is the record; a failed trial has no metric
TUNE_DISABLE_SIGINT_HANDLER             Ctrl-C is Paceline's too
TUNE_PRINT_ALL_TRIAL_ERRORS             and so are its sentences
"""

import contextlib
import os
from collections.abc import Iterator

_ALWAYS = {
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "180",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_CLUSTER = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1"}
_EMBEDDED = {
    "RAY_AUTH_MODE": "token",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "PYTHONWARNINGS": "ignore:`ExecutionOptions.exclude_resources`",
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
}
_SWEEP = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}


def embedded() -> bool:
    """Whether the cluster is one that this process starts on this machine, and ends with it."""
    return os.environ.get("RAY_ADDRESS", "") in ("", "local")


def set_environment() -> None:
    """Set what the user has not set."""
    for name, value in (_ALWAYS | (_EMBEDDED if embedded() else _CLUSTER)).items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def sweep_environment() -> Iterator[None]:
    """In a block in which Tune runs a sweep of ours, set what the user has not set."""
    added = {name: value for name, value in _SWEEP.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
