"""When a job with a deadline runs on spot machines, on on-demand machines, or waits."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.spot.availability import SpotRates, checkpoint_interval_s
from cluster.spot.game import Machine, State

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]


def must_run(state: State) -> bool:
    """Whether on-demand machines must run in this step, because a step that is lost could not be made good.

    The safety net of "Can't Be Late" (Wu et al., NSDI 2024): from when the slack is down to the changeover
    the job stays on on-demand machines, and with them its slack no longer shrinks.
    """
    return state.slack_s < state.step_s


@dataclass
class Watching:
    """The rates as they have been given and then observed."""

    rates: SpotRates = field(default_factory=SpotRates)
    _before: bool | None = None

    @property
    def mean_up_s(self) -> float:
        """Expected seconds until spot machines are taken back."""
        return self.rates.up

    def see(self, state: State) -> None:
        """Learn from the availability in this step."""
        self.rates = self.rates.observe(self._before, state.is_available, state.step_s)
        self._before = state.is_available


@dataclass
class UniformProgress(Watching):
    """The policy of "Can't Be Late" (Wu et al., NSDI 2024): never behind the line from the start to the deadline.

    Spot where there is spot. Without, a job that is behind goes on on on-demand machines, and stays there, also when
    spot comes back, until it is two changeovers ahead.
    """

    def choose(self, state: State) -> Machine:
        """Return the machines of this step."""
        self.see(state)
        job = state.job
        if must_run(state):
            return "on-demand"
        pace = job.work_s / job.deadline_s
        ahead_s = 2 * job.changeover_s if state.running == "on-demand" else 0.0
        is_behind = state.done_s < (state.now_s + ahead_s) * pace
        if state.running == "on-demand" and is_behind:
            return "on-demand"
        if state.is_available:
            return "spot"
        return "on-demand" if is_behind else "none"


_RESOLVE = 0.1
"""Relative change of an expected spell from which the values are computed anew."""
_CELLS = 160
"""Of the grid, along the time left and along the work left."""
_STATES: tuple[tuple[bool, Machine], ...] = (
    (True, "none"),
    (True, "spot"),
    (True, "on-demand"),
    (False, "none"),
    (False, "on-demand"),
)
"""Whether spot is available, and what runs."""
_NONE_UP, _SPOT_UP, _DEMAND_UP, _NONE_DOWN, _DEMAND_DOWN = range(5)
_WAITED = [_NONE_UP, _NONE_UP, _NONE_UP, _NONE_DOWN, _NONE_DOWN]
"""The state after each, if nothing runs."""
_IS_NEW = np.array([0, 0, 1, 0, 1])
"""0 where on-demand machines would have to start, 1 where they run."""


@dataclass
class ExpectedCost(Watching):
    """The policy of least expected cost: a Markov decision process over what is left of time and work.

    Its states are the availability, the machines that run, the time and the work left; its transitions are those of
    the rates as observed so far (their posterior mean: certainty equivalence). It is solved by backward induction from
    the deadline; where the slack is gone, on-demand machines must run: the safety net of uniform progress.
    """

    most_above: float = 0.1
    """By how much of the price of on-demand machines alone the job may become dearer than with these, whatever spot
    machines do: what has been saved, and so much, is all that is risked."""
    _solved: tuple[float, float] = (math.inf, math.inf)
    _grid: "Values | None" = None

    def choose(self, state: State) -> Machine:
        """Return the machines of this step."""
        self.see(state)
        if must_run(state):
            return "on-demand"
        up, down = self._solved
        changed = max(abs(math.log(self.rates.up / up)), abs(math.log(self.rates.down / down))) if self._grid else 1
        if self._grid is None or changed > _RESOLVE:
            self._solved = (self.rates.up, self.rates.down)
            self._grid = Values.solve(state, self.rates)
        return self._affordable(state, self._grid.best(state))

    def _affordable(self, state: State, choice: Machine) -> Machine:
        """Return the choice, or on-demand machines where its worst outcome would cost too much."""
        if choice in ("on-demand", state.running) or (choice == "none" and state.running == "spot"):
            return choice
        job = state.job
        interval_s = job.interval_s or checkpoint_interval_s(job.checkpoint_s, self.mean_up_s)
        fits = state.worst_usd(choice, interval_s) <= (1 + self.most_above) * job.on_demand_usd
        return choice if fits else "on-demand"


@dataclass(frozen=True)
class Values:
    """The best choice in every state of the process, on a grid."""

    deadline_s: float
    time_s: float
    """Of a cell."""
    work_s: float
    """Of a cell."""
    choices: np.ndarray[Any, np.dtype[np.int8]]
    """0 none, 1 spot, 2 on-demand; (time left, state, work left)."""

    def best(self, state: State) -> Machine:
        """Return the best choice in a state."""
        left = min(round((self.deadline_s - state.now_s) / self.time_s), len(self.choices) - 1)
        work = min(round(state.left_s / self.work_s), self.choices.shape[2] - 1)
        row = _STATES.index((state.is_available, state.running))
        return ("none", "spot", "on-demand")[self.choices[left, row, work]]

    @classmethod
    def solve(cls, state: State, rates: SpotRates) -> "Values":
        """Backward induction from the deadline to now."""
        job = state.job
        time_s = (job.deadline_s - state.now_s) / _CELLS
        work_s = max(state.left_s, 1.0) / (_CELLS - 1)
        work = np.arange(_CELLS + math.ceil(job.changeover_s / work_s)) * work_s
        spot, demand = job.spot_usd_per_hour / 3600, job.on_demand_usd_per_hour / 3600
        interval_s = max(1.0, job.interval_s or checkpoint_interval_s(job.checkpoint_s, rates.up))
        pace = interval_s / (interval_s + job.checkpoint_s)
        goes, comes = -math.expm1(-time_s / rates.up), -math.expm1(-time_s / rates.down)
        hold = np.zeros((5, 5))
        for is_up, is_down in ((_NONE_UP, _NONE_DOWN), (_DEMAND_UP, _DEMAND_DOWN)):
            hold[is_up, [is_up, is_down]] = 1 - goes, goes
            hold[is_down, [is_down, is_up]] = 1 - comes, comes
        boots = np.array([job.changeover_s, 0.0])[:, None]  # of what starts now, of what runs
        half_s = np.maximum(0.0, time_s / 2 - boots)  # work until a preemption in the middle of the step
        works, survives = _shifts(work, time_s - boots), _shifts(work, (time_s - boots) * pace)
        remains = _shifts(work, np.maximum(0.0, half_s * pace - interval_s / 2))
        demand_usd = demand * np.minimum(time_s, work + boots)
        spot_usd = spot * ((1 - goes) * np.minimum(time_s, work / pace + boots) + goes * time_s / 2)
        finish = demand * (work + boots[_IS_NEW])
        values = finish.copy()
        options = np.full((3, 5, len(work)), np.inf)
        choices = np.full((_CELLS + 1, 5, len(work)), 2, np.int8)
        for cells in range(1, _CELLS + 1):
            held = hold @ values
            options[0] = held[_WAITED]
            spots = spot_usd + (1 - goes) * survives(values[_SPOT_UP]) + goes * remains(values[_NONE_DOWN])
            options[1, :3] = spots[[0, 1, 0]]
            for is_up, kept in ((_DEMAND_UP, [0, 1, 2]), (_DEMAND_DOWN, [3, 4])):
                options[2, kept] = (demand_usd + works(held[is_up]))[_IS_NEW[kept]]
            late = (cells - 1) * time_s < work + job.changeover_s
            options[:2, :, late] = np.inf
            options[2][:, late] = finish[:, late]
            choices[cells], values = options.argmin(0), options.min(0)
            values[:, 0] = 0.0
        return cls(job.deadline_s, time_s, work_s, choices)


def _shifts(work: Floats, done_s: Floats) -> Callable[[Floats], Floats]:
    """Return the interpolation of values over `work` (W) at `work - done_s` (2, 1), 0 at least: (2, W)."""
    place = np.clip((work - done_s) / work[1], 0, len(work) - 1)
    low = np.minimum(place.astype(int), len(work) - 2)
    share = place - low
    return lambda values: values[low] * (1 - share) + values[low + 1] * share
