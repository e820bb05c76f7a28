"""Run torch's schedulers: the task creates them, the loop steps and saves them.

A scheduler does not see the run's optimizer, only a stand-in with the same
groups and options. The stand-in's learning rates (and momenta, if the
scheduler cycles them) are copied to the optimizer before every step. So
nothing is hooked into the step, which may be captured, compiled or skipped,
and the rates stay exact numbers on the host.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from trainers.config.sections import ScheduleConfig, check_metric, direction_of
from trainers.data.batch_schedule import BatchSchedule
from trainers.errors import CheckpointError, ConfigError, first_line
from trainers.model.optimizer import warmup_steps

_CYCLED = ("momentum", "betas")
_TRIED = 10_000
"""The most steps for which a scheduler is tried, at some 20 microseconds each."""


class StandIn(Optimizer):
    """Has an optimizer's groups and options; its step changes no parameter."""

    def __init__(self, optimizer: Optimizer) -> None:
        given = optimizer.param_groups
        groups = [{**group, "lr": float(group["lr"])} for group in given]
        super().__init__(groups, dict(optimizer.defaults))
        self._given = [group.keys() for group in given]

    def written(self) -> list[dict[str, Any]]:
        """Return, for each group, the options that a scheduler writes.

        These are the learning rate, options that the scheduler added, and
        momenta if it cycles them.
        """
        found = []
        for group, given in zip(self.param_groups, self._given, strict=True):
            names = {"lr"} | (group.keys() - given)
            if "max_momentum" in group:
                names |= {*_CYCLED}
            found.append(
                {name: group[name] for name in group if name in names}
            )
        return found

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing; a scheduler warns unless its optimizer's step was called."""


class Schedule:
    """Advances a scheduler made with a StandIn, and provides the options that it writes.

    After a linear warm-up (`lr_schedule.warmup`), the scheduler is stepped
    after every step or epoch; ReduceLROnPlateau, after every evaluation. All
    ranks do the same.
    """

    def __init__(
        self,
        given: LRScheduler | tuple[LRScheduler, str],
        stand_in: StandIn,
        config: ScheduleConfig,
        total_steps: int,
        batches: BatchSchedule | None = None,
    ) -> None:
        """`given` is what the task's schedule() returned.

        `batches` is passed on to `warmup_steps`.
        """
        self.scheduler, self.every = (
            given if isinstance(given, tuple) else (given, "step")
        )
        self.figure = "val_loss"
        """The metric that ReduceLROnPlateau depends on."""
        self._stand_in = stand_in
        self._warmup = warmup_steps(config, total_steps, batches)
        self.by_figure = isinstance(self.scheduler, ReduceLROnPlateau)
        if self.every not in ("step", "epoch"):
            self.figure = self.every
            if not self.by_figure:
                raise _refused(
                    self.every,
                    "must be step or epoch",
                    'return (scheduler, "epoch")',
                )
        if self.scheduler.optimizer is not stand_in:
            raise _refused(
                self._name,
                "belongs to a different optimizer from the one that schedule() was given",
                "make it with `optimizer`, the first argument of schedule()",
            )
        if isinstance(self.scheduler, ReduceLROnPlateau):
            _check_mode(self.scheduler, self.figure)

    @property
    def _name(self) -> str:
        return type(self.scheduler).__name__

    def try_to_the_end(self, total_steps: int, epochs: Sequence[int]) -> None:
        """Raise ConfigError for a scheduler that ends before the run.

        The scheduler is stepped as often as in the run (at most 10,000 times).

        `epochs` lists the step at which each epoch ends.
        """
        if self.by_figure:
            return
        count = total_steps - self._warmup
        if self.every == "epoch":
            count = sum(step > self._warmup for step in epochs)
        tried = min(count, _TRIED)
        if isinstance(self.scheduler, OneCycleLR):  # which says how long it is
            tried = min(count, self.scheduler.total_steps + 1)
        for number in range(tried):
            self._step(
                f"ends after {number} of the run's {count} {self.every}s"
            )

    def _step(self, rule: str) -> None:
        """Step the scheduler; ConfigError with `rule` if it fails, as after its end."""
        self._stand_in.step()
        try:
            self.scheduler.step()
        except Exception as error:
            raise _refused(
                self._name,
                f"{rule}: {first_line(error)}",
                "make it as long as the run without warm-up, or, if a shorter run saved it, start over with --fresh",
            ) from error

    def lrs(self, step: int) -> list[float]:
        """Return each group's learning rate for `step`, counted from 0."""
        share = 1.0
        if self._warmup:
            share = min(1.0, (step + 1) / self._warmup)
        return [
            float(group["lr"]) * share for group in self._stand_in.param_groups
        ]

    def cycled(
        self,
        optimizer: Optimizer,
        scaled: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ) -> list[tuple[dict[str, Any], str, Any]]:
        """Return group, name and value of each momentum that the scheduler changed.

        `scaled` returns those of the given options that the present batch size
        changes.
        """
        cycled = []
        groups = optimizer.param_groups
        for group, written in zip(
            groups, self._stand_in.written(), strict=True
        ):
            momenta = {
                name: written[name] for name in _CYCLED if name in written
            }
            momenta |= scaled(momenta)
            for name, value in momenta.items():
                if group[name] != value:
                    cycled.append((group, name, value))
        return cycled

    def stepped(self, step: int, ends_epoch: bool) -> None:
        """Step the scheduler if it is due after training step `step`."""
        is_due = self.every == "step" or ends_epoch
        if is_due and step > self._warmup and not self.by_figure:
            self._step(f"ends at step {step}")

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        """Step a scheduler that depends on a metric.

        Raises ConfigError if the evaluation lacks that metric.
        """
        if not self.by_figure:
            return
        check_metric("schedule()", self.figure, figures)
        if step > self._warmup:
            self.scheduler.step(figures[self.figure])  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Return, as plain data, the scheduler's state and the options it writes."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "groups": self._stand_in.written(),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless `state` is laid out like this scheduler's state.

        A user's scheduler may have gained attributes and options since.
        """
        theirs = _layout(state)
        ours = _layout(self.state_dict())
        is_torchs = type(self.scheduler).__module__.startswith("torch.")
        fits = operator.eq if is_torchs else operator.le
        if len(ours) != len(theirs) or not all(map(fits, ours, theirs)):
            raise CheckpointError(
                f"its schedule was not saved by a {self._name}"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.scheduler.load_state_dict(state["scheduler"])
        groups = self._stand_in.param_groups
        for group, saved in zip(groups, state["groups"], strict=True):
            group.update(saved)


def _layout(state: Mapping[str, Any]) -> list[set[str]]:
    """Return the keys of each part of a schedule's state."""
    parts = [state.get("scheduler")]
    if isinstance(state.get("groups"), list):
        parts += state["groups"]
    return [set(part) if isinstance(part, dict) else set() for part in parts]


def _refused(value: str, rule: str, fix: str) -> ConfigError:
    return ConfigError("schedule()", value, rule, fix)


def _check_mode(scheduler: ReduceLROnPlateau, figure: str) -> None:
    """Raise ConfigError if a scheduler's mode is wrong for its metric."""
    better = direction_of(figure)
    if better not in (None, scheduler.mode):
        raise _refused(
            scheduler.mode,
            f"is the wrong mode for a ReduceLROnPlateau that watches {figure}, which needs {better}",
            f'give it mode="{better}", or name another figure: `return scheduler, "val_accuracy"`',
        )
