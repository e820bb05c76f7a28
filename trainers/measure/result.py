"""How a run ended, as stored in `result.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from trainers.errors import Status, counted, in_digits
from trainers.measure.figures import RankFigures, Throughput, table


@dataclass
class Pauses:
    """The time for which training paused on rank 0, in this launch."""

    evaluations: int = 0
    evaluation_s: float = 0.0
    checkpoints: int = 0
    checkpoint_s: float = 0.0
    """Time for which checkpoints stopped training: with `checkpoint.async`,
    for the copy to host memory and the wait for the previous checkpoint.
    """
    written_s: float = 0.0
    """Time in which a thread wrote checkpoints while training continued."""

    def evaluated(self, seconds: float) -> None:
        """Add an evaluation of this duration."""
        self.evaluations += 1
        self.evaluation_s += seconds


@dataclass(frozen=True)
class Answer:
    """What a worker returns: plain data."""

    def to_json(self) -> str:
        """Return the result as JSON, for files and other processes."""
        return json.dumps(asdict(self), indent=2)


@dataclass(frozen=True)
class RunResult(Answer):
    """How a run ended; stored as `result.json` next to its checkpoints."""

    status: Status
    steps: int
    epochs: float | None
    """Epochs done, fractions included; None for a stream, whose length is unknown."""
    world_size: int
    global_batch_size: int
    """Samples in one step; with a batch schedule, the most."""
    microbatch_size: int
    accumulation: int
    """Microbatches of one step on the busiest rank."""
    train_time_s: float
    """Time in training steps, without evaluation, checkpoints and start."""
    wall_time_s: float
    """Time of this launch from the loop's start to its end."""
    peak_memory_bytes: int
    """The most on any rank: allocated on a GPU, resident on a CPU."""
    throughput: Throughput | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of each metric: train_loss, val_loss, val_accuracy, ..."""
    checkpoint: str | None = None
    """Where the newest checkpoint is."""
    message: str = ""
    first_step_s: float | None = None
    """Time of this launch's first step on rank 0, with the compilation of
    forward and backward.
    """
    compile: dict[str, int] | None = None
    """Under the key `graphs`, how many graphs rank 0 has compiled."""
    cuda_graphs: str = ""
    """Whether the steps were captured, and what that gained; empty if capture
    was not tried.
    """

    flops_per_sample: float | None = None
    """FLOPs of the forward and backward pass (trainers/step/flops.py)."""
    mfu: float | None = None
    """Model FLOPs utilisation of all workers, 0 to 1; None if the device's
    peak is unknown.
    """
    ranks: list[RankFigures] = field(default_factory=list)
    """The figures of each rank after warm-up (trainers/measure/figures.py)."""
    samples: int | None = None
    """Samples trained, repeats included; None in results of the first versions."""
    earlier_time_s: float = 0.0
    """The part of train_time_s that earlier launches took."""
    pauses: Pauses | None = None
    """Evaluations and checkpoints of this launch; None from versions that did
    not count them.
    """
    phases_s: dict[str, float] = field(default_factory=dict)
    """Time that rank 0's process spent in each phase, from its start to the
    end of the loop.
    """
    warnings: list[str] = field(default_factory=list)
    """What makes the figures doubtful: a loss that is not a mean, validation
    samples in training.
    """

    def __str__(self) -> str:
        """Return the result as text for the user."""
        own_s = self.train_time_s - self.earlier_time_s
        earlier_s = self.earlier_time_s
        steps = counted(self.steps, "step")
        if self.epochs is not None:
            steps += f", {counted(self.epochs, 'epoch', '.4g')}"
        done = f"{self.status}: {steps}, {own_s:.1f} s of training"
        before = ""
        if earlier_s:
            before = f"; {earlier_s:.1f} s of training before this start"
        workers = counted(self.world_size, "worker")
        arithmetic = f"microbatch {self.microbatch_size} x accumulation {self.accumulation} x {workers}"
        metrics = [
            f"{name} {in_digits(value)}"
            for name, value in sorted(self.metrics.items())
        ]
        lines = [
            f"{done} ({self.wall_time_s:.1f} s with evaluation and checkpoints{before})",
            "  ".join(metrics),
            f"global batch {self.global_batch_size} = {arithmetic}",
        ]
        if self.throughput is not None:
            lines += self.throughput.lines()
        if self.compile is not None and self.first_step_s is not None:
            graphs = counted(self.compile["graphs"], "graph")
            lines.append(
                f"first step {self.first_step_s:.1f} s (compile), {graphs}"
            )
        if self.cuda_graphs:
            lines.append(f"CUDA graphs: {self.cuda_graphs}")
        if self.mfu is not None and self.flops_per_sample is not None:
            flops = f"{self.flops_per_sample / 1e9:.4g} GFLOP a sample"
            lines.append(f"MFU {self.mfu:.1%} ({flops})")
        lines.append(f"peak memory {self.peak_memory_bytes / 2**20:,.0f} MiB")
        if self.checkpoint:
            lines.append(f"checkpoint {self.checkpoint}")
        lines += [f"warning: {words}" for words in self.warnings]
        if self.world_size > 1 and self.ranks:
            lines += table(self.ranks)
        return "\n  ".join(lines)
