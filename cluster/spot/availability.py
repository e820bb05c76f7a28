"""How often spot machines go and come back: the rates, and the checkpoint interval that follows from them."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Bools = np.ndarray[Any, np.dtype[np.bool_]]

_PRIOR_EVENTS = 2.0
"""Spells that the given means count for beside those that are observed."""


@dataclass(frozen=True)
class SpotRates:
    """An alternating renewal process: spells with spot machines and spells without, exponentially distributed.

    The means are those of the posterior: a Gamma prior on each rate, as if `_PRIOR_EVENTS` spells of the given mean had
    been seen, and the spells observed since, the current one included as far as it has lasted.
    """

    mean_up_s: float = 2 * 3600.0
    """Mean time until a spot machine that runs is taken back. The default is an assumption."""
    mean_down_s: float = 3600.0
    """Mean time until there is one again. The default is an assumption."""
    preemptions: int = 0
    """Observed ends of spells with machines."""
    returns: int = 0
    """Observed ends of spells without."""
    up_s: float = 0.0
    """Observed time with machines."""
    down_s: float = 0.0
    """Observed time without."""

    def __post_init__(self) -> None:
        if not (0 < self.mean_up_s < math.inf and 0 < self.mean_down_s < math.inf):
            raise ValueError(f"mean spells must be positive and finite: {self.mean_up_s}, {self.mean_down_s}")

    def observe(self, was_available: bool | None, is_available: bool, for_s: float) -> "SpotRates":
        """Return the rates after another `for_s` seconds with or without spot machines, given how it was before."""
        return replace(
            self,
            preemptions=self.preemptions + (was_available is True and not is_available),
            returns=self.returns + (was_available is False and is_available),
            up_s=self.up_s + for_s * is_available,
            down_s=self.down_s + for_s * (not is_available),
        )

    @property
    def up(self) -> float:
        """Expected seconds of a spell with machines."""
        return (_PRIOR_EVENTS * self.mean_up_s + self.up_s) / (_PRIOR_EVENTS + self.preemptions)

    @property
    def down(self) -> float:
        """Expected seconds of a spell without."""
        return (_PRIOR_EVENTS * self.mean_down_s + self.down_s) / (_PRIOR_EVENTS + self.returns)

    def draw(self, num_steps: int, step_s: float, rng: np.random.Generator) -> Bools:
        """Return the availability in each of `num_steps` steps, drawn from the process in its steady state."""
        spells: list[Bools] = []
        is_up, drawn = bool(rng.random() < self.up / (self.up + self.down)), 0
        while drawn < num_steps:
            length = max(1, round(rng.exponential(self.up if is_up else self.down) / step_s))
            spells.append(np.full(length, is_up))
            is_up, drawn = not is_up, drawn + length
        return np.concatenate(spells)[:num_steps]


def checkpoint_interval_s(write_s: float, mean_up_s: float) -> float:
    """Return the seconds of work between two checkpoints that lose least: sqrt(2 * write_s * mean_up_s).

    Young 1974, "A first order approximation to the optimum checkpoint interval"; of writes that take longer than half
    the time between failures, that time (Daly 2006). At most 100 writes long: fewer writes save less than 1 %, and what
    one preemption may cost grows without a bound where they are rare.
    """
    return math.sqrt(2 * write_s * min(mean_up_s, 5000 * write_s)) if write_s < mean_up_s / 2 else mean_up_s
