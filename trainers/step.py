"""One optimizer step: forward and backward of each microbatch, exact global mean, clip, guarded update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from trainers.parallel import Group, no_sync
from trainers.precision import PrecisionSpec
from trainers.task import Batch, Task


class TrainStep:
    """Runs one step and keeps its sums on the device: nothing here waits for the device.

    The loss of a step is the mean over its global weight: microbatch m of rank r contributes
    `loss * weight / global weight`, times the world size because DDP averages. So short last steps, uneven
    microbatches and ranks without a sample come out as one process would have them.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: Optimizer,
        spec: PrecisionSpec,
        group: Group,
        clip_grad_norm: float | None = None,
    ) -> None:
        self.model, self.task, self.optimizer, self.spec, self.group = model, task, optimizer, spec, group
        self.clip_grad_norm = clip_grad_norm
        self.scaler = torch.amp.GradScaler(group.device.type, enabled=spec.scaler)
        # MPS has no float64.
        exact = torch.float32 if group.device.type == "mps" else torch.float64
        self.loss_sum = torch.zeros((), dtype=exact, device=group.device)
        self.bad = torch.zeros((), dtype=torch.bool, device=group.device)
        self._weighs_samples = type(task).weight is Task.weight
        self._base_lrs = [float(param_group["lr"]) for param_group in optimizer.param_groups]
        self._fused = all(param_group.get("fused") for param_group in optimizer.param_groups)

    def __call__(self, batches: Iterator[Batch], sizes: Sequence[int], step_samples: int, idle: bool) -> None:
        """Take `len(sizes)` microbatches from `batches` and update the parameters.

        `step_samples` is the global batch of this step; an `idle` rank has no sample in it and takes part at weight
        zero, so that collectives match. Adds this rank's part of the step's mean loss to `loss_sum`. Every rank
        must call it.
        """
        self.optimizer.zero_grad(set_to_none=True)
        shares, batches = self._shares(batches, sizes, step_samples, idle)
        step_loss = torch.zeros_like(self.loss_sum)
        last = len(sizes) - 1
        for index, share in enumerate(shares):
            batch = next(batches)
            with contextlib.nullcontext() if index == last else no_sync(self.model):
                loss = self.loss(batch)
                self.scaler.scale(loss * (share * self.group.world_size)).backward()
            step_loss += loss.detach() * share
        self.loss_sum += step_loss
        self._update(step_loss)

    def loss(self, batch: Batch) -> Tensor:
        """Forward and loss of one batch, in this precision."""
        with self.spec.autocast_context(self.group.device):
            outputs = self.task.forward(self.model, self.spec.convert_batch(batch))
            return self.task.loss(outputs, batch)

    def _shares(
        self, batches: Iterator[Batch], sizes: Sequence[int], step_samples: int, idle: bool
    ) -> tuple[Sequence[float | Tensor], Iterator[Batch]]:
        """Each microbatch's share of the global weight.

        Samples are counted without looking at the data; any other weight needs the step's batches first and one sum
        over ranks.
        """
        if self._weighs_samples:
            return [0.0 if idle else size / step_samples for size in sizes], batches
        held = [next(batches) for _ in sizes]
        weights = torch.stack([self.task.weight(batch).to(self.loss_sum) for batch in held])
        if idle:
            weights.zero_()
        return list(weights / self.group.sum(weights.sum())), iter(held)

    def _update(self, step_loss: Tensor) -> None:
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        norm = get_total_norm(gradients)
        if self.clip_grad_norm is not None:
            parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
            clip_grads_with_norm_(parameters, self.clip_grad_norm, norm)
        finite = torch.isfinite(norm)
        if self.scaler.is_enabled():  # infinite gradients are the scaler's business: it skips and lowers the scale
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.bad |= ~torch.isfinite(step_loss)
            return
        self.bad |= ~(finite & torch.isfinite(step_loss))
        if self._fused:
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.step()
        elif bool(finite):  # an optimizer of the task's own without a fused step: this waits for the device
            self.optimizer.step()

    def set_lr(self, factor: float) -> None:
        """Multiply every group's base learning rate."""
        for param_group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            param_group["lr"] = base * factor

    def take_loss(self) -> float:
        """The sum over steps and ranks of the mean losses since the last call. Waits; every rank must call it."""
        total = float(self.group.sum(self.loss_sum))
        self.loss_sum.zero_()
        return total
