"""The shared per-worker loop: the same `fit(task, config, context)` in a test, under torchrun, Ray, and in a lane.

build: device, seed, data, model, optimizer; probe the microbatch; resume the newest complete checkpoint
until the last step, or until asked to stop:
    set the learning rate; run one step (trainers/step.py); count it
    every `log_every_steps`: the mean loss of those steps
    every ten steps, and before anything is kept: all ranks agree on stop, divergence, checkpoint time
    when due: evaluate; checkpoint; report
evaluate and checkpoint the end; write `result.json`
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainers.build import Parts, build_parts
from trainers.checkpoint import Checkpoints
from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.device import environment, peak_memory_bytes, reset_peak_memory
from trainers.errors import CheckpointError, ConfigError, DivergedError, Status
from trainers.evaluation import evaluate
from trainers.metrics import RunLog, RunResult, StepClock
from trainers.optim import lr_factor, scaled_lr
from trainers.rng import get_rng_state, set_rng_state
from trainers.sampler import split_share
from trainers.task import Task

logger = logging.getLogger(__name__)

AGREE_EVERY_STEPS = 10
"""Between two agreements of all ranks: a bad loss or a stop is acted on within so many steps."""


def fit(task: Task, config: TrainConfig, context: RunContext) -> RunResult:
    """Train, on this worker, the run that `config` describes. Every rank must call it; the result is rank-equal.

    Raises ConfigError (a value that only the device or the data could refute), DivergedError, StorageError,
    CheckpointError, torch.OutOfMemoryError, and whatever the task raises.
    """
    config = config.with_global_batch()
    parts = build_parts(task, config, context)
    try:
        return _Loop(task, config, context, parts).run()
    finally:
        parts.close()


@dataclass(frozen=True)
class _Agreed:
    stop: bool
    diverged: bool
    checkpoint_due: bool


class _Loop:
    def __init__(self, task: Task, config: TrainConfig, context: RunContext, parts: Parts) -> None:
        self.task, self.config, self.context, self.parts = task, config, context, parts
        self.step = 0
        self.began = self.last_checkpoint_time = time.monotonic()
        self.metrics: dict[str, float] = {}
        self.clock = StepClock(parts.device)
        self.checkpoint: str | None = None
        self.evaluated_step = self.kept_step = -1
        self.logged_step = 0
        self.elapsed_s = 0.0
        storage = context.storage
        self.checkpoints = Checkpoints(storage, parts.group, config.checkpoint.keep) if storage else None
        self.log = RunLog(storage) if storage and context.rank == 0 else None

    def run(self) -> RunResult:
        parts = self.parts
        reset_peak_memory(parts.device)
        self.resume()
        self.say_start()
        if self.log is not None and self.context.storage is not None:
            report = json.dumps(environment(parts.device), indent=2)
            self.context.storage.write("environment.json", report.encode())
        stopped = False
        while self.step < parts.total_steps and not stopped:
            stopped = self.epoch() and self.step < parts.total_steps
        self.end_window()
        if not stopped and self.evaluated_step != self.step:
            self.evaluate()
        if self.kept_step != self.step:
            self.keep()
        return self.finish("stopped" if stopped else "done")

    def epoch(self) -> bool:
        """The rest of the current epoch; whether the run was asked to stop in it."""
        parts, sampler = self.parts, self.parts.sampler
        number, first = divmod(self.step, sampler.steps_per_epoch)
        sampler.set_epoch(number)
        last = min(sampler.steps_per_epoch, first + parts.total_steps - self.step)
        shares = [sampler.share(step) for step in range(first, last)]
        plans = [
            split_share(share if len(share) else sampler.anchor(step), parts.microbatch_size)
            for step, share in zip(range(first, last), shares, strict=True)
        ]
        flat: list[Tensor] = [indices for plan in plans for indices in plan]
        batches: Iterator[Any] = self.clock.timed(parts.train_feed.batches(flat, training=True))
        self.clock.start_span()
        for step, share, plan in zip(range(first, last), shares, plans, strict=True):
            parts.step.set_lr(lr_factor(self.config.lr_schedule, self.step, parts.total_steps))
            size = sampler.step_size(step)
            parts.step(batches, [len(indices) for indices in plan], size, idle=len(share) == 0)
            self.step += 1
            self.clock.step(size)
            if self.after_step():
                return True
        return False

    def after_step(self) -> bool:
        """Whatever is due after a step; whether to stop."""
        config, parts = self.config, self.parts
        per_epoch = parts.sampler.steps_per_epoch
        evaluate_now = self.due(config.evaluate.every_steps, config.evaluate.every_epochs, per_epoch)
        keep = config.checkpoint
        by_time = keep.every_s is not None
        keeps = self.checkpoints is not None
        checkpoint_now = keeps and not by_time and self.due(keep.every_steps, keep.every_epochs, per_epoch)
        agreed = _Agreed(False, False, False)
        if evaluate_now or checkpoint_now or self.step % AGREE_EVERY_STEPS == 0 or self.step == parts.total_steps:
            self.clock.end_span()
            agreed = self.agree()
            if agreed.diverged:
                raise DivergedError(
                    f"the loss became NaN or infinite between steps {max(0, self.step - AGREE_EVERY_STEPS)} and "
                    f"{self.step}" + (f"; the last good checkpoint is {self.checkpoint}" if self.checkpoint else "")
                )
        if self.step % config.log_every_steps == 0:
            self.end_window()
        if evaluate_now:
            self.end_window()
            self.evaluate()
        if (checkpoint_now or (keeps and agreed.checkpoint_due)) and self.step < parts.total_steps:
            self.end_window()
            self.keep()
        if not self.clock.running:
            self.clock.start_span()
        return agreed.stop

    def due(self, every_steps: int | None, every_epochs: int | None, per_epoch: int) -> bool:
        interval = every_steps or (every_epochs or 1) * per_epoch
        return self.step % interval == 0

    def agree(self) -> _Agreed:
        """One small maximum over ranks, so that all do the same next."""
        now = time.monotonic()
        config = self.config
        elapsed_s = now - self.began
        out_of_time = config.max_time_s is not None and elapsed_s > config.max_time_s
        every_s = config.checkpoint.every_s
        due = every_s is not None and now - self.last_checkpoint_time > every_s
        flags = torch.tensor(
            [self.context.should_stop() or out_of_time, bool(self.parts.step.bad), due, elapsed_s], dtype=torch.float32
        )
        stop, diverged, checkpoint_due, self.elapsed_s = self.parts.group.max(flags).tolist()
        return _Agreed(bool(stop), bool(diverged), bool(checkpoint_due))

    def end_window(self) -> None:
        """The mean loss of the steps since the last window, in the log and on the terminal."""
        steps = self.step - self.logged_step
        if steps == 0:
            return
        self.clock.end_span()
        self.metrics["train_loss"] = self.parts.step.take_loss() / steps
        self.logged_step = self.step
        record = {**self.position(), "lr": self.lr(), "train_loss": self.metrics["train_loss"]}
        if self.log is not None:
            self.log.add(record)
            logger.info(
                "step %d/%d  epoch %.2f  loss %.4f  %s",
                self.step,
                self.parts.total_steps,
                record["epoch"],
                record["train_loss"],
                self.speed(),
            )

    def evaluate(self) -> None:
        """Evaluate and report."""
        parts = self.parts
        began = time.perf_counter()
        figures = evaluate(
            parts.model, self.task, parts.val_feed, self.config.evaluate.microbatch_size, parts.spec, parts.group
        )
        self.metrics |= figures
        self.evaluated_step = self.step
        record = {**self.position(), **figures}
        if self.log is not None:
            self.log.add(record)
        if self.context.rank == 0:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
            logger.info("evaluated at step %d in %.2f s: %s", self.step, time.perf_counter() - began, shown)
        self.context.report({**self.position(), **self.metrics}, None, self.elapsed_s)

    def keep(self) -> None:
        """Write a checkpoint, then the log up to it, and report both."""
        if self.checkpoints is None:
            return
        parts = self.parts
        state = {
            "model": parts.model.state_dict(),
            "optimizer": parts.optimizer.state_dict(),
            "scaler": parts.step.scaler.state_dict(),
            "task": self.task.state_dict(),
            "position": {
                "step": self.step,
                "global_batch_size": self.config.batch_size,
                "train_samples": parts.sampler.length,
                "train_time_s": self.clock.train_time_s,
                "metrics": dict(self.metrics),
                "evaluated_step": self.evaluated_step,
            },
        }
        if self.log is not None:
            self.log.flush(self.step)  # before the checkpoint: what is resumed must have its log
        self.checkpoint = self.checkpoints.save(self.step, state, get_rng_state(parts.device))
        self.kept_step, self.last_checkpoint_time = self.step, time.monotonic()
        self.context.report({**self.position(), **self.metrics}, self.checkpoint, self.elapsed_s)

    def resume(self) -> None:
        """Take the newest complete checkpoint, if there is one."""
        loaded = self.checkpoints.load() if self.checkpoints else None
        if loaded is None:
            return
        parts, state = self.parts, loaded.state
        if missing := {"model", "optimizer", "scaler", "task", "position"} - set(state):
            raise CheckpointError(f"checkpoint {loaded.name} is no checkpoint of ours: it has no {sorted(missing)[0]}")
        position = state["position"]
        for name, now in (("global_batch_size", self.config.batch_size), ("train_samples", parts.sampler.length)):
            if position[name] != now:
                raise ConfigError(
                    name,
                    now,
                    f"differs from the {position[name]} that checkpoint {loaded.name} was trained with",
                    "train under another `name`, or start anew with --fresh",
                )
        try:
            parts.model.load_state_dict(state["model"])
            parts.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"checkpoint {loaded.name} does not fit this model: {error}") from error
        parts.step.scaler.load_state_dict(state["scaler"])
        self.task.load_state_dict(state["task"])
        if loaded.rank_state is not None:
            set_rng_state(loaded.rank_state, parts.device)
        self.step = self.logged_step = self.kept_step = int(position["step"])
        self.clock.train_time_s = float(position["train_time_s"])
        self.metrics = dict(position["metrics"])
        self.evaluated_step = int(position["evaluated_step"])
        assert self.checkpoints is not None
        self.checkpoint = self.checkpoints.storage.locate(loaded.name)
        if self.log is not None:
            self.log.cut(self.step)
            logger.info("resumed at step %d from %s", self.step, self.checkpoint)

    def position(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self.step / self.parts.sampler.steps_per_epoch,
            "train_time_s": self.clock.train_time_s,
        }

    def lr(self) -> float:
        return float(self.parts.optimizer.param_groups[0]["lr"])

    def speed(self) -> str:
        throughput = self.clock.throughput()
        return f"{throughput.samples_per_s:,.0f} samples/s" if throughput else ""

    def say_start(self) -> None:
        if self.context.rank != 0:
            return
        parts, config = self.parts, self.config
        logger.info(
            "global batch %d = microbatch %d x accumulation %d x %d worker%s (%s, %s, %s)",
            config.batch_size,
            parts.microbatch_size,
            parts.accumulation,
            self.context.world_size,
            "s" if self.context.world_size > 1 else "",
            self.context.launcher,
            parts.device,
            parts.spec.name,
        )
        logger.info(
            "%d training samples, %d steps an epoch, %d steps in all; learning rate %g",
            parts.sampler.length,
            parts.sampler.steps_per_epoch,
            parts.total_steps,
            scaled_lr(config),
        )

    def finish(self, status: Status) -> RunResult:
        """The result, the same on every rank; rank 0 writes it."""
        group = self.parts.group
        peaks = group.gather(peak_memory_bytes(self.parts.device))
        throughput = group.first(self.clock.throughput())
        result = RunResult(
            status=status,
            steps=self.step,
            epochs=self.step / self.parts.sampler.steps_per_epoch,
            world_size=self.context.world_size,
            global_batch_size=self.config.batch_size,
            microbatch_size=self.parts.microbatch_size,
            accumulation=self.parts.accumulation,
            train_time_s=self.clock.train_time_s,
            wall_time_s=time.monotonic() - self.began,
            peak_memory_bytes=max(peaks),
            throughput=throughput,
            metrics={name: value for name, value in self.metrics.items() if not math.isnan(value)},
            checkpoint=self.checkpoint,
        )
        if self.context.storage is not None and self.context.rank == 0:
            if self.log is not None:
                self.log.flush(self.step)
            self.context.storage.write("result.json", result.to_json().encode())
        group.barrier()
        return result
