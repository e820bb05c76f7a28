"""Which of some configurations is the fastest, from repeats in turn: a race that the slower ones leave. Pure.

All entrants run one round after the other, a round with one seed (Maron and Moore 1994, Hoeffding races; Birattari et
al. 2002, F-Race). After 2, 4, 8 and 16 rounds they are looked at: who is slower than the first of the moment leaves,
and so does who differs from it by less than is of interest. Many looks at many entrants find differences where there
are none. So each comparison has its share of the 5 % of error: an even one for each look (a group-sequential test with
one level for all looks as Pocock's, 1977, here by Bonferroni's inequality) and for each rival of the best (multiple
comparisons with the best, Hsu 1984).

Logarithms of times are an entrant's mean, a seed's own part and a rest, whose spread is pooled over all and with
`REPEATS` of earlier sweeps.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainers.measure.step_times import student_t
from tune.trials.interval import EQUAL, REPEATS, REPEATS_WEIGHT

LOOKS = (2, 4, 8, 16)
"""Rounds after which somebody looks; the last one is the longest race."""
LEVEL = 0.05
_TRIFLE = math.log(1 + EQUAL)


@dataclass(frozen=True)
class Lap:
    """One run of an entrant."""

    log_s: float
    """Logarithm of the time to target, s."""
    early: float = 0.0
    """How much smaller that may be: the target was met between two evaluations."""
    late: float = 0.0
    """How much larger it may be."""


@dataclass(frozen=True)
class Standing:
    """An entrant beside the leader: differences of logarithms of times."""

    behind: float
    half: float
    """Half width of the difference's simultaneous interval; 0 for the leader."""
    low: float
    """The smallest difference, wherever between their evaluations both may have met the target."""
    high: float
    overlap: float
    """The part of `low` that no number of repeats takes away."""

    @property
    def is_slower(self) -> bool:
        """Whether it is shown to be slower than the leader by more than is of interest."""
        return self.behind - self.overlap > max(self.half, _TRIFLE)

    @property
    def is_settled(self) -> bool:
        """Whether more repeats cannot tell anything of interest: it is slower, or as good as equal."""
        return self.is_slower or self.behind + self.half <= max(self.overlap, _TRIFLE)


@dataclass(frozen=True)
class Race:
    """What the rounds so far say."""

    standings: list[Standing | None]
    """One an entrant, None for one without a time; empty before the first look."""
    runs_next: list[tuple[int, int]]
    """Entrant and round of what has to run before the next look, in turn; empty once the race has ended."""


def race(laps: Sequence[Mapping[int, Lap | None]], most_rounds: int, last_round: int | None = None) -> Race:
    """Return how a race stands that takes `most_rounds`, or ends before with `last_round`.

    `laps` has for each entrant what its rounds, from 0, have given, None for one without a time: it says nothing, and
    is not run again.
    """
    racing, found = list(range(len(laps))), list[Standing | None]()
    looks = sorted({min(rounds, most_rounds) for rounds in LOOKS})
    for rounds in sorted({min(rounds, last_round or most_rounds) for rounds in looks}):
        missing = [(entrant, lap) for lap in range(rounds) for entrant in racing if lap not in laps[entrant]]
        if missing:
            return Race(found, missing)
        upto = {at: {lap: run for lap, run in own.items() if run and lap < rounds} for at, own in enumerate(laps)}
        upto = {at: own for at, own in upto.items() if own}
        racing = [at for at in racing if at in upto]
        if not racing:
            return Race([None] * len(laps), [])
        now = compare(upto, racing, len(looks))
        found = [now.get(at) if at in racing or not found else found[at] for at in range(len(laps))]
        racing = [at for at in racing if now[at].half == 0 or not now[at].is_settled]
        if len(racing) == 1:
            break
    return Race(found, [])


def compare(laps: Mapping[int, Mapping[int, Lap]], racing: Sequence[int], looks: int) -> dict[int, Standing]:
    """Return each entrant's standing beside the one of `racing` that has the smallest mean; each needs a lap."""
    cells = [(entrant, lap, run) for entrant, own in laps.items() for lap, run in own.items()]
    columns = {key: at for at, key in enumerate([*laps, *{f"round {lap}" for _, lap, _ in cells}])}
    design = np.zeros((len(cells), len(columns)))
    for row, (entrant, lap, _) in enumerate(cells):
        design[row, columns[entrant]] = design[row, columns[f"round {lap}"]] = 1.0
    logs = np.array([run.log_s for *_, run in cells])
    effects, _, rank, _ = np.linalg.lstsq(design, logs, rcond=None)
    rest = logs - design @ effects
    freedom = REPEATS_WEIGHT + len(cells) - int(rank)
    spread = math.sqrt((REPEATS_WEIGHT * REPEATS**2 + float(rest @ rest)) / freedom)
    covariance = np.linalg.pinv(design.T @ design)
    width = spread * student_t(freedom, 1 - LEVEL / 2 / max(1, len(laps) - 1) / looks)
    leader = min(racing, key=lambda entrant: float(effects[columns[entrant]]))
    early = {at: statistics.fmean(run.early for run in own.values()) for at, own in laps.items()}
    late = {at: statistics.fmean(run.late for run in own.values()) for at, own in laps.items()}
    found = {leader: Standing(0.0, 0.0, 0.0, 0.0, 0.0)}
    for entrant in laps.keys() - {leader}:
        contrast = np.zeros(len(columns))
        contrast[columns[entrant]], contrast[columns[leader]] = 1.0, -1.0
        behind = float(contrast @ effects)
        half = width * math.sqrt(float(contrast @ covariance @ contrast))
        overlap = early[entrant] + late[leader]
        high = behind + late[entrant] + early[leader] + half
        found[entrant] = Standing(behind, half, behind - overlap - half, high, overlap)
    return found
