"""How a run ended, as `result.json` has it."""

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
    """Until training could go on: with `checkpoint.async` the copy to host memory, and
    waiting for the one before.
    """
    written_s: float = 0.0
    """Time in which checkpoints were written by a thread beside the steps."""

    def evaluated(self, seconds: float) -> None:
        """Add an evaluation of this duration."""
        self.evaluations += 1
        self.evaluation_s += seconds


@dataclass(frozen=True)
class RunResult:
    """How a run ended; `result.json` beside its checkpoints."""

    status: Status
    steps: int
    epochs: float | None
    """Epochs done, with the part of the last one; None of a stream, whose length nobody
    knows.
    """
    world_size: int
    global_batch_size: int
    """The largest, where it changes."""
    microbatch_size: int
    accumulation: int
    """Microbatches of one step on the busiest rank."""
    train_time_s: float
    """Time in training steps; evaluation, checkpoints and start left out."""
    wall_time_s: float
    """Time of this launch from the loop's start to its end."""
    peak_memory_bytes: int
    """Largest over ranks: allocated on a GPU, resident on a CPU."""
    throughput: Throughput | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of each: train_loss, val_loss, val_accuracy, ..."""
    checkpoint: str | None = None
    """Where the newest checkpoint is."""
    message: str = ""
    first_step_s: float | None = None
    """Time of this launch's first step on rank 0, with the compilation of forward and
    backward.
    """
    compile: dict[str, int] | None = None
    """Of rank 0, with compile: how many `graphs`."""
    cuda_graphs: str = ""
    """What became of capturing the steps, and what it brought; empty where it was not
    tried.
    """

    flops_per_sample: float | None = None
    """Of the forward and backward pass (trainers/step/flops.py)."""
    mfu: float | None = None
    """Model FLOPs utilisation of all workers, 0 to 1; None where the device's peak is
    not known.
    """
    ranks: list[RankFigures] = field(default_factory=list)
    """Every rank after warm-up, side by side (trainers/measure/figures.py)."""
    samples: int | None = None
    """Samples trained, each as often as it was; None in results of the first versions.
    """
    earlier_time_s: float = 0.0
    """Of train_time_s, the part of launches before this one."""
    pauses: Pauses | None = None
    """Evaluations and checkpoints of this launch; None of a version that did not count
    them.
    """
    phases_s: dict[str, float] = field(default_factory=dict)
    """What rank 0's process has spent in each phase, from its start to the end of the
    loop.
    """
    warnings: list[str] = field(default_factory=list)
    """What makes its figures doubtful: a loss that is no mean, validation samples in
    training.
    """

    def to_json(self) -> str:
        """Return the content of `result.json`."""
        return json.dumps(asdict(self), indent=2)

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
            f"{name} {in_digits(value)}" for name, value in sorted(self.metrics.items())
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
            lines.append(f"first step {self.first_step_s:.1f} s (compile), {graphs}")
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
