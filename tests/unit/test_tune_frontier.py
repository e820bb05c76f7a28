"""search: frontier in worlds whose truth is known: what it picks, what it spends, and when it stops."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tune.search.frontier import Belief, Choice, Ended, Seen, decide
from tune.search.space import grid_sizes
from tune.search.time_model import Place
from tune.trials.interval import Interval
from tune.trials.record import PROBE_SHARE, PROBE_STEPS

SIZES = [16, 24, 48, 80, 128, 200, 320, 512]
WHOLE = 60_000.0


@dataclass
class World:
    """Work whose curves are known; runs differ by 8 % and evaluations are 1,000 samples apart."""

    noise: float
    half_speed: dict[str, float]
    """By setting: the batch size at which half the top throughput is reached."""
    top: dict[str, float]
    least: float = 12_000.0
    limit: int = 100_000
    """The smallest batch size that runs out of memory."""
    seed: int = 0
    sizes: tuple[int, ...] = tuple(SIZES)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.places = [Place(setting, "all", size) for setting in self.top for size in self.sizes]

    def speed(self, place: Place) -> float:
        return self.top[place.setting] * place.size / (place.size + self.half_speed[place.setting])

    def needed(self, place: Place) -> float:
        return self.least * (1 + place.size / self.noise)

    def time_s(self, place: Place) -> float:
        return math.inf if self.needed(place) > WHOLE else self.needed(place) / self.speed(place)

    def run(self, choice: Choice) -> Seen:
        place = choice.place
        if place.size >= self.limit:
            return Seen(place, choice.purpose, 0.0, None, status="out_of_memory")
        rate = self.speed(place) * math.exp(self.rng.gauss(0, 0.02))
        speed = Interval(rate, rate * 0.98, rate * 1.02)
        if choice.purpose == "probe":
            samples = max(PROBE_STEPS * place.size, PROBE_SHARE * WHOLE)
            return Seen(place, "probe", samples, WHOLE, None, speed, None, "stopped")
        samples = self.needed(place) * math.exp(self.rng.gauss(0, 0.08))
        if samples > WHOLE:
            return Seen(place, "trial", WHOLE, WHOLE, None, speed, self.noise / 3)
        high = math.ceil(samples / 1000) * 1000.0
        return Seen(place, "trial", high, WHOLE, Interval(high - 500, high - 1000, high), speed, self.noise / 3)

    def search(self) -> tuple[Place | None, list[Seen], str]:
        seen: list[Seen] = []
        while True:
            step = decide(self.places, seen, [])
            assert step is not None
            if isinstance(step, Ended):
                best = Belief(self.places, seen).best
                return (None if best is None else self.places[best]), seen, step.reason
            seen.append(self.run(step))

    def ratio(self, pick: Place) -> float:
        return self.time_s(pick) / min(self.time_s(place) for place in self.places)


def saturating(seed: int, **changes: float) -> World:
    return World(changes.pop("noise", 300.0), {"fp32": 60.0, "bf16": 90.0}, {"fp32": 1e4, "bf16": 1.6e4}, seed=seed)


WORLDS: dict[str, Callable[[int], World]] = {
    "small batches win": lambda seed: World(40.0, {"fp32": 4.0}, {"fp32": 1e4}, seed=seed),
    "the middle wins": saturating,
    "the largest wins": lambda seed: World(20_000.0, {"fp32": 300.0}, {"fp32": 1e4}, seed=seed),
    "bf16 is slower": lambda seed: World(300.0, {"fp32": 60.0, "bf16": 60.0}, {"fp32": 1e4, "bf16": 4e3}, seed=seed),
}


@pytest.mark.parametrize("name", WORLDS)
def test_it_finds_what_gets_there_first_for_a_third_of_the_grid(name: str) -> None:
    ratios, costs = [], []
    for seed in range(12):
        world = WORLDS[name](seed)
        pick, seen, _ = world.search()
        assert pick is not None
        ratios.append(world.ratio(pick))
        costs.append(sum(one.samples for one in seen) / (WHOLE * len(world.places)))
    assert statistics.median(ratios) < 1.05
    assert sum(ratio <= 1.10 for ratio in ratios) >= 10
    assert max(costs) <= 1 / 3


class OddWorld(World):
    """Curves that are not the theory's: another power, small batches that lose, throughputs that jump by 5 %."""

    def __post_init__(self) -> None:
        super().__post_init__()
        draw = random.Random(self.seed)
        self.power, self.penalty, self.bend = draw.uniform(0.6, 1.8), draw.choice([0, 0, 0.02, 0.05]), 64
        self.jump = {place: math.exp(draw.gauss(0, 0.05)) for place in self.places}
        self.own = {setting: math.exp(draw.gauss(0, 0.05)) for setting in self.top}

    def speed(self, place: Place) -> float:
        return super().speed(place) * self.jump[place]

    def needed(self, place: Place) -> float:
        small = math.exp(self.penalty * max(0.0, math.log2(self.bend / place.size)) ** 2)
        return self.least * (1 + (place.size / self.noise) ** self.power) * small * self.own[place.setting]


def odd(seed: int) -> OddWorld:
    draw = random.Random(seed + 1)
    top = {
        "fp32": 1e4,
        "bf16": 1e4 * math.exp(draw.uniform(-0.7, 0.9)),
        "tf32": 1e4 * math.exp(draw.uniform(-0.2, 0.7)),
    }
    half = {setting: 10 ** draw.uniform(0.5, 2.7) for setting in top}
    return OddWorld(10 ** draw.uniform(1.3, 4), half, top, least=draw.uniform(6e3, 3e4), seed=seed)


@pytest.mark.full
def test_worlds_that_are_not_as_the_theory_says() -> None:
    ratios, costs = [], []
    for seed in range(60):
        world = odd(seed)
        if all(math.isinf(world.time_s(place)) for place in world.places):
            continue
        pick, seen, _ = world.search()
        ratios.append(math.inf if pick is None else world.ratio(pick))
        costs.append(sum(one.samples for one in seen) / (WHOLE * len(world.places)))
    assert len(ratios) > 50
    assert sum(ratio <= 1.10 for ratio in ratios) >= 0.85 * len(ratios)
    assert statistics.median(costs) < 0.25
    assert max(costs) <= 1 / 3 + 2 / 24  # the last trial may go beyond its share, and the probes of large batches


def test_a_precision_that_cannot_make_up_its_slowness_is_never_trained() -> None:
    _, seen, _ = WORLDS["bf16 is slower"](0).search()
    assert {one.purpose for one in seen if one.place.setting == "bf16"} == {"probe"}


def test_a_precision_wins_only_with_a_trial_of_its_own() -> None:
    pick, seen, _ = saturating(1).search()
    assert pick is not None
    assert pick.setting == "bf16"
    assert any(one.place == pick and one.purpose == "trial" for one in seen)


def test_settings_of_another_kind_are_trained_even_where_they_are_slower() -> None:
    """Another optimizer may need half the samples: throughput says nothing of that."""
    world = World(300.0, {"adam": 60.0, "sgd": 60.0}, {"adam": 1e4, "sgd": 7e3})
    world.places = [Place(place.setting, place.setting, place.size) for place in world.places]
    _, seen, _ = world.search()
    assert {one.place.setting for one in seen if one.purpose == "trial"} == {"adam", "sgd"}


def test_nothing_as_large_as_what_ran_out_of_memory_is_tried() -> None:
    world = saturating(0)
    world.limit = 128
    pick, seen, _ = world.search()
    assert pick is not None
    assert pick.size < 128
    assert sum(one.status == "out_of_memory" for one in seen if one.purpose == "trial") == 0
    assert sum(one.status == "out_of_memory" for one in seen) <= 4


def test_a_target_that_nobody_reaches_ends_without_an_answer() -> None:
    world = World(300.0, {"fp32": 60.0}, {"fp32": 1e4}, least=1e6, sizes=(16, 64, 256))
    pick, seen, reason = world.search()
    assert pick is None
    assert "none reached the target" in reason
    assert len([one for one in seen if one.purpose == "trial"]) == 3


def test_it_says_when_its_share_is_spent_before_it_is_sure() -> None:
    """Evaluations so rare that a trial says little, and trials that are trained to the end all the same."""
    world = saturating(0)
    honest = world.run

    def vague(choice: Choice) -> Seen:
        one = honest(choice)
        if one.samples_to_target is None:
            return one
        wide = Interval(WHOLE / 2, 0.0, WHOLE)
        return Seen(one.place, one.purpose, WHOLE, WHOLE, wide, one.samples_per_s)

    world.run = vague  # type: ignore[method-assign]
    _, seen, reason = world.search()
    assert sum(one.samples for one in seen) <= (1 / 3 + 1 / 16) * WHOLE * 16
    assert "a third of the grid's samples is spent" in reason


def test_two_lanes_get_two_different_trials_and_wait_for_probes() -> None:
    world = saturating(0)
    first = decide(world.places, [], [])
    assert isinstance(first, Choice)
    second = decide(world.places, [], [first])
    assert isinstance(second, Choice)
    assert first.place != second.place
    running, seen = [first, second], []
    while isinstance(step := decide(world.places, seen, running), Choice) and step.purpose == "probe":
        running.append(step)
    assert step is None
    seen = [world.run(choice) for choice in running]
    one = decide(world.places, seen, [])
    assert isinstance(one, Choice)
    other = decide(world.places, seen, [one])
    assert isinstance(other, Choice)
    assert one.purpose == other.purpose == "trial"
    assert one.place != other.place


def test_the_same_records_give_the_same_next_trial() -> None:
    """That is all that a resume needs."""
    world = saturating(2)
    _, seen, _ = world.search()
    for count in range(len(seen)):
        step = decide(world.places, seen[:count], [])
        assert isinstance(step, Choice)
        assert (step.place, step.purpose) == (seen[count].place, seen[count].purpose)


def test_probes_are_short_even_where_batches_are_large() -> None:
    """Ten steps of 512 are 8.5 % of 60,000 samples, and of 8,000 they would be 64 %."""
    small = World(300.0, {"fp32": 60.0}, {"fp32": 1e4})
    first = Seen(small.places[0], "probe", 640.0, 8000.0, None, Interval(1.0, 1.0, 1.0))
    probed = {small.places[0]}
    seen = [first]
    while isinstance(step := decide(small.places, seen, []), Choice) and step.purpose == "probe":
        probed.add(step.place)
        seen.append(Seen(step.place, "probe", 800.0, 8000.0, None, Interval(1.0, 1.0, 1.0)))
    assert {place.size for place in probed} == {16, 48, 80}


@pytest.mark.parametrize(
    ("low", "high", "sizes"),
    [
        (16, 64, [16, 24, 32, 44, 64]),
        (1, 3, [1, 2, 3]),
        (100, 110, [100, 110]),
        (3, 3, [3]),
    ],
)
def test_sizes_of_a_range_are_half_an_octave_apart(low: int, high: int, sizes: list[int]) -> None:
    assert grid_sizes(low, high) == sizes


def test_the_interval_of_what_was_not_tried_is_wider() -> None:
    world = saturating(0)
    _, seen, _ = world.search()
    belief = Belief(world.places, seen)
    tried = {one.place for one in seen if one.purpose == "trial"}
    widths = {place: time_s.high / time_s.low for place, time_s in zip(world.places, belief.times(), strict=True)}
    own = [width for place, width in widths.items() if place in tried]
    far = [width for place, width in widths.items() if place.size in (16, 512) and place not in tried]
    assert far
    assert max(own) < min(far)


class CoarseWorld(OddWorld):
    """Runs that differ more, and evaluations that may be as far apart as the whole way to the target."""

    def __post_init__(self) -> None:
        super().__post_init__()
        draw = random.Random(self.seed)
        self.between, self.spread = draw.choice([500.0, 3000.0, 12_000.0]), draw.choice([0.05, 0.1, 0.15, 0.2])
        self.least = draw.choice([2e3, 6e3, 1e4, 2e4])

    def measured(self, place: Place, rng: random.Random) -> float:
        samples = self.needed(place) * math.exp(rng.gauss(0, self.spread))
        return math.ceil(samples / self.between) * self.between

    def time_s(self, place: Place) -> float:
        rng = random.Random(5)
        needed = [self.measured(place, rng) for _ in range(60)]
        return math.inf if statistics.median(needed) > WHOLE else statistics.geometric_mean(needed) / self.speed(place)

    def run(self, choice: Choice) -> Seen:
        place, is_probe = choice.place, choice.purpose == "probe"
        rate = self.speed(place) * math.exp(self.rng.gauss(0, 0.02))
        speed = Interval(rate, rate * 0.98, rate * 1.02)
        most = max(PROBE_STEPS * place.size, PROBE_SHARE * WHOLE) if is_probe else WHOLE
        high = self.measured(place, self.rng)
        if high > most:
            status = "stopped" if is_probe else "done"
            return Seen(place, choice.purpose, most, WHOLE, None, speed, self.noise / 3, status)
        needed = Interval(high - self.between / 2, high - self.between, high)
        return Seen(place, choice.purpose, high, WHOLE, needed, speed, self.noise / 3)


def test_what_the_model_says_of_the_others_is_called_its_guess() -> None:
    """Over the curves of the digits it was right in 78 % of 199 sweeps, whatever chance it saw: none is stated."""
    reasons = []
    for seed in range(8):
        base = odd(seed)
        reasons.append(CoarseWorld(base.noise, base.half_speed, base.top, seed=seed).search()[2])
    of_others = [reason for reason in reasons if "not tried" in reason]
    assert of_others
    assert all(reason.startswith("the search's model guesses that none of the") for reason in of_others)


def test_with_too_few_trials_nothing_is_claimed_of_the_others() -> None:
    """Probes that reach the target show where, and no trial was trained to it."""
    places = [Place("fp32", "all", size) for size in (16, 64, 256)]
    rate = Interval(1e4, 1e4, 1e4)
    seen = [Seen(place, "probe", 500.0, WHOLE, Interval(250.0, 0.0, 500.0), rate, None, "done") for place in places[:2]]
    seen += [Seen(places[2], "probe", 4000.0, WHOLE, None, Interval(10.0, 10.0, 10.0))]
    seen += [Seen(place, "trial", 500.0, WHOLE, Interval(250.0, 0.0, 500.0), rate) for place in places[:2]]
    step = decide(places, seen, [])
    assert isinstance(step, Ended)
    assert step.reason.startswith("the search's model guesses, from few trials, that none of the 1 ")
