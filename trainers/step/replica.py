"""Replica: what one worker trains with."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from trainers.data.feed import Feed
from trainers.data.sampler import StepSampler
from trainers.devices.group import Group
from trainers.model.precision import PrecisionSpec
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
    val_feed: Feed
    total_steps: int
    microbatch_size: int
    accumulation: int
    flops_per_sample: float | None
    even: bool = False
    """Whether forward is a collective, FSDP's or one of the task's: every rank takes as many microbatches."""

    def close(self) -> None:
        """End loader processes and let go of the data."""
        self.train_feed.close()
        self.val_feed.close()
