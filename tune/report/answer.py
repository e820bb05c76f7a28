"""A sweep's answer: the ranking of its trials, the result in a line, and its doubts."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from trainers.config.function import BATCH_KEYS
from trainers.config.sections import direction_of
from trainers.errors import counted
from trainers.measure.figures import student_t
from tune.config import (
    MEASURED,
    TO_TARGET,
    Objective,
    SweepConfig,
    sample_values,
)
from tune.report.words import (
    Trials,
    amount,
    capitalized,
    duration,
    in_words,
    listed,
    metric_names,
    number,
    printable,
    shown,
    span,
    target,
)
from tune.search.finalists import (
    LEVEL,
    MOST_FINALISTS,
    Final,
    finals,
    most_ahead,
    pressure,
    rivals,
    told_apart,
)
from tune.search.space import is_inside, scores_of
from tune.trials.record import (
    ADVICE,
    BY_BUDGET,
    EQUAL,
    Interval,
    Records,
    TrialRecord,
    trial_id,
    value_of,
)

_BUSY = 0.25
_TELLING = 10.0
"""Above this, a bound on how much faster another trial may be is not shown."""
_EQUAL_SCORE = 0.01
_UNITS = {
    "peak_memory_bytes": " of peak memory",
    "step_time_s": " a step",
    "samples_per_s": "",
}
"""The words after a metric's value, for metrics that need no name besides the unit."""


Run = tuple[float, TrialRecord]
"""A trial's value of the objective, and its record."""


@dataclass(frozen=True)
class Configuration:
    """The results of a configuration over its seeds, which count as repeats."""

    record: TrialRecord
    """The record of the configuration's median run, without the seed."""
    runs: list[Run]
    """Its runs that have a value of the objective, best first."""
    mean: Interval
    """Mean of the objective, with its 95 % interval; the spread is pooled over
    all configurations.
    """
    num_missed: int
    """The number of seeds whose runs have no value: they failed or missed the target."""
    is_equal: bool
    """Whether its mean cannot be distinguished from the best configuration's."""


def without_seed(record: TrialRecord) -> TrialRecord:
    """Return a record without the seed in its configuration."""
    config = {
        key: value for key, value in record.config.items() if key != "seed"
    }
    return replace(record, config=config)


def by_configuration(
    objective: Objective, ranked: Sequence[Run], records: Records
) -> list[Configuration]:
    """Return the configurations, by the share of missing values, then best mean first.

    Trials that a user has stopped are ignored, and so are further runs of the
    same trial.

    `ranked` are the records that have a value of the objective, best first.
    Each configuration is compared with the best by a t-test. The test's level
    of 5 % is divided among all pairs (Bonferroni), because the best is chosen
    by the same values. Without two runs of any, one run each is compared. For
    measured quantities, means are geometric.
    """
    first = _first_runs(records)
    groups: dict[str, list[Run]] = {}
    for value, record in ranked:
        if record.id in first:
            groups.setdefault(_key(record), []).append((value, record))
    if not groups:
        return []
    missed = Counter(_key(record) for record in first.values())
    is_ratio = objective.metric in MEASURED and all(
        value > 0 for value, _ in ranked
    )
    scale, unscale = (math.log, math.exp) if is_ratio else (float, float)
    means = {}
    squares = 0.0
    for key, runs in groups.items():
        values = [scale(value) for value, _ in runs]
        means[key] = statistics.fmean(values)
        missed[key] -= len(runs)
        squares += sum((value - means[key]) ** 2 for value in values)
    sign = 1 if objective.direction == "min" else -1
    order = sorted(
        groups,
        key=lambda key: (missed[key] / len(groups[key]), sign * means[key]),
    )
    best = order[0]
    level = 1 - LEVEL / max(1, len(order) * (len(order) - 1))
    num_free = sum(len(runs) - 1 for runs in groups.values())
    found = []
    for key in order:
        runs = groups[key]
        half = 0.0
        is_close = key == best
        if num_free:
            spread = math.sqrt(squares / num_free)
            half = student_t(num_free, 0.975) * spread / math.sqrt(len(runs))
            error = spread * math.sqrt(1 / len(runs) + 1 / len(groups[best]))
            gap = sign * (means[key] - means[best])
            is_close = gap <= student_t(num_free, level) * error
        elif objective.metric in TO_TARGET:
            is_close = not told_apart(groups[best][0][1], runs[0][1])
        is_equal = is_close and missed[key] == missed[best]
        ends = (means[key], means[key] - half, means[key] + half)
        mean = Interval(*map(unscale, ends))
        _, median = runs[(len(runs) - 1) // 2]
        record = without_seed(median)
        found.append(Configuration(record, runs, mean, missed[key], is_equal))
    return found


def _first_runs(records: Records) -> dict[str, TrialRecord]:
    """Return the records that count, by ID: the first run of each trial."""
    first: dict[str, TrialRecord] = {}
    for record in records:
        if record.purpose != "repeat" and not record.is_censored:
            first.setdefault(trial_id(record.config), record)
    return {record.id: record for record in first.values()}


def _key(record: TrialRecord) -> str:
    return trial_id(without_seed(record).config)


@dataclass(frozen=True)
class Doubt:
    """A question that the sweep leaves open, and what would settle it."""

    what: str
    """The doubt, as a sentence without its full stop."""
    settled_by: str
    """What would settle it: a key of the sweep, or another machine."""

    @property
    def text(self) -> str:
        """The doubt and what would settle it, in one line."""
        return f"{self.what}. Settled by {self.settled_by}."


def _once(
    trials: Trials, found: Sequence[Final], most_ahead: float | None
) -> Doubt | None:
    """Return the doubt that a trial that ran once may be faster than the best."""
    if most_ahead is None or most_ahead <= 1 + EQUAL:
        return None
    how_much = "faster, by an unknown factor"
    if most_ahead <= _TELLING:
        how_much = (
            f"up to {number(most_ahead, 2)} times as fast (95 % confidence)"
        )
    what = f"another trial may be {how_much}"
    if not found:
        return Doubt(
            f"One run each: {what}", "repeats (`finalists: 2` or more)"
        )
    repeated = _repeated(trials.records)
    rest = [
        trials.name(record)
        for record in rivals(trials.config, trials.records)
        if trial_id(record.config) not in repeated
    ]
    if not rest:
        more = "more repeats, for which a longer search leaves time"
        return Doubt(f"Another trial may be {how_much}", more)
    who = printable(capitalized(listed(rest)))
    wanted = min(MOST_FINALISTS, len(repeated) + len(rest))
    return Doubt(f"{who} ran once: {what}", f"`finalists: {wanted}`")


def _repeated(records: Records) -> dict[str, list[TrialRecord]]:
    """Return the repeats of each configuration that has any."""
    found: dict[str, list[TrialRecord]] = {}
    for record in records:
        if record.purpose == "repeat":
            found.setdefault(trial_id(record.config), []).append(record)
    return found


def _only_once(trials: Trials) -> Doubt | None:
    """Return the doubt about trials that ended well once, but failed in all repeats."""
    names = [
        trials.name(repeats[0])
        for repeats in _repeated(trials.records).values()
        if not any(repeat.finished for repeat in repeats)
    ]
    if not names:
        return None
    what = f"{printable(capitalized(listed(names)))} ended well once, and failed in each repeat"
    return Doubt(what, "the repeats' messages in report.html")


def _one_seed(trials: Trials) -> Doubt | None:
    """Return the doubt that the order depends on the seed, if each trial had one."""
    is_measured = trials.objective.metric in MEASURED
    first = _first_runs(trials.records).values()
    runs = [record for record in first if record.finished]
    has_seeds = len(set(map(_key, runs))) < len(runs)
    if is_measured or has_seeds or len(runs) < 2:
        return None
    what = "One seed each: another seed may change the order"
    return Doubt(what, "`seed: [0, 1, 2]` in the space")


def _by_hand(trials: Trials) -> Doubt | None:
    """Return the doubt about trials that were stopped by hand and not run again."""
    stopped = [record for record in trials.records if record.is_censored]
    clone = "a clone (`python -m tune steer SWEEP clone TRIAL`)"
    return _unknown(trials, stopped, "stopped by hand", clone)


def _by_budget(trials: Trials) -> Doubt | None:
    """Return the doubt about trials that are ranked by what they were when cut off."""
    metric = trials.objective.metric
    if metric in MEASURED:
        return None
    cut = [
        record
        for record in trials.records
        if record.message == BY_BUDGET and value_of(metric, record) is not None
    ]
    return _unknown(trials, cut, "cut off by the budget", "a larger `budget`")


def _unknown(
    trials: Trials, stopped: Records, how: str, settled_by: str
) -> Doubt | None:
    """Return the doubt about trials that were stopped and not run again."""
    ids = {record.id for record in stopped}
    ended = {
        trial_id(record.config)
        for record in trials.records
        if record.id not in ids
    }
    names = {
        record.id: trials.name(record)
        for record in stopped
        if trial_id(record.config) not in ended
    }
    if not names:
        return None
    who = printable(capitalized(listed(list(names.values()))))
    what = f"{who} were {how}: how good they would have been is open"
    if len(names) == 1:
        what = f"{who} was {how}: how good it would have been is open"
    return Doubt(what, settled_by)


def _disturbed(trials: Trials) -> Doubt | None:
    lost = [(record.disturbed_s or 0.0, record) for record in trials.records]
    disturbed = [pair for pair in lost if pair[0]]
    if not disturbed:
        return None
    longest_s, worst = max(disturbed, key=itemgetter(0))
    who = printable(trials.name(worst))
    what = f"{counted(len(disturbed), 'trial')} stood still or had no processor, for up to {duration(longest_s)} ({who})"
    return Doubt(
        f"{what}: samples/s exclude this time", "a machine without other work"
    )


def _busy(trials: Trials) -> Doubt | None:
    shares = []
    for purpose in ("trial", "repeat"):
        share = pressure(trials.records, purpose == "repeat")
        if share is not None and share > _BUSY:
            shares.append(f"{purpose}s {share:.0%}")
    if not shares:
        return None
    time = f"{', '.join(shares)} of their time"
    what = f"Work on the nodes waited for a processor ({time}): times are from a busy machine"
    settled_by = "a machine without other work"
    if trials.config.lanes != 1:
        settled_by = f"`lanes: 1`, or {settled_by}"
    return Doubt(what, settled_by)


@dataclass(frozen=True)
class Answer:
    """The answer of a sweep."""

    ranking: list[TrialRecord]
    """All trials that have a value of the objective, best first."""
    best: TrialRecord | None
    """The best trial, or the best configuration's median run, without its seed."""
    finals: list[Final]
    """The results of the finalists' repeats, fastest first."""
    value: float | None
    """The best trial's objective value; the mean of its repeats or seeds, if any."""
    equal: list[TrialRecord]
    """The trials that cannot be distinguished from the best."""
    line: str
    """The answer in a sentence: which configuration is best, what it achieved
    and by how much it leads, and which others are as good; or why there is no
    best configuration.
    """
    fastest: str
    """A sentence on the configuration with the highest throughput; empty if
    the best trial has it, or is about as fast.
    """
    largest: str
    """A sentence on whether the largest batch size lost because of its
    learning rate or because of its size; empty unless the rate was searched
    `around`.
    """
    doubts: list[Doubt]
    """What the sweep does not know, with what would settle it."""
    most_ahead: float | None
    """Upper bound, with 95 % confidence, on the speed of any other trial,
    divided by the best trial's speed; None if unknown.
    """

    @property
    def text(self) -> str:
        """All sentences of the answer, one per line."""
        lines = [
            line for line in (self.line, self.fastest, self.largest) if line
        ]
        lines += [f"- {doubt.text}" for doubt in self.doubts]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Place:
    """A configuration's place in the answer."""

    record: TrialRecord
    value: float
    """Value of the objective; with repeats, the time to target, s."""
    runs: str
    """The evidence for the value: "0.31 to 0.63 s, 6 repeats"."""
    is_equal: bool
    """Whether this configuration cannot be distinguished from the first place."""
    margin: str = ""
    """How the first place compares with this one, if the two can be
    distinguished: "1.2 times faster than".
    """


def answer(config: SweepConfig, records: Records) -> Answer:
    """Rank the trials by the objective, and put the result in words.

    The ranking is by the mean over seeds if the space has a `seed`, else by
    repeats if finalists were repeated, else by one run each.
    """
    objective = config.objective
    trials = Trials(config, records)
    ranked = _ranked(objective, records)
    found = finals(config, records)
    ranking = [record for _, record in ranked]
    if "seed" in config.space:
        configurations = by_configuration(objective, ranked, records)
        ranking = [
            record
            for configuration in configurations
            for _, record in configuration.runs
        ]
        places = _places_of_seeds(objective.metric, configurations)
    elif found:
        ranking = [final.record for final in found]
        ids = {record.id for record in ranking}
        ranking += [record for _, record in ranked if record.id not in ids]
        places = _places_of_finals(found)
    else:
        places = _places_of_runs(objective.metric, ranked)
    best = value = None
    if places:
        best = places[0].record
        value = places[0].value
        line = _line(trials, places)
        if found and objective.metric == "usd_to_target":
            value = _usd(best, value)
    else:
        line = f"There is no best trial: {_why_none(trials)}."
    ahead = None
    if objective.metric in TO_TARGET and len(ranking) > 1:
        ahead = most_ahead(records, found)
    tied = _tied(places)
    repeated = {final.record.id for final in found}
    as_good = {place.record.id for place in [*places[:1], *tied]}
    as_good |= {record.id for record in rivals(config, records)} - repeated
    # First doubts about the order, then about the machine during the
    # measurement.
    doubts = [
        _once(trials, found, ahead),
        _only_once(trials),
        _one_seed(trials),
        _by_hand(trials),
        _by_budget(trials),
        _disturbed(trials),
        _busy(trials),
    ]
    return Answer(
        ranking,
        best,
        found,
        value,
        [place.record for place in tied],
        printable(line),
        printable(_fastest(trials, best, found)),
        printable(largest_size(trials, as_good)),
        [doubt for doubt in doubts if doubt is not None],
        ahead,
    )


def _ranked(objective: Objective, records: Records) -> list[Run]:
    """Return the trials that have a value of the objective, best first."""
    found = []
    for record in records:
        value = value_of(objective.metric, record)
        if value is not None and record.purpose != "repeat":
            found.append((value, record))
    found.sort(key=itemgetter(0), reverse=objective.direction == "max")
    return found


def _places_of_runs(metric: str, ranked: Sequence[Run]) -> list[_Place]:
    """Return the places of the trials, judged by one run each."""
    places = []
    for value, record in ranked:
        best_value, best = ranked[0]
        margin = _margin(metric, best_value, value)
        is_clear = margin is not None
        if metric in TO_TARGET:
            is_clear = told_apart(best, record)
        elif metric == "samples_per_s":
            is_clear = is_clear and _is_faster(best, record)
        is_equal = record is best or not is_clear
        places.append(_Place(record, value, "one run", is_equal, margin or ""))
    return places


def _places_of_seeds(
    metric: str, configurations: Sequence[Configuration]
) -> list[_Place]:
    """Return the places of the configurations, judged by their means over seeds."""
    places = []
    for found in configurations:
        mean = found.mean
        num_runs = len(found.runs)
        runs = f"{num_runs} seeds" if num_runs > 1 else "one seed"
        if found.num_missed:
            runs += f", {found.num_missed} more without a value"
        if mean.low < mean.high:
            between = (
                f"{amount(metric, mean.low)} to {amount(metric, mean.high)}"
            )
            if metric == "time_to_target":
                between = span(mean.low, mean.high)
            runs = f"{between}, {runs}"
        best = configurations[0]
        margin = _margin(metric, best.mean.value, mean.value)
        if found.num_missed * len(best.runs) > best.num_missed * num_runs:
            margin = "with values of more seeds than"
        is_equal = found.is_equal or margin is None
        places.append(
            _Place(found.record, mean.value, runs, is_equal, margin or "")
        )
    return places


def _places_of_finals(found: Sequence[Final]) -> list[_Place]:
    """Return the places of the finalists, judged by their repeats."""
    places = []
    for final in found:
        runs = f"{span(final.time_s.low, final.time_s.high)}, {final.repeats} repeats"
        if final.num_missed:
            runs += f", {final.num_missed} of which missed the target"
        low = number(final.ratio.low, 2)
        interval = f"at least {low}"
        if math.isfinite(final.ratio.high):
            interval = f"{low} to {number(final.ratio.high, 2)}"
        margin = (
            f"{number(final.ratio.value, 3)} times ({interval}) faster than"
        )
        if final.ratio.low <= 1:
            margin = "with the target met in more repeats than"
        time_s = final.time_s.value
        places.append(_Place(final.record, time_s, runs, final.equal, margin))
    return places


def _line(trials: Trials, places: Sequence[_Place]) -> str:
    """Return the answer in a sentence."""
    first, *others = places
    name = capitalized(_without_seed(trials, first.record))
    head = f"{name}: {_achieved(trials.objective, first)} ({first.runs})"
    if not others and len(trials.records) == 1:
        return f"{head}; it is the only trial."
    if not others:
        return f"{head}; nothing else has a value to compare."
    equal = [
        _without_seed(trials, place.record).removeprefix("batch ")
        for place in _tied(places)
    ]
    if not equal:
        following = _without_seed(trials, others[0].record)
        return f"{head}, {others[0].margin} the next, {following}."
    verb = "is" if len(equal) == 1 else "are"
    return f"{head}; {listed(equal)} {verb} as good."


def _without_seed(trials: Trials, record: TrialRecord) -> str:
    """Return a configuration in words without its seed, or "The run as it is"."""
    names = {
        key: name for key, name in trials.telling.items() if key != "seed"
    }
    return in_words(names, record) or "The run as it is"


def _tied(places: Sequence[_Place]) -> list[_Place]:
    """Return the places right after the first that are not clearly worse than it."""
    return list(itertools.takewhile(lambda place: place.is_equal, places[1:]))


def _achieved(objective: Objective, place: _Place) -> str:
    """Return a place's value of the objective in words: "3.12 s to val_accuracy 0.97"."""
    metric = objective.metric
    record = place.record
    value = amount(metric, place.value)
    if metric in _UNITS:
        return value + _UNITS[metric]
    if metric not in TO_TARGET:
        return f"{metric} {value}"
    is_repeated = place.runs != "one run"
    if metric == "usd_to_target" and not is_repeated:
        return f"{value} to {target(objective)}"
    time = duration(place.value)
    if not is_repeated:
        time = span(record.missed_target_s, place.value)
    if place.runs.startswith("at least"):
        time = f"at least {time}"
    usd = _usd(record, place.value)
    if usd is not None:
        time += f" and {amount('usd_to_target', usd)}"
    return f"{time} to {target(objective)}"


def _usd(record: TrialRecord, time_s: float) -> float | None:
    """Return the price of `time_s` on the trial's lane, in dollars; None if unknown."""
    usd = record.metrics.get("usd_to_target")
    if usd is None or not record.time_to_target_s:
        return None
    return usd / record.time_to_target_s * time_s


def _is_faster(first: TrialRecord, other: TrialRecord) -> bool:
    """Return whether one run each shows that `first` has the higher throughput.

    This accounts for the time that `other` may have lost to other work on its
    machine.
    """
    low = (first.samples_per_s or 0.0) * (1 - _half_width(first))
    high = (other.samples_per_s or 0.0) * (1 + _half_width(other))
    undisturbed = 1 - (other.cpu_pressure or 0.0)
    return low * undisturbed > (1 + EQUAL) * high


def _half_width(record: TrialRecord) -> float:
    """Return the half width of a throughput's 95 % interval, as a share of the value."""
    if not record.step_time_s:
        return 0.0
    return (record.step_time_ci95_s or 0.0) / record.step_time_s


def _margin(metric: str, value: float, other: float) -> str | None:
    """Return how much better `value` is than `other`, as in "1.2 times faster than".

    Scores up to 1, and values that are not all positive, are compared by
    their difference.

    Returns:
        Words, or None if the two are about equal.
    """
    low, high = sorted((value, other))
    direction = "lower" if value < other else "higher"
    gap = f"{number(high - low, 2)} {direction} than"
    if (
        high <= 1
        and metric != "samples_per_s"
        and direction_of(metric) == "max"
    ):
        return gap if high - low > _EQUAL_SCORE else None
    if low <= 0:
        return gap if high - low > EQUAL * max(abs(low), abs(high)) else None
    if high < low * (1 + EQUAL):
        return None
    words = (
        "faster"
        if metric in ("time_to_target", "samples_per_s")
        else direction
    )
    digits = 3 if high < 1.2 * low else 2
    return f"{number(high / low, digits)} times {words} than"


def _why_none(trials: Trials) -> str:
    """Return why no trial has a value of the objective."""
    finished = [record for record in trials.records if record.finished]
    metric = trials.objective.metric
    reported = metric_names(finished)
    if not trials.records:
        return "none has run"
    if not finished:
        return _none_finished(trials.records)
    if metric in reported:
        return f"no finished trial has a finite {metric}"
    if metric == "time_to_target":
        return _none_reached(trials, finished)
    names = ", ".join(reported) or "none"
    return f"no finished trial has a {metric} (metrics reported: {names})"


def _none_finished(records: Records) -> str:
    counts = Counter(record.status for record in records).most_common()
    ended = ", ".join(f"{count} {status}" for status, count in counts)
    status, _ = counts[0]
    return f"none finished ({ended}). For {status}: {ADVICE[status]}"


def _none_reached(trials: Trials, finished: Records) -> str:
    goal = trials.objective.goal
    assert goal is not None  # of a time to target
    text = f"no finished trial reached {target(trials.objective)}"
    values = []
    for record in finished:
        for row in (*record.curve, record.metrics):
            value = row.get(goal.metric, math.nan)
            if math.isfinite(value):
                values.append((value, record))
    if not values:
        return f"{text}, and none reported a finite {goal.metric}"
    values.sort(key=itemgetter(0), reverse=goal.mode == "max")
    value, closest = values[0]
    return f"{text}; the closest, {trials.name(closest)}, came to {number(value, 4)}"


def _fastest(
    trials: Trials, best: TrialRecord | None, found: Sequence[Final]
) -> str:
    """Return a sentence on the trial with the highest throughput.

    Returns:
        The sentence, or "" if the best trial is about as fast.
    """
    objective = trials.objective
    ranked = _ranked(Objective(metric="samples_per_s"), trials.records)
    if not ranked or objective.metric == "samples_per_s":
        return ""
    rate, fastest = ranked[0]
    if best is not None:
        is_best = without_seed(fastest).config == best.config
        if is_best or (best.samples_per_s and not _is_faster(fastest, best)):
            return ""
    width = _half_width(fastest)
    spread = f" (+-{width:.1%})" if width else ""
    name = _without_seed(trials, fastest)
    who = f"{name}, {amount('samples_per_s', rate)}{spread}"
    return (
        f"Highest throughput: {who}; it {_needed(objective, fastest, found)}."
    )


def _needed(
    objective: Objective, record: TrialRecord, found: Sequence[Final]
) -> str:
    """Return a trial's objective value as a verb phrase: "needs 5.23 s"."""
    metric = objective.metric
    value = value_of(metric, record)
    if value is None and metric == "time_to_target":
        return f"does not reach {target(objective)}"
    if value is None:
        return f"has no {metric}"
    if metric != "time_to_target":
        return f"has {metric} {amount(metric, value)}"
    for final in found:
        if final.record.id == record.id:
            return f"needs {duration(final.time_s.value)}"
    return f"needs {span(record.missed_target_s, value)}"


def largest_size(trials: Trials, as_good: Collection[str]) -> str:
    """Say whether the largest batch size lost because of its learning rate or its size.

    `as_good` are the IDs of the best trial and of the trials that are as good.

    Returns:
        A sentence, or "" if no rate was searched `around` or the size was not
        tried.
    """
    config = trials.config
    sizes = [
        key for key in BATCH_KEYS if isinstance(config.space.get(key), list)
    ]
    if not sizes or config.around is None or not as_good:
        return ""
    size = max(sample_values(config.space[sizes[0]]))
    tried = [
        record
        for record in trials.records
        if record.purpose == "trial" and record.config.get(sizes[0]) == size
    ]
    if not tried:
        return ""
    scores = scores_of(trials.objective, tried)
    best = min(tried, key=lambda record: scores[record.id])
    rate = trials.telling.get(config.around, config.around)
    value = shown(best.config[config.around])
    own = f"its best {rate}, {value}"
    if not is_inside(config, tried, best.config):
        return f"It is not known whether the largest batch, {size}, lost because of its {rate} or its size: nothing beyond {own}, was tried."
    if best.id not in as_good:
        has = _needed(trials.objective, best, [])
        return f"The largest batch, {size}, lost because of its size, not its {rate}: with {own}, it {has}."
    start = shown(sample_values(config.space[config.around])[0])
    return f"The largest batch, {size}, is as good as the best: its best {rate} is {value}, and the search began with {start}."
