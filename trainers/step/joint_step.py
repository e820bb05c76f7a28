"""A step whose loss is of all its samples together: contrastive losses, with the negatives of every rank."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainers.data.batch import Batch, concatenate, map_tensors, tensors_of
from trainers.devices.rng import get_rng_state, set_rng_state
from trainers.errors import ConfigError
from trainers.model.strategy import no_sync
from trainers.step.train_step import TrainStep


class JointStep(TrainStep):
    """Takes the loss of a step from `Task.joint_loss`, over the outputs of all its microbatches on all ranks.

    Outputs come first, without a graph; the loss's gradient by them goes back through a second pass of each microbatch,
    with the random numbers of the first (gradient caching, Gao et al. 2021). So a step gives the gradient of the whole
    batch in the memory of a microbatch. A rank that has a single one passes it once.
    """

    def __call__(self, batches: Iterator[Batch], sizes: Sequence[int], step_samples: int, idle: bool) -> None:
        """As TrainStep's."""
        for parameter in self._parameters:
            parameter.grad = None
        device, model = self.group.device, self.forward.model
        held = [next(batches) for _ in sizes]
        again, last = len(held) > 1, len(held) - 1
        states: list[dict[str, Any]] = []
        with _looking(model) if again else contextlib.nullcontext():
            outputs = []
            for batch in held:
                if again:
                    states.append(get_rng_state(device))
                outputs.append(self.forward(batch, with_loss=False)[0])
        gradients = self._gradients_by(outputs, sizes, step_samples)
        for index, batch in enumerate(held):
            with contextlib.nullcontext() if index == last else no_sync(model):
                if again:
                    set_rng_state(states[index], device)
                    outputs[index] = self.forward(batch, with_loss=False)[0]
                pairs = zip(_floats(outputs[index]), gradients, strict=True)
                start = sum(sizes[:index])
                sent = [
                    (one, _rows(one, gradient, start, sizes[index])) for one, gradient in pairs if one.requires_grad
                ]
                torch.autograd.backward([one for one, _ in sent], [gradient for _, gradient in sent])
        self._update(step_samples)

    def _gradients_by(self, outputs: list[Batch], sizes: Sequence[int], step_samples: int) -> list[Tensor]:
        """Add the loss to `loss_sum`, and return its gradient by this rank's outputs, scaled as DDP wants it: [n, ...]
        for each of their floating tensors, over all microbatches.
        """
        counted = [one for one, size in zip(outputs, sizes, strict=True) if size]
        mine = concatenate([map_tensors(Tensor.detach, one) for one in counted or [map_tensors(_none, outputs[0])]])
        for one in tensors_of(mine):
            if one.shape[:1] != (sum(sizes),):
                rule = f"must have a row for each of the {sum(sizes)} samples to be put together"
                name = type(self.forward.task).__name__
                raise ConfigError(
                    "the outputs of forward()", list(one.shape), rule, f"return such from {name}.forward()"
                )
        own = [one.requires_grad_() for one in _floats(mine)]
        rank, ranks = self.group.rank, self.group.world_size
        ends = [step_samples * number // ranks for number in range(ranks + 1)]
        counts = [end - start for start, end in itertools.pairwise(ends)]

        def whole(tensor: Tensor) -> Tensor:
            parts = self.group.concatenated(tensor, counts)
            return torch.cat([*parts[:rank], tensor, *parts[rank + 1 :]])

        with torch.enable_grad(), self.forward.spec.autocast_context(self.group.device):
            loss = self.forward.task.joint_loss(map_tensors(whole, mine))
            scaled = self.scaler.scale(loss * ranks) if self.scaler.is_enabled() else loss * ranks
            found = torch.autograd.grad(scaled, own, allow_unused=True)
        self.loss_sum.add_(loss.detach(), alpha=1 / ranks)
        return [
            torch.zeros_like(one) if gradient is None else gradient for one, gradient in zip(own, found, strict=True)
        ]


@contextlib.contextmanager
def _looking(model: nn.Module) -> Iterator[None]:
    """Without a graph; buffers (BatchNorm's statistics) are put back, for the same pass comes again."""
    kept = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        yield
        for buffer, before in zip(model.buffers(), kept, strict=True):
            buffer.copy_(before)


def _floats(outputs: Any) -> list[Tensor]:
    return [one for one in tensors_of(outputs) if one.is_floating_point()]


def _none(tensor: Tensor) -> Tensor:
    return tensor[:0]


def _rows(output: Tensor, gradient: Tensor, start: int, size: int) -> Tensor:
    """The rows of a microbatch; zeros for one that has no sample of the step and only takes part."""
    return gradient[start : start + size].to(output.dtype) if size else torch.zeros_like(output)
