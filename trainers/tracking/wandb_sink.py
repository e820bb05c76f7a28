"""Weights & Biases, online or offline as WANDB_MODE says; whatever else wandb reads from the environment counts too."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np  # noqa: F401  (before wandb, which else leaves a stand-in for it to the threads of other trackers)
import wandb
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from trainers.storage import Storage
from trainers.tracking.sink import Row, Sink, TrackedRun

_HEAD, _BLOCK = 7, 32768
"""Bytes of the head of a file and of each piece of a record, and of a block, over whose end no head goes."""
_LAST_PIECES = (1, 4)  # of a record in one piece, and in several


class WandbSink(Sink):
    """Trials are of the job type `trial` in one group with their sweep: W&B has no runs below runs."""

    def __init__(self, project: str | None, storage: Storage) -> None:
        super().__init__(project, storage)
        # What it would measure is this process and its machine, not the run's.
        self._settings = wandb.Settings(
            console="off", silent=True, save_code=False, disable_git=True, x_disable_stats=True, x_disable_meta=True
        )
        self._runs: dict[str, Any] = {}

    def start(self, run: TrackedRun) -> str:
        """The run's own id is W&B's, which goes on with it where it knows it."""
        group = run.parent if run.kind == "trial" else run.id if run.kind == "sweep" else None
        self._runs[run.id] = wandb.init(
            project=self.project,
            name=run.name,
            id=run.id,
            resume="allow",
            group=group,
            job_type=run.kind,
            config={**run.params, **{f"paceline/{key}": value for key, value in run.tags.items()}},
            allow_val_change=True,
            settings=self._settings,
            reinit="create_new",
        )
        return run.id

    def last_steps(self, run: str) -> dict[str, int] | None:
        """By the server, or the files of earlier offline runs: what wandb took, and had not written, is gone with it.

        None where no file is here: another host may have it.
        """
        opened = self._runs[run]
        if opened.disabled:
            return None
        if not opened.offline:
            last = opened.step - 1  # of all metrics: W&B takes no row of an earlier step
            return dict.fromkeys(opened.summary.keys(), last) if opened.resumed else {}
        settings = opened.settings
        files = {*Path(settings.wandb_dir).glob(f"offline-run-*-{run}/run-{run}.wandb")} - {Path(settings.sync_file)}
        found: dict[str, int] = {}
        for file in files:
            for values in written(file):
                found |= {name: max(int(values["_step"]), found.get(name, -1)) for name in values}
        return found if files else None

    def log(self, run: str, rows: Sequence[Row]) -> None:
        """A row of W&B's history for each step. What a killed process loses of them, `last_steps` tells the next."""
        for row in rows:
            self._runs[run].log({**row.values, "_timestamp": row.time_s}, step=row.step)

    def artifact(self, run: str, file: Path) -> None:
        """An artifact of the run, whose versions W&B keeps."""
        artifact = wandb.Artifact(f"{run}-{file.name}", type="paceline")
        artifact.add_file(str(file))
        self._runs[run].log_artifact(artifact)

    def end(self, run: str, status: str, tags: dict[str, str]) -> None:
        """Finished, or failed where the status is that of a failure."""
        ended = self._runs.pop(run)
        told = {"paceline/status": status} | {f"paceline/{key}": value for key, value in tags.items()}
        ended.config.update(told, allow_val_change=True)
        ended.finish(exit_code=0 if status in ("done", "stopped") else 1)

    def close(self) -> None:
        """End wandb's own process, with what it still has to send."""
        wandb.teardown()


def written(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of the history in an offline run's file, as far as it was written."""
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def records(file: Path) -> Iterator[Record]:
    """What an offline run's file holds, whose last record may not be whole: W&B's head, then LevelDB's log format."""
    data, place, whole = file.read_bytes(), _HEAD, b""
    while place + _HEAD <= len(data):
        if (left := _BLOCK - place % _BLOCK) < _HEAD:  # padding
            place += left
            continue
        length, kind = struct.unpack_from("<4xHB", data, place)
        start, place = place + _HEAD, place + _HEAD + length
        if place > len(data):
            return
        whole += data[start:place]
        if kind in _LAST_PIECES:
            yield Record.FromString(whole)
            whole = b""
