"""MLflow: a database or a tracking server, whichever MLFLOW_TRACKING_URI names.

Environment read: MLFLOW_EXPERIMENT_NAME and MLFLOW_EXPERIMENT_ID, where the configuration names no experiment; whatever
MLflow's client reads. Set, unless it is: MLFLOW_HTTP_REQUEST_TIMEOUT, MLFLOW_HTTP_REQUEST_MAX_RETRIES.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import mlflow
from mlflow.entities import Metric, Param

from trainers.storage import Storage
from trainers.tracking.sink import Row, Sink, TrackedRun

T = TypeVar("T")
_ID = "paceline.id"
_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""Of one request, by MLflow's REST API."""
_LONGEST = 6000
"""Characters of a value, by the same."""
_ENDS = {"done": "FINISHED", "stopped": "KILLED", "killed": "KILLED"}


class MlflowSink(Sink):
    """Trials are nested runs of their sweep."""

    def __init__(self, project: str | None, storage: Storage) -> None:
        super().__init__(project, storage)
        # Its own patience is minutes; what failed is tried again by whoever calls.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._client: Any = mlflow.MlflowClient()

    def _experiment(self) -> str:
        name = self.project or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if name is None:
            return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def start(self, run: TrackedRun) -> str:
        """Find the run by a tag that it was made with, or make it."""
        experiment = self._experiment()
        there = self._client.search_runs([experiment], f"tags.`{_ID}` = '{run.id}'", max_results=1)
        if there:
            found = there[0]
            self._client.update_run(found.info.run_id, status="RUNNING")
        else:
            parent = {} if run.parent is None else {"mlflow.parentRunId": run.parent}
            commit = {"mlflow.source.git.commit": run.tags["git_commit"]} if "git_commit" in run.tags else {}
            tags = {_ID: run.id, "paceline.kind": run.kind, **parent, **commit, **_tags(run.tags)}
            found = self._client.create_run(experiment, tags=tags, run_name=run.name)
        # Those of a run never change in MLflow: a resume adds what is new.
        params = [Param(_name(key), str(value)[:_LONGEST]) for key, value in run.params.items()]
        for some in _chunks([one for one in params if one.key not in found.data.params], _MOST_PARAMS):
            self._client.log_batch(found.info.run_id, params=some)
        return str(found.info.run_id)

    def last_steps(self, run: str) -> dict[str, int]:
        """By the newest value of each metric, which MLflow keeps with its step."""
        return {metric.key: metric.step for metric in self._client.get_run(run).data.to_proto().metrics}

    def metric(self, name: str) -> str:
        """The name with `_` for what MLflow does not take."""
        return _name(name)

    def log(self, run: str, rows: Sequence[Row]) -> None:
        """Every value is one metric at its step."""
        metrics = [
            Metric(name, value, round(row.time_s * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for some in _chunks(metrics, _MOST_METRICS):
            self._client.log_batch(run, metrics=some)

    def artifact(self, run: str, file: Path) -> None:
        """An artifact of the run."""
        self._client.log_artifact(run, str(file))

    def end(self, run: str, status: str, tags: dict[str, str]) -> None:
        """FINISHED, KILLED where the same command would go on, else FAILED; the status itself is a tag."""
        for key, value in (_tags(tags) | {"paceline.status": status}).items():
            self._client.set_tag(run, key, value)
        self._client.set_terminated(run, _ENDS.get(status, "FAILED"))


def _name(name: str) -> str:
    """The name as MLflow takes it."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def _tags(tags: dict[str, str]) -> dict[str, str]:
    return {f"paceline.{_name(key)}": value[:_LONGEST] for key, value in tags.items()}


def _chunks(values: Sequence[T], most: int) -> Iterator[list[T]]:
    rest = iter(values)
    while some := list(islice(rest, most)):
        yield some
