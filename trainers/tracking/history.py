"""What a run has left on storage so far, as trackers are told of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainers.config.function import flat
from trainers.errors import StorageError
from trainers.launch.spec import MARK, read_mapping
from trainers.measure.run_log import read_part, scalars
from trainers.redaction import redact
from trainers.storage import Storage
from trainers.tracking.sink import Row

KILLED = "killed"
"""How a run has ended whose driver could not say it."""
_OF_RESULT = (
    "epochs",
    "train_time_s",
    "wall_time_s",
    "peak_memory_bytes",
    "first_step_s",
    "mfu",
    "throughput",
)


@dataclass(frozen=True)
class History:
    """One run: what it is, and what there is of it."""

    name: str
    kind: str
    """run, sweep or trial."""
    params: dict[str, str | int | float | bool]
    tags: dict[str, str]
    rows: Sequence[Row] = ()
    """In the order of the log; some may have been there before."""
    key: str = ""
    """Of a trial its id."""
    artifacts: dict[str, bytes] = field(default_factory=dict)
    """Content by file name, once the run has ended."""
    ended: str | None = None
    """How it has ended."""


class Source(Protocol):
    """Where histories come from; each tracker asks one of its own again and again."""

    def poll(self, ended: str | None) -> list[History]:
        """Return what is new, a sweep before its trials; with all rows the first time.

        `ended` is how the driver has ended, None while it has not.
        """


def as_params(tree: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Return a configuration by dotted keys; lists as text, secrets hidden."""
    shown: dict[str, str | int | float | bool] = {}
    for key, value in flat(tree).items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        hidden = redact(f"{key}: {text}").removeprefix(f"{key}: ")
        shown[key] = (
            value if isinstance(value, int | float) and hidden == text else hidden
        )
    return shown


class RunHistory:
    """A training run: parts of the log, and copies of what no part has yet."""

    def __init__(self, run: Storage) -> None:
        self._run = run
        self._read: dict[str, tuple[str, float]] = {}
        """By directory the last file that was read, and when it was written."""

    def poll(self, ended: str | None) -> list[History]:
        """As `Source` has it; nothing until a worker has said what it runs on."""
        if ended is None and not self._run.exists("environment.json"):
            return []
        tree = read_mapping(self._run, MARK)
        tags = {"uri": redact(self._run.uri)}
        if self._run.exists("environment.json"):
            tags |= self._run.read_json("environment.json", dict[str, str])
        rows = self._new("log") + self._new("live")
        artifacts: dict[str, bytes] = {}
        if ended in ("done", "stopped") and self._run.exists("result.json"):
            result = self._run.read_json("result.json", dict[str, Any], finite=False)
            ended = str(result["status"])
            figures = flat(
                {
                    name: result[name]
                    for name in _OF_RESULT
                    if result.get(name) is not None
                }
            )
            values = {
                f"result/{name.replace('.', '/')}": float(value)
                for name, value in figures.items()
            }
            rows.append(Row(int(result["steps"]), self._time("result.json"), values))
            artifacts["result.json"] = self._run.read("result.json")
        return [
            History(
                str(tree["name"]),
                "run",
                as_params(tree),
                tags,
                rows,
                "",
                artifacts,
                ended,
            )
        ]

    def _new(self, directory: str) -> list[Row]:
        """Return the rows of new parts, and of the last one where it has grown."""
        storage = self._run.child(directory)
        rows = []
        for name in storage.names():
            last = self._read.get(directory, ("", 0.0))
            if not name.endswith(".jsonl") or name < last[0]:
                continue
            try:
                written_at = self._time(f"{directory}/{name}")
                if (name, written_at) == last:
                    continue
                records = read_part(storage, name)
            except StorageError:
                if storage.exists(name):
                    raise
                # a copy that has become part of the log, which the next poll reads
                continue
            self._read[directory] = (name, written_at)
            # Records have no time of day; the time between them is that of training.
            end_s = float(records[-1].get("train_time_s", 0.0)) if records else 0.0
            for record in records:
                time_s = written_at - max(
                    0.0, end_s - float(record.get("train_time_s", end_s))
                )
                rows.append(Row(int(record["step"]), time_s, scalars(record)))
        return rows

    def _time(self, name: str) -> float:
        """When a file was written, Unix time, s."""
        info = self._run.filesystem.get_file_info(f"{self._run.path}/{name}")
        return float(info.mtime.timestamp()) if info.mtime is not None else 0.0
