"""Sends a training run to its trackers.

`python -m trainers.tracking.run` is the process that trainers/tracking/process.py
starts.
"""

from __future__ import annotations

import logging

from trainers.launch.run_directory import open_run
from trainers.launch.spec import MARK
from trainers.lease import fenced, held
from trainers.tracking.delivery import Delivery
from trainers.tracking.history import KILLED, RunHistory
from trainers.tracking.process import serve
from trainers.tracking.sinks import check_trackers

logger = logging.getLogger(__name__)


def send_run(location: str) -> bool:
    """Send what a run's trackers have not got; return whether all have everything.

    The run must not be training.

    Raises ConfigError where there is no run, or a process trains it.
    """
    storage, config = open_run(location)
    path = [config.task_dir] if config.task_dir else []
    check_trackers(config.trackers, path, storage.locate(MARK))
    if not config.trackers:
        logger.info("tracking: the configuration names no tracker")
    has_all = True
    with held(storage, MARK) as token:
        for tracker in config.trackers:
            delivery = Delivery(tracker, path, fenced(storage, MARK, token), RunHistory)
            delivery.end("done" if storage.exists("result.json") else KILLED)
            delivery.follow()
            if delivery.is_over:
                logger.info("tracking: %s has everything", tracker.tracker)
            has_all = has_all and delivery.is_over
    return has_all


if __name__ == "__main__":
    serve(MARK, RunHistory)
