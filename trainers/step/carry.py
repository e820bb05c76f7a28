"""What a task carries from one step to the next, sample slot by sample slot: truncated backpropagation through time.

Slot i of a step goes on with what slot i of the step before has left, and an epoch begins anew. Slots are those of the
global batch: ranks and microbatches only split them.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainers.data.batch import Batch, map_tensors, tensors_of
from trainers.devices.group import Group
from trainers.errors import CheckpointError, ConfigError
from trainers.step.forward import ForwardPass
from trainers.step.train_step import TrainStep


class Carry:
    """This rank's rows of every tensor that is carried, [n, ...], in the order of slots."""

    def __init__(self, group: Group, global_batch_size: int, steps_per_epoch: int) -> None:
        self._group, self._size, self._steps_per_epoch = group, global_batch_size, steps_per_epoch
        self._rows: list[Tensor] = []  # none at the start of an epoch
        self._sizes: list[int] = []  # of the microbatches that are left of a step
        self._start = 0
        self._left: list[list[Tensor]] = []

    def begin(self, number: int, sizes: Sequence[int], step_samples: int) -> None:
        """Begin step `number`. Every rank must call it: a short step, the last of an epoch, has the first slots."""
        if number % self._steps_per_epoch == 0:
            self._rows = []
        elif step_samples != self._size:
            self._rows = self._own(self._whole(), step_samples)
        self._sizes, self._start, self._left = list(sizes), 0, []

    @property
    def due(self) -> bool:
        """Whether a microbatch of a step comes next; outside of a step nothing is read or left."""
        return bool(self._sizes)

    def take(self, initial: Callable[[], Batch]) -> Batch:
        """Return the rows of the next microbatch; for one that only takes part, and in an epoch's first step, the
        `initial` ones.
        """
        fresh = initial()
        if not self._rows or not self._sizes[0]:
            return fresh
        end = self._start + self._sizes[0]
        rows = iter([one[self._start : end] for one in self._rows])
        return map_tensors(lambda _: next(rows), fresh)

    def leave(self, carry: Batch, task: str) -> None:
        """Keep what a microbatch has left, without its graph."""
        size = self._sizes.pop(0)
        tensors = tensors_of(carry)
        for one in tensors:
            if size and one.shape[:1] != (size,):
                rule = f"must have a row for each of the {size} samples to be carried on"
                fix = f"return such from {task}.forward_carried(); an LSTM has its samples second"
                raise ConfigError("the carry of forward_carried()", list(one.shape), rule, fix)
        self._start += size
        self._left.append([one.detach()[:size] for one in tensors])
        if not self._sizes:
            self._rows = [torch.cat(parts) for parts in zip(*self._left, strict=True)]
            self._left = []

    def _ends(self, samples: int) -> list[int]:
        ranks = self._group.world_size
        return [samples * rank // ranks for rank in range(ranks + 1)]

    def _own(self, whole: Sequence[Tensor], samples: int) -> list[Tensor]:
        first, last = self._ends(samples)[self._group.rank : self._group.rank + 2]
        return [one[first:last].to(self._group.device) for one in whole]

    def _whole(self) -> list[Tensor]:
        """The rows of all ranks. Every rank must call it."""
        ends = self._ends(self._size)
        counts = [last - first for first, last in itertools.pairwise(ends)]
        return [torch.cat(self._group.concatenated(one.contiguous(), counts)) for one in self._rows]

    def state_dict(self, step: int) -> dict[str, list[Tensor]]:
        """Return the rows of all slots after so many steps; nothing at the end of an epoch. Every rank must call it."""
        return {"rows": self._whole() if step % self._steps_per_epoch else []}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless `state` is one of a run with as many slots."""
        rows = state.get("rows")
        if not isinstance(rows, list) or any(
            not isinstance(one, Tensor) or one.shape[:1] != (self._size,) for one in rows
        ):
            raise CheckpointError(f"what it carries is none of {self._size} samples")

    def load_state_dict(self, state: Mapping[str, list[Tensor]]) -> None:
        """Take back what `state_dict` gave, of any number of ranks."""
        self._rows = self._own(state["rows"], self._size)


@dataclass(frozen=True)
class CarriedPass(ForwardPass):
    """In a step of training: with the rows of its samples. Elsewhere as any other: with initial ones."""

    carry: Carry

    def __call__(self, batch: Batch, with_loss: bool = True) -> tuple[Any, Any]:
        """As ForwardPass's."""
        if not self.carry.due:
            return super().__call__(batch, with_loss)
        task, given = self.task, self.spec.convert_batch(batch)
        try:
            with self.spec.autocast_context(self.device):
                rows = self.carry.take(lambda: task.initial_carry(self.model, given))
                outputs, left = task.forward_carried(self.model, given, rows)
                loss = self.loss_of(outputs, batch)
        except RuntimeError as error:
            self.explain(error, batch)
            raise
        self.carry.leave(left, type(task).__name__)
        return outputs, loss


class CarriedStep(TrainStep):
    """A TrainStep whose samples go on where those of the step before have ended."""

    def __init__(self, forward: CarriedPass, optimizer: Optimizer, group: Group, clip_grad_norm: float | None) -> None:
        super().__init__(forward, optimizer, group, clip_grad_norm)
        self.carry = forward.carry

    def __call__(self, batches: Iterator[Batch], sizes: Sequence[int], step_samples: int, idle: bool) -> None:
        """As TrainStep's."""
        self.carry.begin(self.number, sizes, step_samples)
        super().__call__(batches, sizes, step_samples, idle)
        self.number += 1
