"""The loop itself, on one worker: its steps, and whatever is due between them.

until the last step (of this launcher's part of the run), or until asked to stop:
    set the learning rate; run one step (trainers/step/train_step.py); count it
    every `log_every_steps`: the mean loss of those steps
    every ten steps, and before anything is kept: all ranks agree on stop, divergence, checkpoint time
    when due: evaluate; checkpoint; report
evaluate and checkpoint the end; write `result.json`
"""

import contextlib
import json
import logging
import math
import time
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch

from trainers.checkpoint.run_state import Keeper
from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.devices.device import device_name, environment, reset_peak_memory
from trainers.errors import DivergedError, PreemptedError, Status, classify
from trainers.loop.monitor import Monitor
from trainers.loop.watchdog import Watchdog
from trainers.measure.clock import StepClock
from trainers.measure.profiler import Inspection
from trainers.measure.result import RunResult
from trainers.measure.run_log import RunLog
from trainers.model.optimizer import averaged, lr_factor, scaled_lr, set_training
from trainers.model.sharding import is_sharded
from trainers.model.strategy import share_buffers, shorten, unused_parameters
from trainers.step.ceiling import OUT_OF_MEMORY, refuse_microbatch
from trainers.step.evaluation import evaluate
from trainers.step.non_finite import find_non_finite
from trainers.step.replica import Replica
from trainers.task import Task

logger = logging.getLogger(__name__)

AGREE_EVERY_STEPS = 10
"""Steps between two agreements of all ranks: the longest that a bad loss or a stop waits."""


@dataclass(frozen=True)
class Agreement:
    """What one rank wants, or, once agreed, what any of them wants."""

    stop: bool = False
    diverged: bool = False
    checkpoint_due: bool = False
    preempted: bool = False
    writing: bool = False
    """Whether a checkpoint is being written in the background."""


class Training:
    """One worker's attempt at a run: from the newest checkpoint to the end, a stop or an error."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        context: RunContext,
        parts: Replica,
        watchdog: Watchdog,
        inspection: Inspection | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self.task, self.config, self.context, self.parts, self.watchdog = task, config, context, parts, watchdog
        self.inspection, self.compiles = inspection, config.compile != "off" or config.cuda_graphs
        self.step, self.end = 0, parts.total_steps
        if context.until_epoch is not None:
            self.end = min(self.end, math.ceil(round(context.until_epoch * parts.sampler.steps_per_epoch, 6)))
        self.began = time.monotonic()
        self.metrics: dict[str, float] = {}
        self.clock = StepClock(parts.device)
        self.monitor = Monitor(parts, self.clock, config.cuda_graphs)
        stack.callback(self.monitor.close)
        self.checkpoint: str | None = None
        self.evaluated_step, self.logged_step, self.elapsed_s, self.earlier_time_s = -1, 0, 0.0, 0.0
        storage = context.storage
        self.log = RunLog(storage, config.tensorboard) if storage and context.rank == 0 else None
        self.keeper = Keeper(storage, parts, task, config, self.log, self.kept) if storage else None
        if self.keeper is not None:
            stack.callback(self.keeper.checkpoints.abandon)
            stack.callback(watchdog.enter, "checkpoint")  # which `abandon` may wait for

    def run(self) -> RunResult:
        """Train from the newest checkpoint on."""
        parts = self.parts
        reset_peak_memory(parts.device)
        self.watchdog.enter("resume")
        if self.log is not None and self.context.storage is not None:  # before others wait for rank 0 in a step
            self.context.storage.write("environment.json", json.dumps(environment(parts.device), indent=2).encode())
        self.resume()
        if self.context.rank == 0:
            self.say_start()
        self.watchdog.enter("the first steps" if self.compiles else "training", steps=not self.compiles)
        stopped = False
        while self.step < self.end and not stopped:
            stopped = self.epoch() and self.step < self.end
        self.end_window()
        if not stopped and self.evaluated_step != self.step:
            self.evaluate()
        if self.keeper is not None:
            if self.keeper.kept_step != self.step:
                self.keep(at_once=True)
            self.watchdog.enter("checkpoint")
            self.keeper.settle()
        self.watchdog.enter("the end")
        return self.finish("done" if self.step == parts.total_steps else "stopped")

    def say_start(self) -> None:
        """Log the batch arithmetic, the data and the learning rate."""
        parts, config, context = self.parts, self.config, self.context
        workers = f"{context.world_size} worker{'s' if context.world_size > 1 else ''}"
        sizes = f"microbatch {parts.microbatch_size} x accumulation {parts.accumulation} x {workers}"
        where = f"{context.launcher}, {parts.device}, {parts.spec.name}"
        logger.info("global batch %d = %s (%s)", config.batch_size, sizes, where)
        steps = f"{parts.sampler.steps_per_epoch} steps an epoch, {parts.total_steps} steps in all"
        logger.info("%d training samples, %s; learning rate %g", parts.sampler.length, steps, scaled_lr(config))

    def epoch(self) -> bool:
        """Train the rest of the current epoch; return whether the run was asked to stop in it."""
        parts, sampler = self.parts, self.parts.sampler
        self.clock.end_span()  # the last steps of an epoch after which nothing was due
        number, first = divmod(self.step, sampler.steps_per_epoch)
        sampler.set_epoch(number)
        last = min(sampler.steps_per_epoch, first + self.end - self.step)
        even, noise, usual = parts.even, parts.step.noise, parts.microbatch_size
        # The noise scale wants two pieces of what would be one microbatch.
        wanted = [usual if noise is None else noise.microbatch_size(self.step + n, usual) for n in range(last - first)]
        plans = [sampler.plan(first + n, size, even) for n, size in enumerate(wanted)]
        flat = [indices for microbatches, _ in plans for indices in microbatches]
        batches = self.clock.timed(parts.train_feed.batches(flat, training=True))
        self.clock.start_span()
        for step, (_, sizes) in zip(range(first, last), plans, strict=True):
            parts.step.set_lr(lr_factor(self.config.lr_schedule, self.step, parts.total_steps))
            size = sampler.step_size(step)
            try:
                parts.step(batches, sizes, size, idle=not any(sizes))
            except (RuntimeError, MemoryError) as error:
                if classify(error) in OUT_OF_MEMORY:
                    where = device_name(parts.device)
                    refuse_microbatch(error, parts.microbatch_size, self.config, self.context, where)
                raise
            if self.clock.first_step_s is None:
                self.say_unused()
            self.step += 1
            self.clock.step(size, sum(sizes))
            if self.inspection is not None:
                self.inspection.step(self.clock)
            if self.after_step():
                return True
        return False

    def say_unused(self) -> None:
        """Warn of parameters without a gradient after the first step: they stay as they are, and DDP refuses them."""
        if self.context.rank == 0 and (names := unused_parameters(self.parts.model)):
            words = "the loss of the first step does not depend on %s: they are not trained (several workers want %s)"
            logger.warning(words, shorten(names), "`requires_grad_(False)` on them, or `ddp.static_graph: true`")

    def after_step(self) -> bool:
        """Do whatever is due after a step; return whether to stop."""
        config, keep = self.config, self.config.checkpoint
        evaluate_now = self.due(config.evaluate.every_steps, config.evaluate.every_epochs)
        by_steps = self.keeper is not None and keep.every_s is None
        checkpoint_now = by_steps and self.due(keep.every_steps, keep.every_epochs)
        agreed = Agreement()
        if evaluate_now or checkpoint_now or self.step % AGREE_EVERY_STEPS == 0 or self.step == self.end:
            agreed = self.agree()
        if evaluate_now or self.step % config.log_every_steps == 0:
            self.end_window()
        improved = evaluate_now and self.evaluate()
        if (checkpoint_now or improved or agreed.checkpoint_due) and self.step < self.end:
            self.end_window()
            self.keep(at_once=agreed.preempted)
        if agreed.preempted and self.step < self.end:
            raise PreemptedError(f"a node is being taken away; step {self.step} is kept in {self.checkpoint}")
        if not self.clock.running:
            self.clock.start_span()
        return agreed.stop

    def due(self, every_steps: int | None, every_epochs: int | None) -> bool:
        """Return whether the step that has just ended completes such an interval."""
        interval = every_steps or (every_epochs or 1) * self.parts.sampler.steps_per_epoch
        return self.step % interval == 0

    def agree(self) -> Agreement:
        """Agree with all ranks on what comes next; raises DivergedError on all of them where a loss was bad."""
        self.clock.end_span()
        keeper, max_time_s = self.keeper, self.config.max_time_s
        elapsed_s = time.monotonic() - self.began
        out_of_time = max_time_s is not None and elapsed_s > max_time_s
        preempted = self.context.preempted(self.elapsed_s)
        mine = Agreement(
            stop=self.context.should_stop(self.elapsed_s) or out_of_time,
            diverged=bool(self.parts.step.bad),
            checkpoint_due=keeper is not None and (keeper.due() or preempted),
            preempted=preempted,
            writing=keeper is not None and keeper.checkpoints.busy,
        )
        flags = torch.tensor([*astuple(mine), elapsed_s], dtype=torch.float64)
        *flagged, self.elapsed_s = self.parts.group.max(flags).tolist()
        agreed = Agreement(*(bool(flag) for flag in flagged))
        if agreed.diverged:
            if keeper is not None:
                self.watchdog.enter("checkpoint")
                keeper.settle()
            good = f"; the last good checkpoint is {self.checkpoint}" if self.checkpoint else ""
            last = range(max(0, self.step - AGREE_EVERY_STEPS), self.step)
            found = next(filter(None, self.parts.group.gather(find_non_finite(self.parts, self.task, last))), None)
            why = f": {found}" if found else ""
            raise DivergedError(
                f"the loss became NaN or infinite between steps {last.start} and {last.stop}{why}{good}"
            )
        if keeper is not None and not agreed.writing:
            keeper.advance()
        if self.compiles:  # by now it has
            self.watchdog.enter("training", steps=True)
        return agreed

    def end_window(self) -> None:
        """Log the mean loss of the steps since the last window, and tell the terminal and the launcher."""
        steps = self.step - self.logged_step
        if steps == 0:
            return
        self.clock.end_span()
        loss = self.metrics["train_loss"] = self.parts.step.take_loss() / steps
        self.logged_step = self.step
        self.parts.step.check_lr()
        lr = float(self.parts.optimizer.param_groups[0]["lr"])
        record = {**self.position(), "lr": lr, "train_loss": loss, **self.monitor.window()}
        noise = self.parts.step.noise
        if noise is not None:
            noise.take()
            record |= noise.recent()
        ranks = self.monitor.compare(self.elapsed_s)
        throughput = self.clock.throughput()
        if throughput is not None:
            figures = {"loss": loss, "progress": self.step / self.parts.total_steps, **asdict(throughput)}
            self.context.observe(figures | ({"mfu": record["mfu"]} if "mfu" in record else {}))
        if self.log is not None:
            self.log.add(record | ({"ranks": ranks} if ranks else {}))
            done = f"step {self.step}/{self.parts.total_steps}  epoch {record['epoch']:.2f}"
            speed = f"{throughput.samples_per_s:,.0f} samples/s" if throughput else ""
            logger.info("%s  loss %.4f  %s", done, loss, speed)

    def evaluate(self) -> bool:
        """Evaluate and report; return whether this is the best so far, by `checkpoint.best`."""
        parts = self.parts
        began = time.perf_counter()
        size = self.config.evaluate.microbatch_size
        seeds, sharded = (self.config.seed, self.step), is_sharded(parts.model)
        with self.watchdog.phase("evaluation", steps=not self.compiles), averaged(parts.optimizer):
            share_buffers(parts.model, parts.group)
            figures = evaluate(
                parts.model,
                self.task,
                parts.val_feed,
                size,
                parts.spec,
                parts.group,
                seeds=seeds,
                collective=parts.even and not sharded,
            )
        self.metrics |= figures
        self.evaluated_step = self.step
        if self.log is not None:
            self.log.add({**self.position(), **figures})
        if self.context.rank == 0:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
            logger.info("evaluated at step %d in %.2f s: %s", self.step, time.perf_counter() - began, shown)
        self.context.report({**self.position(), **self.metrics}, None, self.elapsed_s)
        return self.keeper is not None and self.keeper.checkpoints.improves(figures)

    def keep(self, at_once: bool) -> None:
        """Write a checkpoint and the log up to it; with `checkpoint.async` and not `at_once` while training goes on."""
        assert self.keeper is not None
        position = {
            "step": self.step,
            "global_batch_size": self.config.batch_size,
            "train_samples": self.parts.sampler.length,
            "train_time_s": self.clock.train_time_s,
            "metrics": dict(self.metrics),
            "evaluated_step": self.evaluated_step,
        }
        with self.watchdog.phase("checkpoint"), averaged(self.parts.optimizer):
            self.keeper.keep(position, self.metrics if self.evaluated_step == self.step else {}, at_once)

    def kept(self, where: str) -> None:
        """Report a checkpoint that is complete."""
        self.checkpoint = where
        self.watchdog.beat()
        self.context.report({**self.position(), **self.metrics}, where, self.elapsed_s)

    def resume(self) -> None:
        """Go back to the newest complete checkpoint, if there is one."""
        position = self.keeper.resume(self.context.source) if self.keeper is not None else None
        if self.keeper is None or position is None:
            return
        set_training(self.parts.optimizer, True)
        self.step = self.logged_step = int(position["step"])
        self.clock.train_time_s = self.earlier_time_s = float(position["train_time_s"])
        self.metrics = dict(position["metrics"])
        self.evaluated_step = int(position["evaluated_step"])
        if self.keeper.kept_step == self.step:
            self.checkpoint = self.keeper.checkpoints.locate(self.step)
        if self.context.rank == 0:
            logger.info("resumed at step %d from %s", self.step, self.checkpoint or self.context.source)

    def position(self) -> dict[str, Any]:
        """Return where the run is, for logs and reports."""
        return {
            "step": self.step,
            "epoch": self.step / self.parts.sampler.steps_per_epoch,
            "train_time_s": self.clock.train_time_s,
        }

    def finish(self, status: Status) -> RunResult:
        """Return the result, the same on every rank; rank 0 writes it."""
        group, noise, speed = self.parts.group, self.parts.step.noise, self.clock.throughput()
        ranks = self.monitor.finish()
        compiled = self.inspection.compiled() if self.inspection is not None else None
        mfu = self.monitor.mfu(speed.samples_per_s) if speed is not None else None
        of_rank_0 = group.first((speed, self.clock.first_step_s, self.parts.flops_per_sample, mfu, compiled))
        throughput, first_step_s, flops_per_sample, mfu, compiled = of_rank_0
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
            peak_memory_bytes=max(row["peak_bytes"] for row in ranks),
            throughput=throughput,
            metrics={name: value for name, value in self.metrics.items() if not math.isnan(value)},
            checkpoint=self.checkpoint,
            first_step_s=first_step_s,
            compile=compiled,
            flops_per_sample=flops_per_sample,
            mfu=mfu,
            ranks=ranks,
            noise_scale=noise.figures() if noise is not None else None,
            earlier_time_s=self.earlier_time_s,
        )
        if self.log is not None and self.context.storage is not None:
            self.log.flush(self.step)
            self.context.storage.write("result.json", result.to_json().encode())
        group.barrier()
        return result
