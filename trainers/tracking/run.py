"""Sends a training run to its trackers. `python -m trainers.tracking.run` is the process that
trainers/tracking/following.py starts.
"""

from __future__ import annotations

from trainers.launch.run_directory import open_run
from trainers.launch.spec import MARK
from trainers.lease import fenced, held
from trainers.tracking.history import KILLED, RunHistory
from trainers.tracking.sender import send_rest, serve
from trainers.tracking.trackers import check_trackers


def send_run(location: str) -> bool:
    """Send what the trackers of a run, which must not be training, have not got; return whether all have everything.

    Raises ConfigError where there is no run, or a process trains it.
    """
    storage, config = open_run(location)
    source, path = storage.locate(MARK), [config.task_dir] if config.task_dir else []
    check_trackers(config.trackers, path, source)
    with held(storage, MARK) as token:
        ended = "done" if storage.exists("result.json") else KILLED
        return send_rest(config.trackers, path, fenced(storage, MARK, token), RunHistory, ended)


if __name__ == "__main__":
    serve(RunHistory, fenced)
