"""search: frontier with several objectives: what each batch size is expected to add to the front. Pure.

The next trial is the one with the largest expected improvement of the hypervolume (Emmerich et al. 2006,
https://doi.org/10.1109/TEVC.2005.851275), in logarithms of the metrics, up to the worst of the grid. Time, and with it
dollars, is what `Belief` draws; peak memory is a straight line through the batch sizes that were measured of a setting,
probes included, and power lies between those. The search ends when the trials so far have nearly all of the hypervolume
that the whole grid is expected to have.
"""

import math
from collections.abc import Sequence

import numpy as np

from tune.objective import TO_TARGET
from tune.search.frontier import NEVER, Belief, Seen
from tune.search.history import Past
from tune.search.time_model import Draws, Place, log_speeds

_DRAWS, _POINTS = 200, 400
_ENOUGH = 0.98
"""Share of the expected hypervolume of the whole grid that ends the search."""
_BEYOND = math.log(1.1)  # of the worst of the grid: where the hypervolume ends


class FrontBelief(Belief):
    """What the trials that have ended say of the front."""

    def __init__(
        self,
        metrics: Sequence[str],
        places: Sequence[Place],
        seen: Sequence[Seen],
        running: Sequence[Place] = (),
        past: Sequence[Past] = (),
    ) -> None:
        super().__init__(places, seen, running, past)
        times = self.draws[:, :: max(1, self.draws.shape[1] // _DRAWS)]
        columns = [times] if set(metrics) & set(TO_TARGET) else []
        if "energy_j" in metrics:
            columns.append(times + _log_powers(self.places, seen)[:, None])
        if "peak_memory_bytes" in metrics:
            columns.append(np.broadcast_to(_log_peaks(self.places, seen)[:, None], times.shape))
        costs = np.where((times >= NEVER)[:, None], math.inf, np.stack(columns, axis=1))  # [n, m, D]
        reached = {one.place for one in seen if one.samples_to_target is not None} | set(running)
        self._added, self.share = _improvements(costs, [place in reached for place in self.places])
        """What each place adds to the hypervolume of those that reached the target, as a share of that of all; and
        how much of that these have, both expected."""

    hope = "on the front"

    def why_enough(self, num_untried: int) -> str:
        """Return why no further trial is worth it."""
        share = f"{min(self.share, 1.0):.0%} of the hypervolume of the whole grid"
        return f"the search's model guesses that the front so far has {share}, with {num_untried} that were not tried"

    def is_hopeful(self, index: int) -> bool:
        """Whether a trial of a place may still change the front."""
        return self.share < _ENOUGH and self._added[index] > 0

    def gain(self, index: int) -> float:
        """Return the hypervolume that a place is expected to add."""
        return float(self._added[index])


def _improvements(costs: Draws, is_in: Sequence[bool]) -> tuple[Draws, float]:
    """Return what each of n places adds [n] to the hypervolume of those that are in the front's set, and that of the
    set, as shares of the hypervolume of all. Monte Carlo over points [P, m] between the best and the worst; costs are
    [n, m, D].
    """
    finite = np.where(np.isfinite(costs), costs, np.nan)
    with np.errstate(invalid="ignore"):
        middles = np.nanmedian(np.where(np.isfinite(finite).any(axis=2, keepdims=True), finite, 0.0), axis=2)
    known = np.isfinite(costs).mean(axis=(1, 2)) > 0.5
    if not known.any():
        return np.ones(len(costs)), 0.0
    worst, best = middles[known].max(axis=0) + _BEYOND, np.nanmin(finite[known], axis=(0, 2))
    points = best + np.random.default_rng(2).random((_POINTS, len(best))) * (worst - best)
    covers = np.stack([(one[None] <= points[:, :, None]).all(axis=1) for one in costs])  # [n, P, D]
    of_set = covers[np.array(is_in)].any(axis=0) if any(is_in) else np.zeros(covers.shape[1:], dtype=bool)
    whole = max(float(covers.any(axis=0).mean()), 1e-9)
    return (covers & ~of_set).mean(axis=(1, 2)) / whole, float(of_set.mean()) / whole


def _log_peaks(places: Sequence[Place], seen: Sequence[Seen]) -> Draws:
    """Return the logarithm of the peak memory of places [n], which grows by so much a sample of a setting; settings
    without a measurement are as those with one.
    """
    found = np.full(len(places), math.nan)
    sizes = np.array([place.size for place in places], dtype=float)
    for setting in dict.fromkeys(place.setting for place in places):
        own = np.array([place.setting == setting for place in places])
        known = {one.place.size: one.peak_memory_bytes for one in seen if one.place.setting == setting}
        rows = sorted((size, peak) for size, peak in known.items() if peak)
        if rows:
            found[own] = _line(sizes[own], rows)
    of_others = {
        size: float(np.nanmedian(found[sizes == size]))
        for size in set(sizes)
        if np.isfinite(found[sizes == size]).any()
    }
    if not of_others:
        return np.zeros(len(places))
    filled = [of_others.get(size, math.nan) for size in sizes]
    found = np.where(np.isnan(found), filled, found)
    return np.log(np.where(np.isnan(found), np.nanmedian(found), found))


def _line(sizes: Draws, rows: Sequence[tuple[int, float]]) -> Draws:
    """Return peaks between and beyond those that were measured; of one alone, that."""
    at, peaks = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    found = np.interp(sizes, at, peaks)
    if len(rows) > 1:
        for beyond, (one, other) in ((sizes < at[0], (0, 1)), (sizes > at[-1], (-2, -1))):
            slope = max(0.0, (peaks[other] - peaks[one]) / (at[other] - at[one]))
            edge = 0 if one == 0 else -1
            found = np.where(beyond, peaks[edge] + slope * (sizes - at[edge]), found)
    return np.asarray(np.maximum(found, peaks.min() / 16))


def _log_powers(places: Sequence[Place], seen: Sequence[Seen]) -> Draws:
    """Return the logarithm of the power of places [n], W; of those without a measurement that of the others."""
    means, _ = log_speeds(places, {one.place: (one.power_w, 0.1) for one in seen if one.power_w})
    known = np.isfinite(means)
    return np.where(known, means, np.mean(means[known]) if known.any() else 0.0)
