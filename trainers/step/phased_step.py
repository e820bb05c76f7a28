"""Take steps of several phases, each with its own loss and optimizer.

Adversarial training and gradient penalties are such.
"""

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from torch import Tensor, nn
from torch.optim import Optimizer

from trainers.data.batch import Batch, map_tensors
from trainers.devices.group import Group
from trainers.errors import ConfigError, shorten
from trainers.model.joined_optimizer import JoinedOptimizer
from trainers.model.strategy import unused_parameters
from trainers.step.forward import ForwardPass
from trainers.step.train_step import WEIGHTLESS, Losses, TrainStep
from trainers.task import Task

logger = logging.getLogger(__name__)

ONLY = "train"
"""The phase of a task that has one optimizer."""


def is_phased(task: Task) -> bool:
    """Return whether the task says itself what a step does.

    Else all of its optimizers go by one backward of its loss.
    """
    return any(
        getattr(type(task), name) is not getattr(Task, name)
        for name in ("training_step", "phases")
    )


@dataclass(frozen=True)
class PhasePass(ForwardPass):
    """The bare model in one phase, and what it trains."""

    phase: str
    optimizer: Optimizer
    others: tuple[nn.Parameter, ...]
    """What the optimizers of other phases hold."""

    @property
    def said(self) -> str:
        """The task's method, for a sentence."""
        return f"training_step() in phase {self.phase}"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let no parameter of another phase require a gradient inside.

        Gradients only go through it.
        """
        trained = [parameter for parameter in self.others if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the phase."""
        # Tensors of its own: a gradient that this phase asks for by them is none of the
        # next.
        given = map_tensors(Tensor.detach, self.spec.convert_batch(batch))
        try:
            with self.spec.autocast_context(self.device):
                loss = self.scalar(
                    self.task.training_step(self.model, given, self.phase)
                )
        except RuntimeError as error:
            self.explain(error, batch)
            raise
        if not loss.requires_grad:
            rule = "gives a loss that depends on no parameter of that phase's optimizer"
            raise ConfigError(
                f"{type(self.task).__name__}.training_step()",
                self.phase,
                rule,
                "return one that does",
            )
        return loss


def make_phases(forward: ForwardPass, optimizer: Optimizer) -> list[PhasePass]:
    """Return a task's phases in the order of its optimizers; none of usual steps."""
    task = forward.task
    given = {item.name: getattr(forward, item.name) for item in fields(forward)}
    if not is_phased(task):
        return []
    parts = (
        optimizer.parts if isinstance(optimizer, JoinedOptimizer) else {ONLY: optimizer}
    )
    held = {
        name: [one for group in part.param_groups for one in group["params"]]
        for name, part in parts.items()
    }
    for name, parameters in held.items():
        if not any(parameter.requires_grad for parameter in parameters):
            rule = "has no parameter that requires a gradient"
            fix = "leave it out, or give it what it trains"
            raise ConfigError(f"{type(task).__name__}.optimizer()", name, rule, fix)
    return [
        PhasePass(
            **given,
            phase=name,
            optimizer=part,
            others=tuple(
                one for other, theirs in held.items() if other != name for one in theirs
            ),
        )
        for name, part in parts.items()
    ]


class PhasedStep(TrainStep):
    """Take for each phase in turn a whole step of its optimizer, of all microbatches.

    The model stays bare: a phase's gradients are averaged over ranks once they are
    complete, so that a loss may have gradients in it. Buffers are rank 0's when a phase
    begins, as DDP has it. A gradient that is not finite in one phase ends the updates
    of all.
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
        self.phases = {one.phase: _Phase(one, self) for one in phases}

    @property
    def bad(self) -> Tensor:
        """As TrainStep's, of any phase."""
        return functools.reduce(
            operator.or_, (phase.bad for phase in self.phases.values())
        )

    def __call__(
        self,
        batches: Iterator[Batch],
        sizes: Sequence[int],
        step_samples: int,
        idle: bool,
    ) -> None:
        """As TrainStep's; holds all its microbatches."""
        names = self._due()
        held = [next(batches) for _ in sizes]
        for name in names:
            phase = self.phases[name]
            with phase.forward.alone():
                phase(iter(held), sizes, step_samples, idle)
        self.number += 1

    def _due(self) -> Sequence[str]:
        """The phases of this step."""
        names = self.forward.task.phases(self.number)
        if names is None:
            return list(self.phases)
        if (
            isinstance(names, str)
            or not names
            or len({*names}) < len(names)
            or not {*names} <= self.phases.keys()
        ):
            rule = f"must be different ones among {', '.join(self.phases)}, in a sequence, and one at least"
            fix = "name what optimizer() returns, or return None for all of them"
            raise ConfigError(
                f"{type(self.forward.task).__name__}.phases({self.number})",
                names,
                rule,
                fix,
            )
        return names

    def open_losses(self, steps: int) -> Callable[[], Losses]:
        """Open those of all phases together and, where there are several, of each.

        A phase's are over its own steps.
        """
        opened = {
            name: phase.open_losses(phase.steps) for name, phase in self.phases.items()
        }

        def losses() -> Losses:
            read = {name: losses_of() for name, losses_of in opened.items()}
            of_phases = {
                f"train_loss_{name}": of_phase["train_loss"]
                for name, of_phase in read.items()
            }
            whole = {
                "train_loss": (sum(loss for loss, _ in of_phases.values()), steps),
                WEIGHTLESS: max(
                    of_phase[WEIGHTLESS] for of_phase in read.values()
                ),  # in each phase of a step, or none
            }
            return whole | (of_phases if len(of_phases) > 1 else {})

        return losses

    def set_losses(self, losses: Mapping[str, tuple[float, int]]) -> None:
        """As TrainStep's."""
        for name, phase in self.phases.items():
            loss, phase.steps = losses.get(f"train_loss_{name}", losses["train_loss"])
            phase.set_losses(
                {"train_loss": (loss, phase.steps), WEIGHTLESS: losses[WEIGHTLESS]}
            )

    def take_losses(self, steps: int) -> Callable[[], Losses]:
        """As TrainStep's."""
        losses = self.open_losses(steps)
        for phase in self.phases.values():
            phase.take_losses(steps)
            phase.steps = 0
        return losses


class _Phase(TrainStep):
    """The steps of one phase."""

    forward: PhasePass

    def __init__(self, forward: PhasePass, whole: PhasedStep) -> None:
        super().__init__(forward, forward.optimizer, whole.group, whole.clip_grad_norm)
        self.scaler = whole.scaler
        self._found_inf = whole._found_inf
        self.steps = 0
        """Since the loss was last taken."""
        self._looks = self.group.rank == 0
        """Whether the next step looks for parameters that have no part in it."""

    def _update(self) -> None:
        self.steps += 1
        if self._looks and (names := unused_parameters(self.forward.model)):
            words = "the loss of phase %s does not depend on %s: they are not trained"
            logger.warning(words, self.forward.phase, shorten(names))
        self._looks = False
        super()._update()
