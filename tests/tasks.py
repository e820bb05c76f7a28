"""Tasks for the suite: small, without BatchNorm and dropout unless a test asks
for them.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainers.config import sections
from trainers.task import Task

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Blobs(Task):
    """Four noisy clusters in D dimensions; an MLP. Every argument is one thing
    that a test needs to go wrong.

    `fail_at` counts the forward passes of training on one rank, over restarts;
    of several, with `marker`, each fails once, by its own `failure` of a list.
    From `company_from` set-ups on that `pids` notes, training waits for one of
    a second lane: then it notes the file that its standard output goes to.
    """

    def __init__(
        self,
        samples: int = 203,
        features: int = 12,
        dtype: str = "float32",
        fail_at: int | list[int] | None = None,
        failure: str | list[str] = "raise",
        fits: int | None = None,
        marker: str | None = None,
        pids: str | None = None,
        company_from: int | None = None,
        pause_s: float = 0.0,
    ):
        self.samples = samples
        self.features = features
        self.dtype = _DTYPES[dtype]
        self.fail_at = [fail_at] if isinstance(fail_at, int) else fail_at or []
        self.failure = failure
        self.fits = fits
        self.marker = Path(marker) if marker else None
        self.pids = Path(pids) if pids else None
        self.company_from = company_from
        self.forwards = 0
        self.pause_s = pause_s

    def state_dict(self) -> dict[str, Any]:
        """Passes that are thrown away (the probe's, the count's of FLOPs) put
        it back: only training counts.
        """
        return {"forwards": self.forwards}

    def load_state_dict(self, state: dict[str, Any]):
        self.forwards = state["forwards"]

    def setup(self):
        if self.pids is not None:
            with self.pids.open("a") as file:
                file.write(
                    f"{os.getpid() if self.company_from is None else os.fstat(1).st_ino}\n"
                )

    def model(self) -> nn.Module:
        layers = nn.Sequential(
            nn.Linear(self.features, 32), nn.Tanh(), nn.Linear(32, 4)
        )
        return layers.to(self.dtype)

    def dataset(self, split: str) -> TensorDataset:
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        labels = torch.randint(0, 4, (self.samples,), generator=generator)
        centres = torch.randn(
            4,
            self.features,
            generator=torch.Generator().manual_seed(3),
            dtype=self.dtype,
        )
        noise = torch.randn(
            self.samples, self.features, generator=generator, dtype=self.dtype
        )
        return TensorDataset(centres[labels] + noise, labels)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        if (
            self.fits is not None
            and model.training
            and len(batch[0]) > self.fits
        ):
            raise torch.OutOfMemoryError(
                f"injected: {len(batch[0])} samples, {self.fits} fit"
            )
        if model.training:
            time.sleep(self.pause_s)
            while self.company_from is not None and self._is_alone(
                self.company_from
            ):
                time.sleep(0.05)
            self.forwards += 1
            if self.forwards in self.fail_at:
                self._fail()
        return model(batch[0])

    def _is_alone(self, count: int) -> bool:
        """Whether one lane has set up so many tasks, and no other any."""
        found = self.pids.read_text().split()
        return len(found) >= count and len(set(found)) == 1

    def _fail(self):
        failure = self.failure
        if isinstance(failure, list):
            failure = failure[self.fail_at.index(self.forwards)]
        if failure == "oom on rank 1" and os.environ.get("RANK") != "1":
            return
        if self.marker is not None:
            several = len(self.fail_at) > 1
            marker = (
                self.marker.with_name(f"{self.marker.name}-{self.forwards}")
                if several
                else self.marker
            )
            if marker.exists():  # it failed here already
                return
            marker.touch()
        if failure == "raise":
            raise ValueError("injected: the task fails here")
        if failure.startswith("oom"):
            raise torch.OutOfMemoryError(
                "injected: in the middle of training, on one rank"
            )
        if failure == "exit":
            os._exit(3)
        if failure == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if failure == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if failure == "sleep":
            time.sleep(3600)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = F.cross_entropy(outputs, batch[1])
        return (
            loss * float("nan")
            if self.failure == "nan"
            and self.forwards >= min(self.fail_at, default=0)
            else loss
        )

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": outputs.argmax(1) == batch[1]}


class Stuck(Blobs):
    """Fails as `failure` says where the loop calls `place` of the task, on one rank.

    `short_phases` lets phases without batches take no longer than a batch may.
    """

    def __init__(
        self,
        place: str,
        on_rank: int = 0,
        short_phases: bool = False,
        **args: Any,
    ):
        super().__init__(**args)
        if short_phases:
            sections.PHASE_FACTOR = 1
            sections.LEAST_PHASE_S = 0.0
        self.place = place
        self.on_rank = on_rank
        self._reach("import")

    def _reach(self, place: str):
        rank = dist.get_rank() if dist.is_initialized() else 0
        if place == self.place and rank == self.on_rank:
            self._fail()

    def setup(self):
        self._reach("setup")

    def dataset(self, split: str) -> TensorDataset:
        self._reach("dataset")
        return super().dataset(split)

    def model(self) -> nn.Module:
        self._reach("model")
        return super().model()

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        if not model.training:
            self._reach("evaluation")
        self._reach(
            "probe" if self.forwards == 0 else f"training {self.forwards}"
        )
        return super().forward(model, batch)

    def state_dict(self) -> dict[str, Any]:
        if self.forwards >= 5:
            self._reach("checkpoint")
        return super().state_dict()
