"""The loop's context in a worker of a Ray TorchTrainer, and its metrics (Ray)."""

import math
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint, CheckpointUploadMode
from ray.util.metrics import Gauge

from trainers.context import RunContext
from trainers.on_ray.gpus import own_gpu
from trainers.on_ray.internals import is_leaving, kv_delete, kv_exists, kv_put
from trainers.storage import Storage

PREEMPTION_POLL_S = 2.0
"""Seconds between two looks for a drained node; each is a small collective of Ray's
own.
"""
REPORT_EVERY_S = 20.0
"""Seconds between two reports to Ray's controller; each blocks for up to its polling
interval of 0.5 s.
"""

FIGURES: dict[str, tuple[str, ...]] = {
    "samples_per_s": ("run",),
    "step_time_s": ("run",),
    "loss": ("run",),
    "mfu": ("run",),
    "data_wait_share": ("run", "rank"),
    "gpu_memory_bytes": ("run", "rank"),
}
"""What Prometheus gets of a run, and the tags of each; without the rank, rank 0 sends
it.
"""


class WorkerContext(RunContext):
    """RunContext of a worker of a Ray TorchTrainer: its place, as Ray knows it."""

    def __init__(self, storage: Storage | None, launcher: str) -> None:
        worker = ray.train.get_context()
        of_all = worker.get_world_rank(), worker.get_world_size()
        of_node = worker.get_local_rank(), worker.get_local_world_size()
        super().__init__(storage, launcher, *of_all, *of_node, own_gpu())
        self._asked_s = -math.inf

    def preempted(self, elapsed_s: float) -> bool:
        """Whether Ray knows that a node of the group will be drained.

        All ranks ask, every two seconds.
        """
        if elapsed_s - self._asked_s < PREEMPTION_POLL_S:
            return False
        self._asked_s = elapsed_s
        return is_leaving()


class RayContext(WorkerContext):
    """RunContext of a run on Ray: hears of stops and drained nodes from Ray."""

    def __init__(self, storage: Storage | None) -> None:
        super().__init__(storage, "ray")
        self._told_s = -math.inf
        self._untold: tuple[dict[str, Any], str | None] | None = None
        self._gauges = Gauges(storage.name, self.rank) if storage else None

    def report(
        self, metrics: dict[str, Any], checkpoint: str | None, elapsed_s: float
    ) -> None:
        """Give Ray the metrics, and a reference to a checkpoint that is on storage.

        Not more often than every 20 s, because Ray's report waits for its controller's
        next look; `flush` gives the last.
        """
        known = self._untold[1] if self._untold else None
        self._untold = (metrics, checkpoint or known)
        if elapsed_s - self._told_s >= REPORT_EVERY_S:
            self._told_s = elapsed_s
            self.flush()

    def flush(self) -> None:
        """Tell Ray what it has not been told. Every rank calls it."""
        if self._untold is None:
            return
        (metrics, checkpoint), self._untold = self._untold, None
        reference = None
        if checkpoint is not None and self.rank == 0:
            where = Storage(checkpoint)
            reference = Checkpoint(where.path, filesystem=where.filesystem)
        ray.train.report(
            metrics,
            checkpoint=reference,
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )

    def observe(self, figures: dict[str, float]) -> None:
        """To Ray's metrics, which Prometheus reads."""
        if self._gauges is not None:
            from trainers.devices.device import (
                with_gpu_memory,
            )  # the workers of lanes do without torch

            self._gauges.set(with_gpu_memory(figures))

    def should_stop(self, elapsed_s: float) -> bool:
        """Whether the driver was asked to stop (Ctrl-C, `ray job stop`).

        Rank 0 looks for all.
        """
        if self.rank != 0 or self.storage is None:
            return False
        return bool(kv_exists(_stop_key(self.storage)))


class Gauges:
    """The newest figures of one worker as Ray metrics.

    Prometheus gets them as `ray_paceline_...`, named as in metrics.csv.
    """

    def __init__(self, run: str, rank: int) -> None:
        self.run = run
        self._rank = str(rank)
        self._names = {
            name: keys for name, keys in FIGURES.items() if rank == 0 or "rank" in keys
        }
        self._known: dict[str, Gauge] = {}

    def set(self, figures: dict[str, float]) -> None:
        """Set those of the figures that Prometheus gets."""
        for name in figures.keys() & self._names.keys():
            keys = self._names[name]
            if name not in self._known:
                self._known[name] = Gauge(f"paceline_{name}", tag_keys=keys)
            tags = {"run": self.run, "rank": self._rank}
            self._known[name].set(figures[name], {key: tags[key] for key in keys})


def _stop_key(storage: Storage) -> bytes:
    return f"paceline-stop {storage.uri}".encode()


def request_stop(storage: Storage, wanted: bool) -> None:
    """Ask the workers of the run in this directory to stop, or withdraw it."""
    if wanted:
        kv_put(_stop_key(storage), b"1", overwrite=True)
    else:
        kv_delete(_stop_key(storage))
