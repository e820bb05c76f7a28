"""The interface of an experiment tracker (Sink), and sinks for known trackers' clients.

A sink of your own derives from Sink (`tracking: [my_module:MySink]`).

Environment read: MLFLOW_EXPERIMENT_NAME and MLFLOW_EXPERIMENT_ID, if the
configuration names no experiment; also whatever the clients read. Set, unless
already set: MLFLOW_HTTP_REQUEST_TIMEOUT, MLFLOW_HTTP_REQUEST_MAX_RETRIES.
Always set: MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import posixpath
import re
import shutil
import tempfile
import threading
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from trainers.config.model import Tree
from trainers.config.sections import TrackerConfig
from trainers.launch.user_code import add_to_path, load_class
from trainers.measure.run_log import encode_events, events_name
from trainers.storage import Storage
from trainers.versions import require_package

_IMPORTS = threading.Lock()
"""Clients are imported one at a time: two threads in circular imports may each
see half of a module.
"""


Params = dict[str, str | int | float | bool]
Tags = dict[str, str]


class Row(NamedTuple):
    """Metrics of one step."""

    step: int
    time_s: float
    """Unix time."""
    values: dict[str, float]
    """By name; may be NaN or infinite."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run when it starts."""

    id: str
    """Hex digits, the same in every resume and different in every tracker."""
    key: str
    """Empty for a run or a sweep; for a trial its id."""
    name: str
    kind: str
    """run, sweep or trial."""
    params: Params
    """The resolved configuration by dotted keys."""
    tags: Tags
    """Versions, hardware, git commit, and where the run is."""
    parent: str | None = None
    """For a trial, what `start` returned for its sweep."""


class Sink(ABC):
    """One tracker.

    All calls come from one thread, in a process that does no training.

    Any method may raise or block: what it did not accept is sent again, to a
    new instance. So `start` must find a run that it has already started, and a
    repeated step must replace the earlier one.
    """

    keeps_at_end: ClassVar[bool] = False
    """Whether what `log` sent is only stored once `end` has returned. If so,
    it is sent again if the process dies before that.
    """

    def __init__(self, project: str | None, storage: Storage) -> None:
        """Store the configured `project` and the directory of the run or sweep."""
        self.project = project
        self.storage = storage

    @abstractmethod
    def start(self, run: TrackedRun) -> str:
        """Begin or continue the run `run.id`; return the tracker's name for it.

        If the tracker has to begin a new run instead, return a different name.

        Called once in each process for each run that has something to send.
        """

    @abstractmethod
    def log(self, run: str, rows: Sequence[Row]) -> None:
        """Send metrics, in the order of the log."""

    # Not every tracker has the following.

    def artifact(self, run: str, file: Path) -> None:  # noqa: B027
        """Send a file, which replaces an earlier one of the same name."""

    def end(self, run: str, status: str, tags: Tags) -> None:  # noqa: B027
        """End the run with a status of `trainers.errors`, or `killed`."""

    def close(self) -> None:  # noqa: B027
        """Called when nothing more will be sent."""


def _client(name: str) -> Any:
    with _IMPORTS:
        return importlib.import_module(name)


def _make_database(mlflow: Any) -> None:
    """Create MLflow's SQLite database if there is none, completely or not at all.

    MLflow takes seconds to create the database, and this process may be killed
    meanwhile, because the run does not wait for it.
    """
    uri = mlflow.get_tracking_uri()
    if not uri.startswith("sqlite:"):
        return
    named = _client("sqlalchemy").make_url(uri).database
    if named in (None, "", ":memory:") or Path(named).exists():
        return
    path = Path(named)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="paceline-tracking-") as directory:
        new = Path(directory, "mlflow.db")
        mlflow.MlflowClient(f"sqlite:///{new}").search_experiments(
            max_results=1
        )
        beside = path.with_name(f".{path.name}-{os.getpid()}")
        try:
            shutil.copyfile(new, beside)
            # Another process may have made the database meanwhile.
            with contextlib.suppress(FileExistsError):
                os.link(beside, path)
        finally:  # a partial copy, if the disk is full
            beside.unlink(missing_ok=True)


class MlflowSink(Sink):
    """Sends to MLflow; trials are nested runs of their sweep."""

    def __init__(self, project: str | None, storage: Storage) -> None:
        super().__init__(project, storage)
        # MLflow would retry for minutes; the caller repeats what failed.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._mlflow = _client("mlflow")
        _make_database(self._mlflow)
        self._client = self._mlflow.MlflowClient()
        self._entities = _client("mlflow.entities")

    def _experiment(self) -> str:
        name = self.project or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if name is None:
            return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        return str(self._mlflow.set_experiment(name).experiment_id)

    def start(self, run: TrackedRun) -> str:
        """Find the run by the tag it was created with, or create it."""
        experiment = self._experiment()
        known = self._client.search_runs(
            [experiment], f"tags.`paceline.id` = '{run.id}'", max_results=1
        )
        if known:
            found = known[0]
            self._client.update_run(found.info.run_id, status="RUNNING")
        else:
            tags = {"id": run.id, "kind": run.kind, **run.tags}
            tags = self._tags(tags)
            if run.parent is not None:
                tags["mlflow.parentRunId"] = run.parent
            found = self._client.create_run(
                experiment, tags=tags, run_name=run.name
            )
        # A run's parameters never change in MLflow: a resume adds new ones.
        new = []
        names = _accepted(run.params)
        for key, value in run.params.items():
            name = names[key]
            if name not in found.data.params:
                new.append(self._entities.Param(name, str(value)))
        self._client.log_batch(found.info.run_id, params=new)
        return str(found.info.run_id)

    def log(self, run: str, rows: Sequence[Row]) -> None:
        """Send each value as a metric at its row's step."""
        metrics = []
        for row in rows:
            time_ms = round(row.time_s * 1000)
            names = _accepted(row.values)
            for key, value in row.values.items():
                metric = self._entities.Metric(
                    names[key], value, time_ms, row.step
                )
                metrics.append(metric)
        self._client.log_batch(run, metrics=metrics)

    def artifact(self, run: str, file: Path) -> None:
        """Send the file as an artifact of the run."""
        self._client.log_artifact(run, str(file))

    def end(self, run: str, status: str, tags: Tags) -> None:
        """End as FINISHED, KILLED (may be resumed) or FAILED; a tag has our status."""
        tags = self._tags({**tags, "status": status})
        for key, value in tags.items():
            self._client.set_tag(run, key, value)
        ends = {"done": "FINISHED", "stopped": "KILLED", "killed": "KILLED"}
        self._client.set_terminated(run, ends.get(status, "FAILED"))

    def _tags(self, tags: Tags) -> Tags:
        names = _accepted(tags)
        return {f"paceline.{names[key]}": value for key, value in tags.items()}


def _accepted(names: Iterable[str]) -> dict[str, str]:
    """Map each name to one that MLflow accepts; no two of these are equal."""
    accepted = {name: _accepted_name(name) for name in names}
    count = Counter(accepted.values())
    for name, shown in accepted.items():
        if count[shown] > 1 and shown != name:
            digest = zlib.crc32(name.encode(errors="replace"))
            accepted[name] = f"{shown[:240]}-{digest:08x}"
    return accepted


def _accepted_name(name: str) -> str:
    """Return the name with `_` in place of characters that MLflow rejects.

    MLflow also rejects names that are not paths in shortest form, such as
    `a//b` or `a/`; these are shortened.
    """
    named = re.sub(r"[^\w\-. :/]", "_", name)[:250]
    return posixpath.normpath(f"/{named}").strip("/") or "_"


class WandbSink(Sink):
    """Sends to W&B; trials have the job type `trial`, in one group with their sweep.

    W&B has no nested runs. Its client writes in a separate process, which dies
    with this one.
    """

    keeps_at_end = True

    def __init__(self, project: str | None, storage: Storage) -> None:
        super().__init__(project, storage)
        # Before wandb, which would otherwise leave a stand-in for numpy to
        # other trackers' threads.
        _client("numpy")
        self._wandb = _client("wandb")
        # W&B would measure this process and its machine, not the run's.
        self._settings = self._wandb.Settings(
            console="off",
            silent=True,
            save_code=False,
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        self._runs: Tree = {}

    def start(self, run: TrackedRun) -> str:
        """Start a W&B run under our own id; W&B resumes a run that it knows."""
        groups = {"trial": run.parent, "sweep": run.id}
        self._runs[run.id] = self._wandb.init(
            project=self.project,
            name=run.name,
            id=run.id,
            resume="allow",
            group=groups.get(run.kind),
            job_type=run.kind,
            config=run.params | _tags(run.tags),
            allow_val_change=True,
            settings=self._settings,
            reinit="create_new",
        )
        return run.id

    def log(self, run: str, rows: Sequence[Row]) -> None:
        """Send one row of W&B's history per step."""
        for row in rows:
            values = {**row.values, "_timestamp": row.time_s}
            self._runs[run].log(values, step=row.step)

    def artifact(self, run: str, file: Path) -> None:
        """Send the file as an artifact of the run, which W&B versions."""
        artifact = self._wandb.Artifact(f"{run}-{file.name}", type="paceline")
        artifact.add_file(str(file))
        self._runs[run].log_artifact(artifact)

    def end(self, run: str, status: str, tags: Tags) -> None:
        """End as finished, or as failed if the status is a failure."""
        ended = self._runs.pop(run)
        known = _tags({"status": status, **tags})
        ended.config.update(known, allow_val_change=True)
        has_failed = status not in ("done", "stopped")
        ended.finish(exit_code=int(has_failed))

    def close(self) -> None:
        """End wandb's process, after it has sent what is left."""
        self._wandb.teardown()


def _tags(tags: Tags) -> Tree:
    return {f"paceline/{key}": value for key, value in tags.items()}


class EventsSink(Sink):
    """Writes a sweep's `tensorboard/<trial>/`, one directory for each trial."""

    def start(self, run: TrackedRun) -> str:
        """Return the name of the directory; the sweep itself has one, too."""
        return run.key or "sweep"

    def log(self, run: str, rows: Sequence[Row]) -> None:
        """Write one file with all the given rows."""
        records = []
        for row in rows:
            records.append((row.time_s, {"step": row.step, **row.values}))
        directory = self.storage.child("tensorboard", run)
        directory.write(events_name(rows[-1].step), encode_events(records))


_SINKS: Mapping[str, type[Sink]] = {
    "mlflow": MlflowSink,
    "wandb": WandbSink,
    "tensorboard": EventsSink,
}


def check_trackers(
    trackers: Sequence[TrackerConfig], path: Sequence[str], source: str
) -> None:
    """Raise ConfigError if a tracker's package is missing, or a sink is unusable.

    `path` lists the directories of the user's modules.
    """
    for tracker in trackers:
        name = tracker.tracker
        if name not in _SINKS:
            _own_sink(name, path, source)
        elif name != "tensorboard":
            require_package("tracking", name, source)


def make_sink(
    tracker: TrackerConfig, path: Sequence[str], storage: Storage
) -> Sink:
    """Construct a tracker's sink."""
    sink = _SINKS.get(tracker.tracker) or _own_sink(
        tracker.tracker, path, "tracking"
    )
    return sink(tracker.project, storage)


def _own_sink(named: str, path: Sequence[str], source: str) -> type[Sink]:
    with _IMPORTS:
        add_to_path(list(path))
        return load_class("tracking", named, Sink, source)
