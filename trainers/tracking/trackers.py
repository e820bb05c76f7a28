"""The trackers by name: whether each can be used here, and its sink."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Sequence

from trainers.config.tracking import PACKAGES, TrackerConfig
from trainers.errors import ConfigError
from trainers.launch.find_task import add_to_path, load_named
from trainers.storage import Storage
from trainers.tracking.sink import Sink

_SINKS = {
    "mlflow": "trainers.tracking.mlflow_sink:MlflowSink",
    "wandb": "trainers.tracking.wandb_sink:WandbSink",
    "trackio": "trainers.tracking.trackio_sink:TrackioSink",
    "tensorboard": "trainers.tracking.file_sinks:EventsSink",
    "csv": "trainers.tracking.file_sinks:CsvSink",
}
_IMPORTS = threading.Lock()
"""Clients are imported one at a time: two threads in circular imports may each see half of a module."""


def check_trackers(trackers: Sequence[TrackerConfig], path: Sequence[str], source: str) -> None:
    """Raise ConfigError where a tracker's package is not installed, or a sink of the user's own cannot be used.

    `path` has the directories of the user's modules.
    """
    for one in trackers:
        if one.tracker not in PACKAGES:
            add_to_path(list(path))
            _own_sink(one.tracker, source)
        elif (package := PACKAGES[one.tracker]) and importlib.util.find_spec(package) is None:
            rule, fix = f"needs the package {package}, which is not here", f"`pip install 'paceline[{one.tracker}]'`"
            raise ConfigError("tracking", one.tracker, rule, fix, source)


def make_sink(tracker: TrackerConfig, path: Sequence[str], storage: Storage) -> Sink:
    """Import and construct a tracker's sink."""
    with _IMPORTS:
        sink = _sink(tracker.tracker, path)
    return sink(tracker.project, storage)


def _sink(named: str, path: Sequence[str]) -> type[Sink]:
    if named in _SINKS:
        module, _, name = _SINKS[named].partition(":")
        own: type[Sink] = getattr(importlib.import_module(module), name)
        return own
    add_to_path(list(path))
    return _own_sink(named, "tracking")


def _own_sink(named: str, source: str) -> type[Sink]:
    found = load_named("tracking", named, "class", source)
    if not (isinstance(found, type) and issubclass(found, Sink)):
        raise ConfigError("tracking", named, "is no trainers.tracking.sink.Sink", "derive the class from Sink", source)
    return found
