"""What all ranks agree on between steps, so that they do the same next."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from trainers.devices.group import Group


@dataclass(frozen=True)
class Agreement:
    """What one rank wants, or, once agreed, what any of them wants."""

    stop: bool = False
    diverged: bool = False
    checkpoint_due: bool = False
    preempted: bool = False
    writing: bool = False
    """Whether a checkpoint is being written in the background."""


def agree(group: Group, mine: Agreement, elapsed_s: float) -> tuple[Agreement, float]:
    """Return what any rank wants, and the largest `elapsed_s`: one small maximum over ranks, which all must call."""
    flags = torch.tensor([*astuple(mine), elapsed_s], dtype=torch.float64)
    *flagged, elapsed_s = group.max(flags).tolist()
    return Agreement(*(bool(flag) for flag in flagged)), elapsed_s
