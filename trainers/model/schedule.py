"""Run torch's schedulers: the task makes them, the loop steps and keeps them.

A scheduler never sees the run's optimizer but a stand-in with the same groups and
options, whose learning rates (and momenta, where it cycles them) are handed on before
every step. So nothing is hooked into the step, which may be captured, compiled or
skipped, and the rates stay exact numbers of the host.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from trainers.config.sections import ScheduleConfig, check_metric, direction_of
from trainers.data.batch_schedule import BatchSchedule
from trainers.errors import CheckpointError, ConfigError, first_line
from trainers.model.optimizer import warmup_steps

Every = Literal["step", "epoch"]
"""What a scheduler counts."""
_CYCLED = ("momentum", "betas")
_TRIED = 10_000
"""Steps of a scheduler, some 20 microseconds each."""


class StandIn(Optimizer):
    """Hold an optimizer's groups and options; a step of this one changes no parameter."""

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [
            {**group, "lr": float(group["lr"])} for group in optimizer.param_groups
        ]
        super().__init__(groups, dict(optimizer.defaults))
        self._given = [group.keys() for group in optimizer.param_groups]

    def written(self) -> list[dict[str, Any]]:
        """Return of each group the options that a scheduler writes.

        These are the learning rate and its own; momenta only where it cycles them.
        """
        return [
            {
                name: value
                for name, value in group.items()
                if name == "lr"
                or name not in given
                or (name in _CYCLED and "max_momentum" in group)
            }
            for group, given in zip(self.param_groups, self._given, strict=True)
        ]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Count as a step for the scheduler, which warns where there was none before."""


class Schedule:
    """Step a scheduler at its stand-in, and tell the optimizer what comes of it.

    After a linear warm-up (`lr_schedule.warmup`) it is stepped after every step or
    epoch, or, where it reduces on a plateau, after every evaluation. Ranks do the same,
    so nothing has to be agreed.
    """

    def __init__(
        self,
        given: LRScheduler | tuple[LRScheduler, str],
        stand_in: StandIn,
        config: ScheduleConfig,
        total_steps: int,
        batches: BatchSchedule | None = None,
    ) -> None:
        """`given` is what the task's schedule() has returned.

        With `batches` a share of warm-up is one of samples.
        """
        self.scheduler, by = given if isinstance(given, tuple) else (given, "step")
        self.every: str = by
        self.figure = "val_loss"
        """What one goes by that reduces on a plateau."""
        self._stand_in = stand_in
        self._warmup = warmup_steps(config, total_steps, batches)
        self.by_figure = isinstance(self.scheduler, ReduceLROnPlateau)
        if self.by_figure and by not in get_args(Every):
            self.figure = by
        elif by not in get_args(Every):
            raise ConfigError(
                "schedule()", by, "must be step or epoch", 'return (scheduler, "epoch")'
            )
        if self.scheduler.optimizer is not stand_in:
            name = type(self.scheduler).__name__
            rule = (
                "gives a scheduler of another optimizer than the one that it was given"
            )
            raise ConfigError(
                "schedule()", name, rule, "make it with `optimizer`, its first argument"
            )
        if isinstance(self.scheduler, ReduceLROnPlateau):
            _check_mode(self.scheduler, self.figure)

    def try_to_the_end(self, total_steps: int, epochs: Sequence[int]) -> None:
        """Raise ConfigError for a scheduler that ends before the run.

        It is tried, and put back.

        `epochs`: the steps at which each of them has ended.
        """
        if self.by_figure:
            return
        count = (
            total_steps - self._warmup
            if self.every == "step"
            else sum(step > self._warmup for step in epochs)
        )
        name = type(self.scheduler).__name__
        before = copy.deepcopy(self.state_dict())
        fix = "make it as long as the run, less its warm-up"
        if (
            isinstance(self.scheduler, OneCycleLR)
            and self.scheduler.total_steps < count
        ):
            rule = f"ends after {self.scheduler.total_steps} steps, and the run takes {count} of them"
            raise ConfigError("schedule()", name, rule, fix)
        for number in range(min(count, _TRIED)):
            try:
                self._stand_in.step()
                self.scheduler.step()
            except Exception as error:
                rule = f"ends after {number} steps, and the run takes {count} of them ({first_line(error)})"
                raise ConfigError("schedule()", name, rule, fix) from error
        self.load_state_dict(before)

    def lrs(self, step: int) -> list[float]:
        """Return each group's learning rate in `step`, from 0."""
        share = min(1.0, (step + 1) / self._warmup) if self._warmup else 1.0
        return [float(group["lr"]) * share for group in self._stand_in.param_groups]

    def cycled(self, optimizer: Optimizer) -> list[tuple[dict[str, Any], str, Any]]:
        """Return group, name and value of each momentum that the scheduler has changed."""
        return [
            (group, name, written[name])
            for group, written in zip(
                optimizer.param_groups, self._stand_in.written(), strict=True
            )
            for name in _CYCLED
            if name in written and group[name] != written[name]
        ]

    def stepped(self, step: int, ends_epoch: bool) -> None:
        """Step the scheduler where it is due after so many steps of training."""
        if (
            step > self._warmup
            and not self.by_figure
            and (self.every == "step" or ends_epoch)
        ):
            self._stand_in.step()
            try:
                self.scheduler.step()
            except (
                ValueError
            ) as error:  # such as one that was kept with the length of a shorter run
                name = type(self.scheduler).__name__
                fix = "make it for all steps of the run, and start anew with --fresh"
                raise ConfigError(
                    "schedule()", name, f"ends at step {step}: {first_line(error)}", fix
                ) from error

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        """Step a scheduler that goes by a figure.

        Raises ConfigError where an evaluation does not have it.
        """
        if not self.by_figure:
            return
        check_metric("schedule()", self.figure, figures)
        if step > self._warmup:
            self.scheduler.step(figures[self.figure])  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Return plain data: the scheduler's own, and the options that it writes."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "groups": self._stand_in.written(),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless `state` is such a scheduler's."""
        ours = self.state_dict()
        theirs = state.get("scheduler")
        groups = state.get("groups")
        fits = (
            isinstance(theirs, dict)
            and theirs.keys() == ours["scheduler"].keys()
            and isinstance(groups, list)
        )
        keys = [
            group.keys() if isinstance(group, dict) else None for group in groups or ()
        ]
        if not fits or keys != [group.keys() for group in ours["groups"]]:
            raise CheckpointError(
                f"its schedule is none of a {type(self.scheduler).__name__}"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.scheduler.load_state_dict(state["scheduler"])
        for group, saved in zip(
            self._stand_in.param_groups, state["groups"], strict=True
        ):
            group.update(saved)


def _check_mode(scheduler: ReduceLROnPlateau, figure: str) -> None:
    """Raise ConfigError where a scheduler takes what is better of a figure for worse."""
    better = direction_of(figure)
    if better not in (None, scheduler.mode):
        rule = f"is the mode of a ReduceLROnPlateau that goes by {figure}, of which {better} is better"
        fix = f'give it mode="{better}", or name another figure: `return scheduler, "val_accuracy"`'
        raise ConfigError("schedule()", scheduler.mode, rule, fix)
