"""search: frontier: the decision which trial to run next, or that none can change the answer any more. Pure.

First short trials (probes) measure the throughput of a few batch sizes of every setting. Then whole trials, each until
it reaches the target, where the expected gain over the best so far is largest (Jones et al. 1998, Expected
improvement), by the beliefs of time_model.py. A setting whose throughput cannot make up for the best one's is never
trained. It ends when no batch size that was not trained is faster than the best by more than 5 % in more than 5 % of
the draws, or when a third of the samples of the whole grid is spent; the reason says which.

What earlier sweeps have found (`past`, see history.py) is heard first: no place is probed whose throughput they tell,
and none is trained that they have trained, but the one that then seems best. What disagrees with them drops them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tune.search.history import Past, believed, log_speeds_told, told
from tune.search.time_model import Draws, Needed, Place, log_samples, log_speeds
from tune.trials.interval import EQUAL, Interval
from tune.trials.record import PROBE_STEPS, Purpose

_DEAREST_PROBE = 0.15  # of a whole trial: no batch size is probed whose fewest steps cost more
_PROBES = 3
_DOUBT = 0.05
_DOUBT_TOLD = 0.2  # where earlier sweeps are heard, whose trials were many
_GUESSED = 0.1  # how much faster, as a logarithm, a place must seem that none has trained than one that some has
NEVER = 30.0  # the logarithm of a time that is never over
_SHARE = 1 / 3
_TOLD = 0.2  # a throughput that earlier sweeps tell better than this, as a logarithm, is not probed
_CHECKED = 3  # trials to the target; with fewer what the model says of batch sizes is what it was made to say


@dataclass(frozen=True)
class Seen:
    """A trial that has ended, as the search sees it."""

    place: Place
    purpose: Purpose
    samples: float
    """Samples that it trained on."""
    whole: float | None
    """Samples that it would have trained on without reaching the target."""
    samples_to_target: Interval | None = None
    """None where it did not reach it."""
    samples_per_s: Interval | None = None
    noise_scale: float | None = None
    status: str = "done"
    peak_memory_bytes: float | None = None
    power_w: float | None = None
    """Of what it ran on, while it did."""


@dataclass(frozen=True)
class Choice:
    """What to run next."""

    place: Place
    purpose: Purpose


@dataclass(frozen=True)
class Ended:
    """The search has ended."""

    reason: str


def decide(
    places: Sequence[Place],
    seen: Sequence[Seen],
    running: Sequence[Choice],
    past: Sequence[Past] = (),
    make_belief: "Callable[..., Belief] | None" = None,
) -> Choice | Ended | None:
    """Return the next trial, the end, or None: wait for one that is running. `places` is the whole grid, `past` what
    earlier sweeps have found; `make_belief` makes what takes the place of `Belief`.
    """
    tried = {Choice(one.place, one.purpose) for one in seen} | set(running)
    whole = next((one.whole for one in seen if one.whole), None)
    belief = (make_belief or Belief)(places, seen, [one.place for one in running], past)
    for probe in (Choice(place, "probe") for place in belief.to_probe(whole)):
        if probe not in tried:
            return probe
    if any(one.purpose == "probe" for one in running):
        return None
    untried = [index for index, place in enumerate(places) if place not in belief.closed]
    spent = sum(one.samples for one in seen) + len(running) * (whole or 0.0) / 2
    is_spent = whole is not None and spent >= max(3.0, _SHARE * len(places)) * whole
    hopeful = untried if belief.best is None else [index for index in untried if belief.is_hopeful(index)]
    if hopeful and not is_spent:
        return Choice(places[max(hopeful, key=belief.gain)], "trial")
    if running:
        return None
    if belief.best is None:
        why = "a third of the grid's samples is spent" if untried else "every batch size was tried"
        return Ended(f"{why}, and none reached the target")
    if not untried:
        return Ended("every batch size that could be tried was")
    if hopeful:
        names = ", ".join(str(places[index].size) for index in hopeful[:4])
        return Ended(f"a third of the grid's samples is spent; {names} might still be {belief.hope}")
    return Ended(belief.why_enough(len(untried)))


def _probes(places: Sequence[Place], whole: float | None) -> list[Place]:
    """Return a few batch sizes of each setting, evenly over the range; none whose fewest steps would cost too much.

    The smallest come first, since the first probe shows how long a whole trial is.
    """
    chosen: list[list[Place]] = [[] for _ in range(_PROBES)]
    for setting in dict.fromkeys(place.setting for place in places):
        own = sorted((place for place in places if place.setting == setting), key=lambda place: place.size)
        cheap = [place for place in own if _is_cheap(place, whole)] or own[:1]
        for part, found in enumerate(chosen):
            found.append(cheap[round((len(cheap) - 1) * part / (_PROBES - 1))])
    return list(dict.fromkeys(place for part in chosen for place in part))


def _is_cheap(place: Place, whole: float | None) -> bool:
    return not whole or PROBE_STEPS * place.size <= _DEAREST_PROBE * whole


class Belief:
    """What the trials that have ended say of all batch sizes."""

    def __init__(
        self,
        places: Sequence[Place],
        seen: Sequence[Seen],
        running: Sequence[Place] = (),
        past: Sequence[Past] = (),
    ) -> None:
        self.places = list(places)
        own = past_of("", seen)
        speeds, noise, needed = own.speeds, own.noise_scale, list(own.needed)
        wholes = list({one.place: one.whole for one in seen if one.whole}.values())
        kept, self.misled = believed(past, needed, speeds, noise)
        self.past = kept
        """The earlier sweeps that agree with what was measured; `misled` says why the others do not count."""
        needed += [word for one in kept for word in told(one)]
        if noise is None:
            noise = _mean([one.noise_scale for one in kept])
        is_told = any(one.speeds for one in kept)
        means, widths = log_speeds_told(self.places, speeds, kept) if is_told else log_speeds(self.places, speeds)
        fastest = np.nanmax(means) if np.isfinite(means).any() else 0.0
        means = np.where(np.isnan(means), fastest, means)  # a setting without a measurement may be as fast as any
        widths = np.where(np.isnan(widths), 0.5, widths)
        self._is_told, self._widths = is_told, widths
        if running:
            _, guessed = log_samples(self.places, needed, noise)
            at = {place: index for index, place in enumerate(self.places)}
            shift = 0.0 if needed else math.log(wholes[0] if wholes else 1.0) - 1
            needed = [*needed, *(Needed(p, math.exp(float(guessed[at[p]]) + shift), 0.0) for p in running if p in at)]
        samples, mean = log_samples(self.places, needed, noise)
        rng = np.random.default_rng(1)
        samples = _at_evaluations(samples, self.places, seen)
        self.draws = samples - means[:, None] - widths[:, None] * rng.standard_normal(samples.shape)
        if needed and wholes:  # what needs more samples than the run has never gets there
            self.draws = np.where(samples > math.log(max(wholes)) + 0.02, NEVER, self.draws)
        self.log_times = self.draws.mean(axis=1) if needed else mean - means
        """Expected logarithm of the time to target, a place each; where it may never be reached, that weighs most."""
        done = {one.place for one in seen if one.purpose == "trial"}
        self.misfits = {p for p in places for one in kept for o in one.misfits if _holds(o, p)}
        self.closed = done | set(running) | _failing(places, seen) | self.misfits
        """Places where a whole trial is not possible, or was made."""
        self._tried = {place for one in kept for place in one.tried}
        reached = {one.place for one in seen if one.samples_to_target is not None}
        self.num_reached = len(reached | self._tried) if reached else 0
        finished = [index for index, place in enumerate(self.places) if place in reached or place in running]
        medians = np.median(self.draws, axis=1)
        self.best = min(finished, key=lambda index: float(medians[index]), default=None)
        """Index of the likely fastest place of those that reached the target; None: none has."""

    hope = "faster"
    """What a place that is hopeful might be."""

    def why_enough(self, num_untried: int) -> str:
        """Return why no further trial is worth it."""
        few = ", from few trials," if self.num_reached < _CHECKED else ""
        rest = f"none of the {num_untried} that were not tried is faster than the best by more than {EQUAL:.0%}"
        return f"the search's model guesses{few} that {rest}"

    def to_probe(self, whole: float | None) -> list[Place]:
        """Return the places that are worth a probe, the first first.

        Where earlier sweeps tell throughputs: none that they tell well, nor one that will hardly be the fastest.
        """
        if not self._is_told:
            return [place for place in _probes(self.places, whole) if place not in self.misfits]
        chances = np.bincount(self.draws.argmin(axis=0), minlength=len(self.places)) / self.draws.shape[1]
        worth = [
            (float(chances[index] * self._widths[index]), place)
            for index, place in enumerate(self.places)
            if self._widths[index] > _TOLD and chances[index] > _DOUBT and _is_cheap(place, whole)
            if place not in self.misfits
        ]
        return [place for _, place in sorted(worth, key=lambda one: -one[0])]

    def is_hopeful(self, index: int) -> bool:
        """Whether a trial of a place may change the answer. One that an earlier sweep has trained need not be trained
        again but where it seems the fastest by all that is known.
        """
        if self.places[index] not in self._tried:
            return self.may_win(index)
        assert self.best is not None
        return float(np.median(self._gains(index))) > -math.log(1 - EQUAL)

    def may_win(self, index: int) -> bool:
        """Whether a place could still beat the best by more than what repeats differ by."""
        doubt = _DOUBT_TOLD if self._tried else _DOUBT
        return float(np.mean(self._gains(index) > -math.log(1 - EQUAL))) > doubt

    def gain(self, index: int) -> float:
        """Return the expected improvement of the logarithm of the best time; before there is one, of any time."""
        if self.best is None:
            is_guess = bool(self._tried) and self.places[index] not in self._tried
            return -float(self.log_times[index]) - _GUESSED * is_guess
        return float(np.mean(np.maximum(0.0, self._gains(index))))

    def _gains(self, index: int) -> Draws:
        assert self.best is not None
        return np.asarray(self.draws[self.best] - self.draws[index])

    def times(self) -> list[Interval]:
        """Return the time to target, s, of every place with its 95 % interval; inf where it may never be reached."""
        draws = np.where(self.draws >= NEVER, math.inf, self.draws)
        low, middle, high = np.exp(np.quantile(draws, [0.025, 0.5, 0.975], axis=1, method="nearest"))
        return [Interval(float(m), float(a), float(b)) for m, a, b in zip(middle, low, high, strict=True)]


def past_of(name: str, seen: Sequence[Seen], samples_off: float = 0.0, speeds_off: float = 0.0) -> Past:
    """Return what trials show, as the search of another sweep hears it."""
    speeds: dict[Place, tuple[float, float]] = {}
    for one in seen:  # of a place that was tried twice, the longer trial
        if one.samples_per_s is not None and (one.place not in speeds or one.purpose != "probe"):
            rate = one.samples_per_s
            speeds[one.place] = (rate.value, (rate.high - rate.low) / 2 / rate.value)
    needed = tuple(found for one in seen if (found := _needed(one)) is not None)
    misfits = tuple(one.place for one in seen if one.status == "out_of_memory")
    noise = _mean([one.noise_scale for one in seen])
    return Past(name, needed, speeds, noise, misfits, samples_off, speeds_off)


def _mean(noises: Sequence[float | None]) -> float | None:
    """Return the geometric mean of noise scales; None without any."""
    known = [noise for noise in noises if noise]
    return float(np.exp(np.mean(np.log(known)))) if known else None


def _at_evaluations(log_samples: Draws, places: Sequence[Place], seen: Sequence[Seen]) -> Draws:
    """Return samples to the target [n, D] as trials show them: as logarithms of those at the next evaluation.

    Where the target is met at the first evaluations this decides, and no theory of what comes before them.
    """
    needed = [(one.place.size, one.samples_to_target) for one in seen if one.samples_to_target is not None]
    found = [(size, samples.high - samples.low) for size, samples in needed if samples.high > samples.low]
    if not found:
        return log_samples
    apart, steps = [between for _, between in found], [between / size for size, between in found]
    is_by_steps = max(steps) / min(steps) < max(apart) / min(apart)
    sizes = np.array([place.size if is_by_steps else 1 for place in places], dtype=float)[:, None]
    between = sizes * np.median(steps if is_by_steps else apart)
    return np.asarray(np.log(np.ceil(np.exp(log_samples) / between - 1e-9) * between))


def _needed(one: Seen) -> Needed | None:
    """Return the samples to the target as a trial shows them; more than it had where it did not get there."""
    found = one.samples_to_target
    if found is not None:
        return Needed(one.place, found.value, (found.high - found.low) / found.value / math.sqrt(12))
    if one.purpose == "trial" and one.whole and one.status in ("done", "diverged"):
        return Needed(one.place, one.whole * (1.4 if one.status == "done" else 2.0), 0.25)
    if one.purpose == "trial" and one.status == "stopped" and one.samples:
        return Needed(one.place, one.samples * 1.4, 0.25)
    return None


def _failing(places: Sequence[Place], seen: Sequence[Seen]) -> set[Place]:
    """Return the places that are known to run out of memory, and those that failed in any other way."""
    failed = {one.place for one in seen if one.status not in ("done", "stopped")}
    misfits = [one.place for one in seen if one.status == "out_of_memory"]
    return failed | {p for p in places if any(_holds(one, p) for one in misfits)}


def _holds(misfit: Place, place: Place) -> bool:
    """Whether a place runs out of memory where another does."""
    return place.setting == misfit.setting and place.size >= misfit.size
