"""What a sweep says: its trials ranked by the objective, the answer in one line, and
what is in doubt.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trainers.config.metrics import direction_of
from trainers.errors import POLICIES
from tune.config import SweepConfig
from tune.objective import TO_TARGET, Objective
from tune.report.doubts import Doubt, doubts
from tune.report.largest import largest_size
from tune.report.seeds import Configuration, by_configuration, without_seed
from tune.report.words import (
    amount,
    capitalized,
    duration,
    in_words,
    listed,
    metric_names,
    number,
    printable,
    span,
    target,
    telling,
)
from tune.search.finalists import Final, finals, most_ahead, rivals, told_apart
from tune.trials.interval import EQUAL, Interval
from tune.trials.record import TrialRecord, value_of

_EQUAL_SCORE = 0.01
_UNITS = {
    "peak_memory_bytes": " of peak memory",
    "energy_j": " of energy",
    "step_time_s": " a step",
}


@dataclass(frozen=True)
class Answer:
    """What the sweep says."""

    ranking: list[TrialRecord]
    """All trials that have a value of the objective, best first."""
    finals: list[Final]
    """What repeats say of the first of them, fastest first."""
    value: float | None
    """The best's value of the objective, by its repeats or seeds where it has any."""
    equal: list[TrialRecord]
    """Those that cannot be told apart from the best."""
    line: str
    """The answer: which configuration is best, at what and by how much, and which are
    as good; or why none is.
    """
    fastest: str
    """Which configuration has the highest throughput; empty where the best has, or is
    about as fast.
    """
    largest: str
    """Whether the largest batch size lost to its learning rate or to itself, where that
    was searched around.
    """
    doubts: list[Doubt]
    """What the sweep does not know, with what would settle it."""
    most_ahead: float | None
    """How many times as fast as the best any other trial is at most, with 95 %
    confidence; None: nothing tells.
    """

    @property
    def best(self) -> TrialRecord | None:
        """The first of the ranking."""
        return self.ranking[0] if self.ranking else None

    @property
    def text(self) -> str:
        """All that there is to say, a line each."""
        return "\n".join(
            [
                self.line,
                *filter(None, [self.fastest, self.largest]),
                *(f"- {doubt.text}" for doubt in self.doubts),
            ]
        )


@dataclass(frozen=True)
class _Place:
    """A configuration's place in the answer."""

    record: TrialRecord
    value: float
    """Of the objective; with repeats the time to the target, s."""
    runs: str
    """By what it is known: "0.31 to 0.63 s, 6 repeats"."""
    is_equal: bool
    """Whether it cannot be told apart from the first."""
    margin: str = ""
    """How the first compares with it, where the two are told apart: "1.2 times faster
    than".
    """


def answer(config: SweepConfig, records: list[TrialRecord]) -> Answer:
    """Rank the trials by the objective and say the outcome: by repeats where finalists
    were repeated, by the mean over its seeds where the space has a `seed`, else by one
    run each.
    """
    objective = config.objective
    ranked = _ranked(objective, records)
    found = finals(config, records)
    if "seed" in config.space:
        configurations = by_configuration(objective, ranked, records)
        ranked = [
            pair for configuration in configurations for pair in configuration.runs
        ]
        places = _places_of_seeds(objective, configurations)
    elif found:
        ids = [final.record.id for final in found]
        ranked.sort(
            key=lambda pair: ids.index(pair[1].id) if pair[1].id in ids else len(ids)
        )
        places = _places_of_finals(found)
    else:
        places = _places_of_runs(objective, ranked)
    ranking = [record for _, record in ranked]
    if places:
        ranking[0] = places[0].record
        line = _line(config, records, places)
    else:
        line = _why_none(config, records)
    best = places[0] if places else None
    is_time = objective.metric in TO_TARGET
    ahead = most_ahead(records, found) if is_time and len(ranking) > 1 else None
    value = best.value if best else None
    if best and found and objective.metric == "usd_to_target":
        value = _usd(best.record, best.value)
    fastest = _fastest(config, records, best.record if best else None, found)
    equal = [place.record for place in _tied(places)]
    repeated = {final.record.id for final in found}
    unclear = [
        record for record in rivals(config, records) if record.id not in repeated
    ]
    as_good = {record.id for record in [*ranking[:1], *equal, *unclear]}
    return Answer(
        ranking,
        found,
        value,
        equal,
        printable(line),
        printable(fastest),
        printable(largest_size(config, records, as_good)),
        doubts(config, records, found, ahead),
        ahead,
    )


def objective_value(objective: Objective, record: TrialRecord) -> float | None:
    """Return the figure that ranks a trial; None where it failed, or has none that is
    finite.
    """
    return value_of(objective.metric, record)


def _ranked(
    objective: Objective, records: list[TrialRecord]
) -> list[tuple[float, TrialRecord]]:
    pairs = [
        (objective_value(objective, record), record)
        for record in records
        if record.purpose != "repeat"
    ]
    values = [(value, record) for value, record in pairs if value is not None]
    return sorted(
        values, key=lambda pair: pair[0], reverse=objective.direction == "max"
    )


def _places_of_runs(
    objective: Objective, ranked: Sequence[tuple[float, TrialRecord]]
) -> list[_Place]:
    """Return the places by one run each."""
    if not ranked:
        return []
    best_value, best = ranked[0]
    places = []
    for value, record in ranked:
        is_clear = record is not best and _is_clear(
            objective.metric, best, record, best_value, value
        )
        margin = _margin(objective.metric, best_value, value) or ""
        places.append(_Place(record, value, "one run", not is_clear, margin))
    return places


def _places_of_seeds(
    objective: Objective, configurations: Sequence[Configuration]
) -> list[_Place]:
    """Return the places by the means over seeds."""
    places = []
    for configuration in configurations:
        mean = configuration.mean
        runs = (
            f"{configuration.num_seeds} seeds"
            if configuration.num_seeds > 1
            else "one seed"
        )
        if configuration.num_missed:
            runs += f", {configuration.num_missed} more without a value"
        if mean.low < mean.high:
            runs = f"{_between(objective.metric, mean)}, {runs}"
        margin = _margin(objective.metric, configurations[0].mean.value, mean.value)
        is_equal = configuration.is_equal or margin is None
        places.append(
            _Place(configuration.record, mean.value, runs, is_equal, margin or "")
        )
    return places


def _places_of_finals(found: Sequence[Final]) -> list[_Place]:
    """Return the places of finalists, by their repeats."""
    places = []
    for final in found:
        runs = f"{span(final.time_s.low, final.time_s.high)}, {final.repeats} repeats"
        if final.num_missed:
            runs += f", {final.num_missed} of which missed it"
        low = number(final.ratio.low, 2)
        high = number(final.ratio.high, 2)
        interval = (
            f"{low} to {high}" if math.isfinite(final.ratio.high) else f"at least {low}"
        )
        margin = f"{number(final.ratio.value, 3)} times ({interval}) faster than"
        places.append(
            _Place(final.record, final.time_s.value, runs, final.equal, margin)
        )
    return places


def _line(
    config: SweepConfig, records: Sequence[TrialRecord], places: Sequence[_Place]
) -> str:
    """Return the answer."""
    names = telling(config, records)
    names.pop("seed", None)
    first, *others = places
    name = capitalized(in_words(names, first.record))
    head = f"{name}: {_achieved(config.objective, first)} ({first.runs})"
    if not others:
        only = (
            "it is the only trial"
            if len(records) == 1
            else "nothing else has a value to compare"
        )
        return f"{head}; {only}."
    equal = [
        in_words(names, place.record).removeprefix("batch ") for place in _tied(places)
    ]
    if equal:
        return f"{head}; {listed(equal)} {'is' if len(equal) == 1 else 'are'} as good."
    return f"{head}, {others[0].margin} the next, {in_words(names, others[0].record)}."


def _tied(places: Sequence[_Place]) -> list[_Place]:
    """Return the places that cannot be told apart from the first."""
    return list(itertools.takewhile(lambda place: place.is_equal, places[1:]))


def _achieved(objective: Objective, place: _Place) -> str:
    """Return what a configuration is best at: "3.12 s to val_accuracy 0.97", "val_loss
    0.0432".
    """
    metric = objective.metric
    record = place.record
    if metric not in TO_TARGET:
        is_named = metric not in _UNITS and metric != "samples_per_s"
        return (
            f"{metric} " * is_named
            + amount(metric, place.value)
            + _UNITS.get(metric, "")
        )
    is_repeated = place.runs != "one run"
    if metric == "usd_to_target" and not is_repeated:
        return f"{amount(metric, place.value)} to {target(objective)}"
    time = (
        duration(place.value)
        if is_repeated
        else span(record.missed_target_s, place.value)
    )
    usd = _usd(record, place.value)
    price = f" and {amount('usd_to_target', usd)}" if usd is not None else ""
    return f"{time}{price} to {target(objective)}"


def _between(metric: str, mean: Interval) -> str:
    """Return a mean's interval in words."""
    if metric == "time_to_target":
        return span(mean.low, mean.high)
    return f"{amount(metric, mean.low)} to {amount(metric, mean.high)}"


def _usd(record: TrialRecord, time_s: float) -> float | None:
    """Return what a time on the trial's lane costs; None without a price."""
    usd = record.metrics.get("usd_to_target")
    if usd is None or not record.time_to_target_s:
        return None
    return usd / record.time_to_target_s * time_s


def _is_clear(
    metric: str, best: TrialRecord, other: TrialRecord, value: float, second: float
) -> bool:
    """Whether one run each shows which of two trials is better."""
    if metric in TO_TARGET:
        return told_apart(best, other)
    return _margin(metric, value, second) is not None and (
        metric != "samples_per_s" or _is_faster(best, other)
    )


def _is_faster(first: TrialRecord, other: TrialRecord) -> bool:
    """Whether one run each shows that a trial's throughput is higher, whatever `other`
    has lost to work beside it.
    """
    low = (first.samples_per_s or 0.0) * (1 - _half_width(first))
    high = (other.samples_per_s or 0.0) * (1 + _half_width(other))
    return low * (1 - (other.cpu_pressure or 0.0)) > (1 + EQUAL) * high


def _half_width(record: TrialRecord) -> float:
    """Return the relative half width of the 95 % confidence interval of a trial's
    throughput; 0 where not known.
    """
    return (
        (record.step_time_ci95_s or 0.0) / record.step_time_s
        if record.step_time_s
        else 0.0
    )


def _margin(metric: str, value: float, other: float) -> str | None:
    """Return how much better `value` is than `other`, in words; None when the two are
    about equal.

    A ratio; but a difference between scores of at most 1, and where a sign makes a
    ratio meaningless.
    """
    direction = "lower" if value < other else "higher"
    gap = abs(value - other)
    low, high = sorted((value, other))
    is_score = high <= 1 and metric != "samples_per_s" and direction_of(metric) == "max"
    if is_score or low <= 0:
        least = _EQUAL_SCORE if is_score else EQUAL * max(abs(low), abs(high))
        return f"{number(gap, 2)} {direction} than" if gap > least else None
    if high < low * (1 + EQUAL):
        return None
    words = "faster" if metric in ("time_to_target", "samples_per_s") else direction
    return f"{number(high / low, 3 if high < 1.2 * low else 2)} times {words} than"


def _why_none(config: SweepConfig, records: list[TrialRecord]) -> str:
    """Return why no trial has a value of the objective."""
    finished = [record for record in records if record.finished]
    if not records:
        return "There is no best trial: none has run."
    if not finished:
        return _none_finished(records)
    metric = config.objective.metric
    if metric in metric_names(finished):
        return f"There is no best trial: no finished one has a {metric} that is a finite number."
    if metric != "time_to_target":
        reported = ", ".join(metric_names(finished)) or "none"
        return f"There is no best trial: no finished one has a {metric} (metrics reported: {reported})."
    return _none_reached(config, records, finished)


def _none_finished(records: Sequence[TrialRecord]) -> str:
    counts = Counter(record.status for record in records).most_common()
    ended = ", ".join(f"{count} {status}" for status, count in counts)
    status, _ = counts[0]
    return f"There is no best trial: none finished ({ended}). For {status}: {POLICIES[status].advice}."


def _none_reached(
    config: SweepConfig, records: Sequence[TrialRecord], finished: Sequence[TrialRecord]
) -> str:
    goal = config.objective.goal
    assert goal is not None  # of a time to target
    text = f"There is no best trial: no finished one reached {target(config.objective)}"
    rows = [
        (row, record) for record in finished for row in (*record.curve, record.metrics)
    ]
    values = [
        (row[goal.metric], record)
        for row, record in rows
        if math.isfinite(row.get(goal.metric, math.nan))
    ]
    if not values:
        return f"{text}, and none reported {goal.metric}."
    pick = min if goal.mode == "min" else max
    value, closest = pick(values, key=lambda pair: pair[0])
    return f"{text}; the closest, {in_words(telling(config, records), closest)}, came to {number(value, 4)}."


def _fastest(
    config: SweepConfig,
    records: list[TrialRecord],
    best: TrialRecord | None,
    found: list[Final],
) -> str:
    """Return a sentence on the highest throughput; empty where the best trial is about
    as fast.
    """
    objective = config.objective
    ranked = _ranked(Objective(metric="samples_per_s"), records)
    if not ranked or objective.metric == "samples_per_s":
        return ""
    rate, fastest = ranked[0]
    if best is not None and without_seed(fastest).config == best.config:
        return ""
    if best is not None and best.samples_per_s and not _is_faster(fastest, best):
        return ""
    names = telling(config, records)
    names.pop("seed", None)
    width = _half_width(fastest)
    spread = f" (+-{width:.1%})" if width else ""
    what = _needed(objective, fastest, found)
    return f"Highest throughput: {in_words(names, fastest)}, {amount('samples_per_s', rate)}{spread}; it {what}."


def _needed(objective: Objective, record: TrialRecord, found: Sequence[Final]) -> str:
    """Return what a trial has of the objective: "needs 5.23 s", "has val_loss 0.118"."""
    value = objective_value(objective, record)
    if objective.metric != "time_to_target":
        return (
            f"has no {objective.metric}"
            if value is None
            else f"has {objective.metric} {amount(objective.metric, value)}"
        )
    if value is None:
        return f"does not reach {target(objective)}"
    repeated = [final.time_s.value for final in found if final.record.id == record.id]
    if repeated:
        return f"needs {duration(repeated[0])}"
    return f"needs {span(record.missed_target_s, value)}"
