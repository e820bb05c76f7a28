"""Weights & Biases, online or offline as WANDB_MODE says; whatever else wandb reads from the environment counts too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np  # noqa: F401  (before wandb, which else leaves a stand-in for it to the threads of other trackers)
import wandb

from trainers.storage import Storage
from trainers.tracking.sink import Row, Sink, TrackedRun


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

    def log(self, run: str, rows: Sequence[Row]) -> None:
        """A row of W&B's history for each step."""
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
