"""What a sweep says: its trials ranked by the objective, and the outcome in plain sentences."""

import math
from collections import Counter
from dataclasses import dataclass

from trainers.config.metrics import direction_of
from trainers.errors import POLICIES, counted
from tune.config import SweepConfig
from tune.objective import TO_TARGET, Objective
from tune.report.words import (
    amount,
    duration,
    in_full,
    in_short,
    metric_names,
    number,
    printable,
    span,
    target,
    telling,
)
from tune.search.finalists import Final, crowding, finals, most_ahead, pressure, rivals, told_apart
from tune.trials.interval import EQUAL
from tune.trials.record import TrialRecord, value_of

_EQUAL_SCORE = 0.01
_CROWDED = 0.25


@dataclass(frozen=True)
class Answer:
    """What the sweep says."""

    ranking: list[TrialRecord]
    """All trials that have a value of the objective, best first."""
    finals: list[Final]
    """What repeats say of the first of them, fastest first."""
    verdict: str
    """Which trial is best, at what and by how much, or why none is."""
    fastest: str
    """The throughput's winner; empty where it is the best trial, or about as fast as that."""
    notes: str
    """How the machine was while this was measured, where that matters."""
    most_ahead: float | None
    """How many times as fast as the best any other trial is at most, with 95 % confidence; None: nothing tells."""

    @property
    def best(self) -> TrialRecord | None:
        """The first of the ranking."""
        return self.ranking[0] if self.ranking else None

    @property
    def reasons(self) -> str:
        """All that there is to say beside the verdict."""
        return " ".join(part for part in (self.fastest, self.notes) if part)

    @property
    def sentence(self) -> str:
        """All that there is to say."""
        return f"{self.verdict} {self.reasons}".rstrip()


def answer(config: SweepConfig, records: list[TrialRecord]) -> Answer:
    """Rank the trials by the objective and say the outcome; finalists that were repeated, by their repeats."""
    ranked = _ranked(config.objective, records)
    found = finals(config, records)
    if found:
        ids = [final.record.id for final in found]
        ranked.sort(key=lambda pair: ids.index(pair[1].id) if pair[1].id in ids else len(ids))
        verdict = _final_verdict(config, records, found)
    elif ranked:
        verdict = _verdict(config, records, ranked)
    else:
        verdict = _why_none(config, records)
    ranking = [record for _, record in ranked]
    best = ranking[0] if ranking else None
    fastest = _fastest(config, records, best, found)
    is_time = config.objective.metric in TO_TARGET
    ahead = most_ahead(records, found) if is_time and len(ranking) > 1 else None
    notes = f"{_notes(config, records, found)} {_ahead(ahead)}".strip()
    return Answer(ranking, found, printable(verdict), printable(fastest), notes, ahead)


def objective_value(objective: Objective, record: TrialRecord) -> float | None:
    """Return the figure that ranks a trial; None where it failed, or has none that is finite."""
    return value_of(objective.metric, record)


def _ranked(objective: Objective, records: list[TrialRecord]) -> list[tuple[float, TrialRecord]]:
    pairs = [(objective_value(objective, record), record) for record in records if record.purpose != "repeat"]
    values = [(value, record) for value, record in pairs if value is not None]
    return sorted(values, key=lambda pair: pair[0], reverse=objective.direction == "max")


def _verdict(config: SweepConfig, records: list[TrialRecord], ranked: list[tuple[float, TrialRecord]]) -> str:
    """Return the winner and its margin over the runner-up."""
    names, objective, (value, best) = telling(config, records), config.objective, ranked[0]
    if objective.metric == "time_to_target":
        head = f"{in_full(names, best)} reaches {target(objective)} {_when(best)}"
    else:
        extreme = "lowest" if objective.direction == "min" else "highest"
        what = "throughput" if objective.metric == "samples_per_s" else objective.metric
        head = f"{in_full(names, best)} has the {extreme} {what}, {amount(objective.metric, value)}"
    if len(ranked) == 1:
        only = "it is the only trial" if len(records) == 1 else "no other trial has a value to compare"
        return f"{head}; {only}."
    second, runner_up = ranked[1]
    following = f"the next ({in_short(names, runner_up)})"
    clear = [_is_clear(objective.metric, best, record, value, other) for other, record in ranked[1:]]
    if clear[0]:
        return f"{head}, in one run each {_margin(objective.metric, value, second)} {following}."
    equal = 1 + (clear.index(True) if True in clear else len(clear))
    group = "two" if equal == 2 else f"first {equal}"
    verb = "needs" if objective.metric == "time_to_target" else "has"
    return (
        f"{head}, but {following} {verb} {_found(objective.metric, runner_up, second)}: "
        f"one run each cannot tell the {group} apart, and they count as equal."
    )


def _when(record: TrialRecord) -> str:
    """Return when a trial met the target: at an evaluation, or at some time since the one before."""
    time_s, before = record.time_to_target_s or 0.0, record.missed_target_s
    if before is None:
        return f"in {duration(time_s)} of training"
    if before <= 0:
        return f"within {duration(time_s)} of training, before its first evaluation"
    return f"after {span(before, time_s)} of training, between two evaluations"


def _found(metric: str, record: TrialRecord, value: float) -> str:
    """Return a trial's value of the objective, a time to the target as the interval that it is."""
    return span(record.missed_target_s, value) if metric == "time_to_target" else amount(metric, value)


def _is_clear(metric: str, best: TrialRecord, other: TrialRecord, value: float, second: float) -> bool:
    """Whether one run each shows which of two trials is better."""
    if metric in TO_TARGET:
        return told_apart(best, other)
    return _margin(metric, value, second) is not None and (metric != "samples_per_s" or _is_faster(best, other))


def _is_faster(first: TrialRecord, other: TrialRecord) -> bool:
    """Whether one run each shows that a trial's throughput is higher, whatever `other` has lost to work beside it."""
    low = (first.samples_per_s or 0.0) * (1 - _half_width(first))
    high = (other.samples_per_s or 0.0) * (1 + _half_width(other))
    return low * (1 - (other.cpu_pressure or 0.0)) > (1 + EQUAL) * high


def _half_width(record: TrialRecord) -> float:
    """Return the relative half width of the 95 % confidence interval of a trial's throughput; 0 where not known."""
    return (record.step_time_ci95_s or 0.0) / record.step_time_s if record.step_time_s else 0.0


def _final_verdict(config: SweepConfig, records: list[TrialRecord], found: list[Final]) -> str:
    """Return the winner by its repeats, with its interval, and those that cannot be told apart from it."""
    names, first, time_s = telling(config, records), found[0], found[0].time_s
    missed = f", of which {first.num_missed} did not reach it" if first.num_missed else ""
    head = (
        f"{in_full(names, first.record)} reaches {target(config.objective)} in {duration(time_s.value)} of training "
        f"(95 % interval {duration(time_s.low)} to {duration(time_s.high)}, {first.repeats} repeats alone{missed}"
        f"{_price(first.record, time_s.value)})"
    )
    equal = [f"{in_short(names, final.record)}: {duration(final.time_s.value)}" for final in found[1:] if final.equal]
    if equal:
        return f"{head}; it cannot be told apart from {' and '.join(equal)}: they count as equal."
    ratio = found[1].ratio
    low, high = number(ratio.low, 2), number(ratio.high, 2)
    interval = f"{low} to {high}" if math.isfinite(ratio.high) else f"at least {low}"
    return (
        f"{head}, {number(ratio.value, 3)} times ({interval}) faster than the next "
        f"({in_short(names, found[1].record)})."
    )


def _notes(config: SweepConfig, records: list[TrialRecord], found: list[Final]) -> str:
    """Return what the reader must know of how this was measured."""
    ratio, names, repeated = crowding(records), telling(config, records), [final.record.id for final in found]
    notes = []
    if left := [in_short(names, one) for one in rivals(config, records) if found and one.id not in repeated]:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        notes.append(f"One run each cannot exclude what was not repeated: {'; '.join(left[:3])}{more}.")
    if ratio is not None and ratio > 1 + EQUAL:
        notes.append(f"Alone, the finalists ran {number(ratio, 3)} times as fast as beside other trials.")
    if disturbed := [record for record in records if record.disturbed_s]:
        worst = max(disturbed, key=lambda record: record.disturbed_s or 0.0)
        notes.append(
            f"{counted(len(disturbed), 'trial')} stood still for a while, or had no processor (up to "
            f"{duration(worst.disturbed_s or 0.0)}, {in_short(names, worst)}): samples/s leave that out."
        )
    for who, waited in (("trials", pressure(records)), ("the finalists' repeats", pressure(records, repeats=True))):
        if waited is not None and waited > _CROWDED:
            most = f", up to {number(1 / (1 - waited), 2)} times as fast without" if waited < 1 else ""
            notes.append(
                f"While {who} ran, work on their node waited for a processor in {waited:.0%} of the time: "
                f"times and samples/s are those of a busy machine{most}."
            )
    return " ".join(notes)


def _ahead(most: float | None) -> str:
    """Return how much faster than the best another trial may be."""
    if most is None:
        return ""
    if most <= 1 + EQUAL:
        return f"No other trial is faster by more than {EQUAL:.0%} (95 % confidence)."
    if math.isinf(most):
        return "How much faster another trial is stays open: it may have met the target long before an evaluation."
    return f"Another trial may still be up to {number(most, 3)} times as fast (95 % confidence)."


def _price(record: TrialRecord, time_s: float) -> str:
    """Return ", 0.58 USD": what a time on the trial's lane costs; empty without a price."""
    usd = record.metrics.get("usd_to_target")
    if usd is None or not record.time_to_target_s:
        return ""
    return f", {number(usd / record.time_to_target_s * time_s, 2)} USD"


def _margin(metric: str, value: float, other: float) -> str | None:
    """Return how much better `value` is than `other`, in words; None when the two are about equal.

    A ratio; but a difference between scores of at most 1, and where a sign makes a ratio meaningless.
    """
    direction, gap = "lower" if value < other else "higher", abs(value - other)
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
        counts = Counter(record.status for record in records).most_common()
        ended, status = ", ".join(f"{count} {status}" for status, count in counts), counts[0][0]
        return f"There is no best trial: none finished ({ended}). For {status}: {POLICIES[status].advice}."
    metric = config.objective.metric
    if metric in metric_names(finished):
        return f"There is no best trial: no finished one has a {metric} that is a finite number."
    if metric != "time_to_target":
        reported = ", ".join(metric_names(finished)) or "none"
        return f"There is no best trial: no finished one has a {metric} (metrics reported: {reported})."
    text = f"There is no best trial: no finished one reached {target(config.objective)}"
    goal = config.objective.goal
    assert goal is not None  # of a time to target
    name = goal.metric
    rows = [(row, record) for record in finished for row in (*record.curve, record.metrics)]
    found = [(row[name], record) for row, record in rows if math.isfinite(row.get(name, math.nan))]
    if not found:
        return f"{text}, and none reported {name}."
    pick = min if goal.mode == "min" else max
    value, closest = pick(found, key=lambda pair: pair[0])
    who = in_full(telling(config, records), closest)
    return f"{text}; the closest, {who}, came to {number(value, 4)}."


def _fastest(config: SweepConfig, records: list[TrialRecord], best: TrialRecord | None, found: list[Final]) -> str:
    """Return a sentence on the highest throughput; empty where the best trial is about as fast."""
    objective, throughput = config.objective, Objective(metric="samples_per_s")
    ranked = _ranked(throughput, records)
    if not ranked or objective.metric == "samples_per_s":
        return ""
    rate, fastest = ranked[0]
    of_best = objective_value(throughput, best) if best else None
    if best is not None and of_best is not None and not _is_faster(fastest, best):
        return ""
    value = objective_value(objective, fastest)
    if objective.metric != "time_to_target":
        rest = f"has no {objective.metric}" if value is None else f"has {objective.metric} {number(value, 4)}"
    elif value is not None:
        repeated = next((final.time_s.value for final in found if final.record.id == fastest.id), None)
        needed = _found("time_to_target", fastest, value) if repeated is None else duration(repeated)
        rest = f"needs {needed}{_price(fastest, value if repeated is None else repeated)}"
    else:
        rest = f"does not reach {target(objective)}"
    who = in_full(telling(config, records), fastest)
    width = _half_width(fastest)
    spread = f" (+-{width:.1%})" if width else ""
    return f"The highest throughput, {amount('samples_per_s', rate)}{spread}, has {who}, which {rest}."
