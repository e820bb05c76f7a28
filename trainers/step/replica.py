"""Replica: what one worker trains with."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainers.data.feed import Feed
from trainers.data.sampler import StepSampler
from trainers.devices.group import Group
from trainers.model.as_made import AsMade
from trainers.model.moving_average import MovingAverage
from trainers.model.precision import PrecisionSpec
from trainers.model.schedule import Schedule
from trainers.step.train_step import TrainStep


@dataclass
class Replica:
    """One worker's copy of the model, or its shard, and all that its steps need."""

    device: torch.device
    group: Group
    spec: PrecisionSpec
    model: nn.Module
    """The bare module: its state_dict has no wrapper's prefix."""
    optimizer: Optimizer
    step: TrainStep
    sampler: StepSampler
    train_feed: Feed
    val_feed: Feed | None
    """None where the task has no validation split."""
    total_steps: int
    microbatch_size: int
    accumulation: int
    flops_per_sample: float | None
    schedule: Schedule | None
    """A scheduler of torch's; None where the learning rate is a function of the step.
    """
    ema: MovingAverage | None
    as_made: AsMade
    """What of the model may be switched, as model() has made it."""
    beside: dict[str, Tensor]
    """What the task trains beside the model, by the names of its attributes."""
    frozen: dict[str, str] | None
    """Digests of the parameters that checkpoints leave out; None where they have them
    all.
    """
    samples: str
    """What tells a few training samples from others."""
    held_back: str
    """The same of validation."""
    even: bool = False
    """Whether forward is a collective, FSDP's or one of the task's: every rank takes as
    many microbatches.
    """
    warnings: list[str] = field(default_factory=list)
    """What was found before the first step that makes figures doubtful; the same on
    every rank.
    """

    @property
    def feeds(self) -> list[Feed]:
        """Those of all splits that there are."""
        return [feed for feed in (self.train_feed, self.val_feed) if feed is not None]

    def close(self) -> None:
        """End loader processes and let go of the data."""
        for feed in self.feeds:
            feed.close()
