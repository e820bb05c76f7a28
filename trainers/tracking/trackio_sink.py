"""trackio: its own database (TRACKIO_DIR), or a server or Space that its environment variables name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trackio

from trainers.storage import Storage
from trainers.tracking.sink import Row, Sink, TrackedRun


class TrackioSink(Sink):
    """Trials are in one group with their sweep. trackio knows a run by its name, which so ends with part of the id."""

    def __init__(self, project: str | None, storage: Storage) -> None:
        super().__init__(project, storage)
        self._runs: dict[str, TrackedRun] = {}

    def start(self, run: TrackedRun) -> str:
        """It is there with its first row."""
        name = f"{run.name}-{run.id[:8]}"
        self._runs[name] = run
        return name

    def _open(self, name: str) -> Any:
        run = self._runs[name]
        about = {f"paceline.{key}": value for key, value in run.tags.items()}
        return trackio.init(
            project=self.project or "paceline",
            name=name,
            group=run.parent if run.kind == "trial" else name if run.kind == "sweep" else None,
            config={**run.params, **about},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, run: str, rows: Sequence[Row]) -> None:
        """A row for each step; `finish` returns when they are in its database, or in its buffer for a server."""
        opened = self._open(run)
        for row in rows:
            opened.log(row.values, step=row.step)
        trackio.finish()

    def artifact(self, run: str, file: Path) -> None:
        """An artifact, whose versions trackio keeps."""
        self._open(run).log_artifact(file, name=f"{run}-{file.name}", type="paceline")
        trackio.finish()

    def end(self, run: str, status: str, tags: dict[str, str]) -> None:
        """trackio has no status of a run."""
