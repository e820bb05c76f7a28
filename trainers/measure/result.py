"""How a run ended, as `result.json` has it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from trainers.errors import Status
from trainers.json_data import parse_json
from trainers.measure.clock import Throughput
from trainers.measure.ranks import RankFigures


@dataclass(frozen=True)
class RunResult:
    """How a run ended; `result.json` beside its checkpoints."""

    status: Status
    steps: int
    epochs: float | None
    """Epochs done, with the part of the last one; None of a stream, whose length nobody knows."""
    world_size: int
    global_batch_size: int
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
    """Time of this launch's first step on rank 0, with the compilation of forward and backward."""
    compile: dict[str, int] | None = None
    """Of rank 0, with compile: graphs, graph_breaks (places), recompiles."""

    flops_per_sample: float | None = None
    """Of the forward and backward pass (trainers/step/flops.py)."""
    mfu: float | None = None
    """Model FLOPs utilisation of all workers, 0 to 1; None where the device's peak is not known."""
    ranks: list[RankFigures] = field(default_factory=list)
    """Every rank after warm-up, side by side (trainers/measure/ranks.py)."""
    noise_scale: dict[str, float | None] | None = None
    """With `noise_scale: true`, of this launch: `value` in samples, and `low` and `high` of 95 %; None is infinite."""
    earlier_time_s: float = 0.0
    """Of train_time_s, the part of launches before this one."""

    def to_json(self) -> str:
        """As `result.json` has it."""
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: bytes) -> RunResult:
        """Read `result.json`; CheckpointError says what is wrong with it."""
        return parse_json(text, RunResult, finite=False)
