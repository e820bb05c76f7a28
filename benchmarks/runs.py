"""Runs of Paceline's own loop, for benchmarks to measure.

Each run trains an example's train.yaml, with changes, for a given time.

A run is a call of `fit` in this process: without a launcher, Ray, storage,
regular evaluations or checkpoints. The data and the initial weights of a workload
are made once, and each run starts from a copy of the weights. All data is
synthetic, in the real shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import logging
import os
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainers.config import TrainConfig
from trainers.config.model import build, override
from trainers.config.yaml import parse_mapping
from trainers.devices.device import synchronize
from trainers.launch.local import LocalContext
from trainers.launch.user_code import load_task
from trainers.loop.fit import fit
from trainers.measure.clock import WARMUP_STEPS
from trainers.measure.result import RunResult
from trainers.model.precision import TABLE, apply_matmul

EXAMPLES = Path(__file__).parents[1] / "examples"
_ENDLESS = 10**6
_SAMPLES = 5
# fmt: off
_SAME: dict[str, Any] = {
    "launcher": "local", "max_steps": _ENDLESS, "evaluate.every_steps": _ENDLESS, "drop_last": True,
    "data.num_workers": 0, "data.resident": True,
}
# fmt: on


@dataclass(frozen=True)
class Work:
    """A workload: a train.yaml, and the changes that every run makes to it."""

    file: Path
    batch: int
    """The global batch size, which is also the microbatch size."""
    changes: dict[str, Any] = field(default_factory=dict)
    long_steps: bool = False
    """Whether steps take tens of milliseconds or more, so that there may be no
    time for more than five steps after the five of the warm-up.
    """

    def config(self, changes: dict[str, Any]) -> TrainConfig:
        """Return the configuration of a run with dotted changes; raises ConfigError."""
        log_every = {
            "log_every_steps": WARMUP_STEPS if self.long_steps else 100
        }
        sizes = {
            "global_batch_size": self.batch,
            "microbatch_size": self.batch,
        }
        # Results are kept, so they must not name a path of this machine.
        source = f"{self.file.parent.name}/{self.file.name}"
        tree = parse_mapping(self.file.read_text(encoding="utf-8"), source)
        tree = override(
            TrainConfig,
            tree,
            {**_SAME, **log_every, **sizes, **self.changes, **changes},
        )
        return build(TrainConfig, tree, source)


def example(
    name: str, batch: int, long_steps: bool = False, **task_args: Any
) -> Work:
    """Return the workload of one of the examples."""
    changes = {f"task_args.{key}": value for key, value in task_args.items()}
    return Work(EXAMPLES / name / "train.yaml", batch, changes, long_steps)


class TimedContext(LocalContext):
    """Stops a run `seconds` after its warm-up.

    The loop calls `should_stop` every ten steps, once the device has finished
    them.
    """

    def __init__(self, seconds: float, microbatch_size: int) -> None:
        super().__init__(None, "local")
        self.microbatch_bounds = (
            microbatch_size,
            None,
        )  # no probe: a size that does not fit fails in the step
        self.seconds = seconds
        self.looks: list[float] = []
        self._warm: float | None = None

    def observe(self, figures: dict[str, float]) -> None:
        """Note the end of the first log window; for long steps, it ends the warm-up."""
        self._warm = self._warm or time.perf_counter()

    def should_stop(self, elapsed_s: float) -> bool:
        """Return whether the time is over."""
        self.looks.append(time.perf_counter())
        self._warm = self._warm or self.looks[0]
        return self.looks[-1] - self._warm >= self.seconds


@dataclass(frozen=True)
class Measured:
    """A run that has ended."""

    result: RunResult
    looks: list[float]
    """When the loop called `should_stop`, every ten steps."""

    @property
    def samples_per_s(self) -> float:
        """The throughput of the steps after the warm-up, by the loop's own clock."""
        assert self.result.throughput is not None
        return self.result.throughput.samples_per_s


class Runs:
    """Runs of one workload on one device."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self.work = work
        self.device = device
        config = work.config({"device": device.type, "precision": "fp32"})
        self.task: Any = load_task(
            config.task, config.task_args, str(work.file)
        )
        self.new_optimizer: Callable[[nn.Module, TrainConfig], Optimizer] = (
            self.task.optimizer
        )
        self.task.dataset = functools.cache(self.task.dataset)  # type: ignore[method-assign]
        first_model = functools.cache(self.task.model)
        self.task.model = lambda: copy.deepcopy(first_model())  # type: ignore[method-assign]

    def run(
        self, changes: dict[str, Any], seconds: float, fused: bool = True
    ) -> Measured:
        """Train with dotted changes, for `seconds` after the warm-up.

        Raises what `fit` raises. Once you have handled that exception, call
        `release`.
        """
        config = self.work.config({"device": self.device.type, **changes})
        new = self.new_optimizer
        self.task.optimizer = (
            new if fused else lambda model, config: unfused(new(model, config))
        )
        context = TimedContext(seconds, self.work.batch)
        measured = Measured(fit(self.task, config, context), context.looks)
        release()
        return measured


def unfused(optimizer: Optimizer) -> Optimizer:
    """Return the same optimizer as torch makes it by default, before its first step.

    On a GPU, torch then updates all parameters in a few calls (`foreach`).
    """
    groups = [{**group, "fused": None} for group in optimizer.param_groups]
    return type(optimizer)(groups)  # type: ignore[call-arg]


def release() -> None:
    """Forget compiled code, and give memory back to the device."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def matmul_flops(precision: str, device: torch.device, n: int) -> float:
    """Return the FLOP/s of a product of two random n x n matrices in this precision.

    The result is the median of several samples.
    """
    spec = TABLE[precision]
    apply_matmul(spec)
    left, right = torch.randn(2, n, n, device=device).to(
        spec.autocast or torch.float32
    )
    out = torch.empty_like(left)
    return (
        2 * n**3 / seconds_of(lambda: torch.mm(left, right, out=out), device)
    )


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `run` takes: the median of samples of 0.2 s or more.

    Samples are long compared with a scheduler's time slice, so that none is
    just lucky.
    """

    def clock() -> float:
        synchronize(device)
        return time.perf_counter()

    timer = timeit.Timer(run, timer=clock)
    runs, _ = timer.autorange()
    return statistics.median(timer.repeat(_SAMPLES, runs)) / runs


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that the GPU benchmarks share."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, help="limit of the whole")
    parser.add_argument(
        "--small", action="store_true", help="run miniatures, as on a CPU"
    )
    parser.add_argument(
        "--keep", action="store_true", help="write to benchmarks/results"
    )
    return parser


def device_and_size(small: bool) -> tuple[torch.device, bool]:
    """Return the device, and whether to run miniatures, as is always done on a CPU.

    If so, this function prints a line that says so.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" or small:
        print(
            "MINIATURES: figures say nothing about speed"
            + ("" if small else " (this machine has no CUDA)")
        )
    return device, small or device.type == "cpu"


class Budget:
    """The time limit of a whole benchmark.

    What does not fit into the remaining time is dropped, and `say` names it.
    """

    def __init__(
        self,
        minutes: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.minutes = minutes
        self._clock = clock
        self._began = clock()
        self.dropped: list[str] = []

    def affords(self, name: str, cost_s: float) -> bool:
        """Return whether `cost_s` seconds are left; if not, `name` is dropped."""
        if (
            self.minutes is None
            or self.spent_s() + cost_s <= self.minutes * 60
        ):
            return True
        self.dropped.append(name)
        return False

    def spent_s(self) -> float:
        """Return the seconds since the beginning."""
        return self._clock() - self._began

    def say(self) -> None:
        """Print what was dropped."""
        if self.dropped:
            print(
                f"\nDROPPED for want of time ({self.minutes:g} minutes in all): {', '.join(self.dropped)}"
            )


@contextlib.contextmanager
def quiet_and_cold() -> Iterator[None]:
    """In this block, start torch.compile with an empty cache, and keep tasks quiet.

    Otherwise tasks would log in every run that their data is synthetic.
    """
    print("all data is SYNTHETIC, of the real shapes", flush=True)
    logger = logging.getLogger("examples")
    before = logger.level
    logger.setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(
        prefix="compiled-", ignore_cleanup_errors=True
    ) as directory:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
        try:
            yield
        finally:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            logger.setLevel(before)
