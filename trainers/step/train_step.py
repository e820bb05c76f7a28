"""Take one optimizer step: the exact global mean over microbatches, and an update.

A step may also have several phases, each with its own loss and optimizer, for
adversarial training or gradient penalties.
"""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from trainers.config.sections import ScalingRule
from trainers.data.batch import Batch, map_tensors
from trainers.data.feed import Feed
from trainers.data.sampler import StepSampler
from trainers.devices.device import to_host
from trainers.devices.group import Group
from trainers.errors import MISSING, ConfigError, shorten
from trainers.model.moving_average import MovingAverage
from trainers.model.optimizer import (
    ONLY,
    JoinedOptimizer,
    check_groups,
    check_lr,
    optimizers_of,
    scaled_options,
    warn_untrained,
)
from trainers.model.precision import PrecisionSpec
from trainers.model.schedule import Schedule
from trainers.model.sharding import Used, is_shard, is_sharded, local
from trainers.model.state import AsMade, find_beside, parameters_of
from trainers.model.strategy import (
    ANOTHER_WAY,
    Replicated,
    as_real,
    average_present,
    no_sync,
    share_tensors,
    unused_parameters,
)
from trainers.step.ceiling import Ceiling
from trainers.step.forward import ForwardPass, bare_of
from trainers.task import Task, overrides, weight_of

logger = logging.getLogger(__name__)

Losses = dict[str, tuple[float, int]]
"""By the name that is logged: the sum of a loss over steps, and the number of steps."""
WEIGHTLESS = "weightless"
"""The key of `Losses` for the number of steps whose samples all have weight
zero, and which therefore have no mean loss.
"""


class TrainStep:
    """Takes optimizer steps and sums losses on the device, without waiting for it.

    The loss of a step is the mean over its global weight: microbatch m of rank
    r contributes `loss * weight / global weight`, times the world size because
    DDP averages. So short last steps, uneven microbatches and ranks without
    samples give the same result as one process.

    After a non-finite gradient no further step changes the parameters: the
    loop reads `bad` every few steps and ends the run. A loss scaler handles
    such gradients itself.
    """

    def __init__(
        self,
        forward: ForwardPass,
        optimizer: Optimizer,
        group: Group,
        clip_grad_norm: float | None = None,
    ) -> None:
        self.forward = forward
        self.optimizer = optimizer
        self.group = group
        self.clip_grad_norm = clip_grad_norm
        device = group.device
        self.scaler = torch.amp.GradScaler(
            device.type, enabled=forward.spec.scaler
        )
        # MPS has no float64.
        exact = torch.float32 if device.type == "mps" else torch.float64
        self.loss_sum = torch.zeros((), dtype=exact, device=device)
        self.weightless = torch.zeros((), dtype=torch.int64, device=device)
        """Number of steps, since the last `take_losses`, whose samples all
        have weight zero.
        """
        self._bad_loss = torch.zeros((), dtype=torch.bool, device=device)
        self._found_inf = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)
        self.capture = ""
        """What became of capturing the step as a CUDA graph, in words."""
        self.strayed = False
        """Whether throw-away steps were run along with the last step."""
        self.number = 0
        """Number of the next step, from 0; only PhasedStep counts it, because
        phases depend on it.
        """
        self.copies_gradients = False
        """Whether gradients are copied because the model's next pass would
        overwrite them, as CUDA graphs do.
        """
        self._seeds: dict[tuple[float, torch.dtype, torch.Size], Tensor] = {}
        self._weighs_samples = not overrides(forward.task, "weight")
        self._parameters = parameters_of(optimizer)
        groups = optimizer.param_groups
        self._base_lrs = [float(param_group["lr"]) for param_group in groups]
        self._base_options = [dict(param_group) for param_group in groups]
        self._scaled: Callable[[Mapping[str, Any]], dict[str, Any]] = (
            lambda options: {}
        )
        """Returns the given options that `lr_scaling` changes, with their new values."""
        self.wanted_lrs = self._base_lrs
        """The learning rate of every group."""
        self.by_hand = False
        """Whether gradients are averaged over ranks once they are complete,
        and not by DDP in the backward pass.
        """
        self.used = Used(forward.model)
        self._find_beside()
        self._fused = all(param_group.get("fused") for param_group in groups)
        # torch's one-pass check does not support bfloat16 on CUDA (pytorch
        # issue 127176), and exists on MPS only in some versions.
        narrow = any(p.dtype is torch.bfloat16 for p in self._parameters)
        self._one_pass = device.type == "cpu" or (
            device.type == "cuda" and not narrow
        )
        if forward.spec.scaler and self._fused:
            for part in optimizers_of(optimizer):
                _start_momentum(part)

    def _find_beside(self) -> None:
        """Find all trained parameters, and those that DDP does not average."""
        model = self.forward.model
        self._every = list(
            dict.fromkeys([*model.parameters(), *self._parameters])
        )
        self._required = [parameter.requires_grad for parameter in self._every]
        self._beside: list[
            nn.Parameter
        ] = []  # what is trained, but not in the wrapped model
        if isinstance(model, Replicated):
            averaged = {p for p in model.parameters() if p.requires_grad}
            self._beside = [p for p in self._parameters if p not in averaged]
        elif not is_sharded(model):
            self.by_hand = self.group.world_size > 1

    @property
    def bad(self) -> Tensor:
        """Bool: whether a loss or a gradient was not finite on this rank.

        With a loss scaler, gradients do not count.
        """
        return (
            self._bad_loss
            | ~torch.isfinite(self.loss_sum)
            | self._found_inf.bool()
        )

    def __call__(
        self,
        batches: Iterator[Batch],
        sizes: Sequence[int],
        step_samples: int,
        idle: bool,
    ) -> None:
        """Take `len(sizes)` microbatches from `batches` and update the parameters.

        `step_samples` is the step's global batch size. An `idle` rank, which
        has no samples of the step, and a microbatch of size zero take part
        with weight zero, so that collectives match. Adds this rank's part of
        the step's mean loss to `loss_sum`. Every rank must call it.
        """
        for parameter in self._parameters:
            parameter.grad = None
        if self.by_hand:
            # As DDP does before a forward: BatchNorm's statistics stay equal
            # on all ranks.
            share_tensors(list(self.forward.model.buffers()), self.group)
        shares, batches = self._shares(batches, sizes, step_samples, idle)
        last = len(sizes) - 1
        for index, share in enumerate(shares):
            batch = next(batches)
            fresh: list[nn.Parameter] = []
            if self.copies_gradients and index < last:
                fresh = [p for p in self._parameters if p.grad is None]
            if index == last and not self.by_hand:
                loss = self._last_pass(batch, share)
            else:
                with no_sync(self.forward.model):
                    loss = self._loss(batch)
                    self._backward(loss, share)
            for parameter in fresh:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
            if isinstance(share, Tensor):
                # A microbatch without labels counts for nothing: torch's mean
                # over none is NaN, with gradient zero.
                self.loss_sum += (loss.detach() * share).masked_fill(
                    share == 0, 0.0
                )
            else:
                self.loss_sum.add_(loss.detach(), alpha=share)
        self._update()

    def _loss(self, batch: Batch) -> Tensor:
        """Return a microbatch's loss; ConfigError if computing it changed a gradient."""
        before = [
            (parameter, parameter.grad, parameter.grad._version)
            for parameter in self._parameters
            if parameter.grad is not None
        ]
        loss = self.forward.loss(batch)
        if any(
            parameter.grad is not gradient or gradient._version != version
            for parameter, gradient, version in before
        ):
            raise ConfigError(
                f"{type(self.forward.task).__name__}.loss()",
                MISSING,
                "changes gradients of earlier microbatches, which are then lost",
                "leave out zero_grad(), backward() and step(), which the run calls",
            )
        return loss

    def _last_pass(self, batch: Batch, share: float | Tensor) -> Tensor:
        """Run a step's last microbatch, in which DDP averages; return its loss."""
        wrapped = self.forward.model
        if not isinstance(wrapped, Replicated):
            loss = self._loss(batch)
            self._backward(loss, share)
            return loss
        wrapped.called = False
        loss = self._loss(batch)
        if not wrapped.called:
            self.average_by_hand(ANOTHER_WAY)
        self._backward(loss, share)
        wrapped.check_finished()
        return loss

    def average_by_hand(self, why: str) -> None:
        """From now on, average gradients after the backward pass and not within it.

        Every rank must call it.
        """
        if not self.by_hand and self.group.rank == 0:
            logger.info(
                "gradients are averaged after the backward pass, not in it: %s",
                why,
            )
        self.by_hand = True

    def follow_frozen(self) -> None:
        """Adapt to parameters that were frozen or unfrozen since the last step.

        Every rank must call it.
        """
        owner = type(self.forward.task).__name__
        check_groups(self.optimizer, owner, len(self.wanted_lrs))
        required = [parameter.requires_grad for parameter in self._every]
        if required != self._required:
            self._required = required
            self._refrozen()

    def _refrozen(self) -> None:
        model = self.forward.model
        if is_sharded(model):
            raise ConfigError(
                "strategy",
                "fsdp",
                "shards what requires a gradient at the start, and the task has frozen or unfrozen parameters since",
                "set `strategy: ddp`",
            )
        if self.group.world_size > 1:
            self.average_by_hand("the task has frozen or unfrozen parameters")
        if self.group.rank == 0:
            warn_untrained(bare_of(model), self.optimizer, self.forward.task)

    def _backward(self, loss: Tensor, share: float | Tensor) -> None:
        """Compute gradients of `loss * share * world size`.

        If possible, the factor is passed as the initial gradient of the
        backward pass.
        """
        scale = share * self.group.world_size
        if isinstance(scale, Tensor) or self.scaler.is_enabled():
            self.scaler.scale(loss * scale).backward()
        elif scale == 1.0:
            loss.backward()
        else:
            key = (scale, loss.dtype, loss.shape)
            if key not in self._seeds:
                self._seeds[key] = torch.full_like(
                    loss, scale, requires_grad=False
                )
            loss.backward(self._seeds[key])

    def _shares(
        self,
        batches: Iterator[Batch],
        sizes: Sequence[int],
        step_samples: int,
        idle: bool,
    ) -> tuple[Sequence[float | Tensor], Iterator[Batch]]:
        """Return each microbatch's share of the global weight, and the batches.

        If weights are sample counts, no data is read; any other weight needs
        all batches of the step first, and one sum over ranks.
        """
        if self._weighs_samples:
            return [
                0.0 if idle else size / step_samples for size in sizes
            ], batches
        held = [next(batches) for _ in sizes]
        task = self.forward.task
        weights = torch.stack(
            [weight_of(task, batch, 0).to(self.loss_sum) for batch in held]
        )
        for index, size in enumerate(sizes):
            if idle or size == 0:
                weights[index] = 0
        total = self.group.sum(weights.sum())
        self.weightless += total == 0
        least = torch.finfo(weights.dtype).tiny
        return list(weights / total.clamp(min=least)), iter(held)

    def _gradients(self) -> list[Tensor]:
        """Return all gradients, complex ones as real-valued views (`view_as_real`)."""
        found = []
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            if parameter.grad is not None:
                found.append(as_real(parameter.grad))
        return found

    def _clip(self, gradients: list[Tensor], most: float) -> Tensor:
        """Scale gradients down to a norm of at most `most`; return the original norm.

        The norm is taken over all ranks' shards.
        """
        sharded = any(map(is_shard, gradients))
        if sharded:  # else torch processes the gradients one by one
            gradients = [local(gradient) for gradient in gradients]
        norm = get_total_norm(gradients)
        if sharded:
            exact = torch.promote_types(norm.dtype, torch.float32)
            norm = self.group.sum(norm.to(exact).square()).sqrt()
        torch._foreach_mul_(gradients, (most / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _average(self) -> None:
        """Average over ranks the gradients that the backward pass did not average."""
        if is_sharded(self.forward.model):
            self.used.add_gradients(self._parameters)
        average_present(
            self._parameters if self.by_hand else self._beside, self.group
        )

    def _update(self) -> None:
        self._average()
        scaled = self.scaler.is_enabled()
        if scaled:
            self.scaler.unscale_(self.optimizer)
        gradients = self._gradients()
        checked = gradients
        if self.clip_grad_norm is not None:
            checked = [self._clip(gradients, self.clip_grad_norm)]
        if scaled:
            # For infinite gradients the scaler skips the step and lowers the
            # scale.
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return
        if gradients and self._one_pass:
            # This multiplies by one and sets the flag, which no step clears.
            torch._amp_foreach_non_finite_check_and_unscale_(
                checked, self._found_inf, self._one
            )
        elif gradients:
            bad = (~torch.isfinite(get_total_norm(checked))).to(
                self._found_inf
            )
            torch.maximum(self._found_inf, bad, out=self._found_inf)
        if self._fused:
            self.optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not bool(self._found_inf):
            # An optimizer without a fused step: this waits for the device.
            self.optimizer.step()

    def set_lr(self, factor: float) -> None:
        """Set every group's learning rate to its base rate times `factor`."""
        self.set_lrs([base * factor for base in self._base_lrs])

    def set_lrs(self, lrs: list[float]) -> None:
        """Set every group's learning rate."""
        for param_group, lr in zip(
            self.optimizer.param_groups, lrs, strict=True
        ):
            old = param_group["lr"]
            if isinstance(old, Tensor):
                # A new tensor: several groups may hold the same one.
                param_group["lr"] = torch.full_like(old, lr)
            else:
                param_group["lr"] = lr
        self.wanted_lrs = lrs

    def follow(
        self, schedule: Schedule, step: int, scale: float = 1.0
    ) -> None:
        """Set the momenta and, times `scale`, the learning rates of a step (from 0)."""
        self.set_lrs([lr * scale for lr in schedule.lrs(step)])
        for param_group, name, value in self._cycled(schedule):
            param_group[name] = value

    def _cycled(
        self, schedule: Schedule
    ) -> list[tuple[dict[str, Any], str, Any]]:
        """Return group, name and value of each momentum to set."""
        return schedule.cycled(self.optimizer, self._scaled)

    def set_options(self, scaling: ScalingRule, size: int) -> None:
        """Set the options, besides the rate, that `lr_scaling` changes at this size."""
        self._scaled = partial(scaled_options, scaling, size)
        groups = self.optimizer.param_groups
        for param_group, base in zip(groups, self._base_options, strict=True):
            param_group.update(self._scaled(base))

    def resized(self) -> None:
        """Note that the number of samples in a step changes from here on."""

    def check_lr(self) -> None:
        """Raise ConfigError if something else has changed the learning rate."""
        check_lr(
            self.optimizer, type(self.forward.task).__name__, self.wanted_lrs
        )

    def open_losses(self, steps: int) -> Callable[[], Losses]:
        """Return a function that waits for the summed losses of `steps` steps.

        The sums cover all ranks and all steps since `take_losses`; they are
        not reset.

        Every rank must call it.
        """
        loss_sum = self.group.sum(self.loss_sum)
        read = to_host(torch.stack([loss_sum, self.weightless.to(loss_sum)]))

        def losses() -> Losses:
            loss, weightless = read()
            return {
                "train_loss": (loss, steps),
                WEIGHTLESS: (0.0, int(weightless)),
            }

        return losses

    def set_losses(self, losses: Mapping[str, tuple[float, int]]) -> None:
        """Continue from sums that `open_losses` returned, on any number of ranks."""
        loss, _ = losses["train_loss"]
        self.loss_sum.fill_(loss if self.group.rank == 0 else 0.0)
        self.weightless.fill_(losses[WEIGHTLESS][1])

    def take_losses(self, steps: int) -> Callable[[], Losses]:
        """Return the same as `open_losses`, and reset the sums."""
        losses = self.open_losses(steps)
        self._bad_loss |= ~torch.isfinite(self.loss_sum)
        self.loss_sum.zero_()
        self.weightless.zero_()
        return losses


def _start_momentum(optimizer: Optimizer) -> None:
    """Start SGD momentum at zero, which gives the same first step as no buffer.

    Otherwise a fused first step that the loss scaler skips, as it often does,
    would leave a momentum buffer that was never written (seen in torch 2.15).
    """
    for param_group in optimizer.param_groups:
        if param_group.get("momentum") and param_group.get("dampening") == 0:
            for parameter in param_group["params"]:
                zeros = torch.zeros_like(parameter)
                optimizer.state[parameter].setdefault("momentum_buffer", zeros)


@dataclass
class Trained:
    """A bare model, neither compiled nor wrapped, and what is trained with it."""

    forward: ForwardPass
    """The forward pass of the bare module, whose state_dict has no wrapper's prefix."""
    optimizer: Optimizer
    ema: MovingAverage | None
    as_made: AsMade
    """The new model's properties, to find out what has changed since."""
    names_beside: Collection[str]
    """Names of the task's tensors outside the model that are trained with it."""
    frozen: dict[str, str] | None
    """Digests of the parameters that checkpoints leave out; None if
    checkpoints contain all.
    """

    @property
    def model(self) -> nn.Module:
        """The bare module."""
        return self.forward.model

    @property
    def beside(self) -> dict[str, Tensor]:
        """The present tensors of `names_beside`: a forward pass may assign others."""
        return find_beside(self.forward.task, self.names_beside)


@dataclass
class Replica(Trained):
    """One worker's copy of the model, or its shard, and all that its steps need."""

    group: Group
    step: TrainStep
    sampler: StepSampler
    train_feed: Feed
    val_feed: Feed | None
    """None if the task has no validation split."""
    total_steps: int
    microbatch_size: int
    accumulation: int
    ceiling: Ceiling
    """Records a microbatch that runs out of memory."""
    schedule: Schedule | None
    """A torch scheduler; None if the learning rate is a function of the step."""
    flops_per_sample: float | None
    samples: str
    """Digest of a few training samples."""
    held_back: str
    """Digest of a few validation samples."""
    even: bool
    """Whether forward is a collective, by FSDP or by the task: then every rank
    runs equally many microbatches.
    """
    warnings: list[str]
    """Findings before the first step that make figures doubtful; the same on
    every rank.
    """

    @property
    def device(self) -> torch.device:
        """This worker's device."""
        return self.group.device

    @property
    def spec(self) -> PrecisionSpec:
        """The run's precision."""
        return self.forward.spec

    @property
    def feeds(self) -> list[Feed]:
        """The feeds of all splits that exist."""
        return [
            feed
            for feed in (self.train_feed, self.val_feed)
            if feed is not None
        ]

    def close(self) -> None:
        """End the loader processes of the feeds and release the data."""
        for feed in self.feeds:
            feed.close()


def is_phased(task: Task) -> bool:
    """Return whether the task defines its own steps or phases.

    If not, one backward pass of its loss serves all of its optimizers.
    """
    return overrides(task, "training_step") or overrides(task, "phases")


@dataclass(frozen=True)
class PhasePass(ForwardPass):
    """A forward pass of the bare model in one phase, and what the phase trains."""

    phase: str
    optimizer: Optimizer
    others: tuple[nn.Parameter, ...]
    """Parameters of the other phases' optimizers."""

    @property
    def said(self) -> str:
        """The task's method and phase, for messages."""
        return f"training_step() in phase {self.phase}"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let no parameter of another phase require a gradient within the block.

        Gradients still flow through those parameters to the phase's own.
        """
        trained = [
            parameter for parameter in self.others if parameter.requires_grad
        ]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the phase."""
        # Detached: if the task lets these inputs require a gradient, that does
        # not affect the next phase.
        given = map_tensors(Tensor.detach, self.spec.convert_batch(batch))
        with self.spec.autocast_context(self.device):
            loss = self.task.training_step(self.model, given, self.phase)
            return self.learnable(self.scalar(loss))


def make_phases(forward: ForwardPass, optimizer: Optimizer) -> list[PhasePass]:
    """Return the task's phases in the order of its optimizers; [] if it has no phases."""
    task = forward.task
    if not is_phased(task):
        return []
    parts = {ONLY: optimizer}
    if isinstance(optimizer, JoinedOptimizer):
        parts = optimizer.parts
    every = parameters_of(optimizer)
    phases = []
    for name, part in parts.items():
        own = set(parameters_of(part))
        if not any(parameter.requires_grad for parameter in own):
            raise ConfigError(
                f"{type(task).__name__}.optimizer()",
                name,
                "has no parameter that requires a gradient",
                "leave it out, or give it what it trains",
            )
        others = tuple(
            parameter for parameter in every if parameter not in own
        )
        phases.append(
            PhasePass(
                **vars(forward), phase=name, optimizer=part, others=others
            )
        )
    return phases


class PhasedStep(TrainStep):
    """Takes a whole step over all microbatches for each phase in turn.

    The model stays bare: a phase's gradients are averaged over ranks once they
    are complete, so a loss may itself contain gradients. Buffers are copied
    from rank 0 when a phase begins, as DDP does. A non-finite gradient in one
    phase stops the updates of all phases.
    """

    def __init__(
        self,
        forward: ForwardPass,
        optimizer: Optimizer,
        group: Group,
        clip_grad_norm: float | None,
        phases: Sequence[PhasePass],
    ) -> None:
        super().__init__(forward, optimizer, group, clip_grad_norm)
        self.phases = {phase.phase: _Phase(phase, self) for phase in phases}

    @property
    def bad(self) -> Tensor:
        """Whether `bad` is set in any phase."""
        return torch.stack([phase.bad for phase in self.phases.values()]).any()

    def __call__(
        self,
        batches: Iterator[Batch],
        sizes: Sequence[int],
        step_samples: int,
        idle: bool,
    ) -> None:
        """Take the step as TrainStep does, with all its microbatches in memory."""
        names = self._due()
        held = [next(batches) for _ in sizes]
        for name in names:
            phase = self.phases[name]
            with phase.forward.alone():
                phase(iter(held), sizes, step_samples, idle)
        self.number += 1

    def _due(self) -> Sequence[str]:
        """Return the names of the phases of this step."""
        names = self.forward.task.phases(self.number)
        if names is None:
            return list(self.phases)
        known = not isinstance(names, str) and {*names} <= self.phases.keys()
        if not known or not names or len({*names}) < len(names):
            raise ConfigError(
                f"{type(self.forward.task).__name__}.phases({self.number})",
                names,
                f"must be a sequence of one or more of these names, without repeats: {', '.join(self.phases)}",
                "return names of the optimizers in optimizer(), or None for all of them",
            )
        return names

    def open_losses(self, steps: int) -> Callable[[], Losses]:
        """Open the losses of all phases together and, if there are several, of each.

        The loss of a phase is summed over the steps in which it ran.
        """
        opened = {
            name: phase.open_losses(phase.steps)
            for name, phase in self.phases.items()
        }

        def losses() -> Losses:
            read = {name: losses_of() for name, losses_of in opened.items()}
            whole: Losses = {"train_loss": (0.0, steps), WEIGHTLESS: (0.0, 0)}
            for name, of_phase in read.items():
                loss, _ = whole["train_loss"]
                whole["train_loss"] = (loss + of_phase["train_loss"][0], steps)
                # A step is weightless in all of its phases or in none.
                whole[WEIGHTLESS] = max(
                    whole[WEIGHTLESS], of_phase[WEIGHTLESS]
                )
                if len(read) > 1:
                    whole[f"train_loss_{name}"] = of_phase["train_loss"]
            return whole

        return losses

    def set_losses(self, losses: Mapping[str, tuple[float, int]]) -> None:
        """Continue from sums that `open_losses` returned."""
        for name, phase in self.phases.items():
            loss, phase.steps = losses.get(
                f"train_loss_{name}", losses["train_loss"]
            )
            phase.set_losses(
                {
                    "train_loss": (loss, phase.steps),
                    WEIGHTLESS: losses[WEIGHTLESS],
                }
            )

    def take_losses(self, steps: int) -> Callable[[], Losses]:
        """Return the same as `open_losses`, and reset the sums."""
        losses = self.open_losses(steps)
        for phase in self.phases.values():
            phase.take_losses(steps)
            phase.steps = 0
        return losses


class _Phase(TrainStep):
    """The steps of one phase."""

    forward: PhasePass

    def __init__(self, forward: PhasePass, whole: PhasedStep) -> None:
        super().__init__(
            forward, forward.optimizer, whole.group, whole.clip_grad_norm
        )
        self.scaler = whole.scaler
        self._found_inf = whole._found_inf
        self.steps = 0
        """Number of steps since the loss was last taken."""
        self._looks = self.group.rank == 0
        """Whether the next step looks for parameters that the loss does not
        depend on.
        """

    def _update(self) -> None:
        self.steps += 1
        if self._looks and (names := unused_parameters(self.forward.model)):
            logger.warning(
                "the loss of phase %s does not depend on %s: they are not trained",
                self.forward.phase,
                shorten(names),
            )
        self._looks = False
        super()._update()
