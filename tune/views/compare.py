"""Sweeps side by side: what differs between them, and what changed in the answer and in configurations that they share.

The first is what the others are compared with. Nothing is claimed without an interval that excludes no difference.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from string import ascii_uppercase
from typing import Any

from trainers.errors import MISSING, ConfigError
from trainers.redaction import redact
from tune.config import SweepConfig
from tune.objective import TO_TARGET, Objective
from tune.report.answer import Answer, answer, objective_value
from tune.report.words import amount, duration, in_short, number, printable, shown, span, target
from tune.report.write import read_environment
from tune.sweeps.spec import SweepSpec, read_kept
from tune.trials.journal import Journal
from tune.trials.record import TrialRecord
from tune.views.ratios import Ratio, rates_ratio, times_ratio

_OWN = ("name", "storage_path", "task_dir")
"""Keys of a run in which sweeps differ by their nature."""
_MOST_NOT_SHARED = 3


@dataclass(frozen=True)
class Side:
    """One sweep."""

    name: str
    """A letter."""
    spec: SweepSpec
    records: list[TrialRecord]
    environment: dict[str, str]
    answer: Answer

    @property
    def config(self) -> SweepConfig:
        """Its configuration."""
        return self.spec.config

    def value(self, key: str, trial: Mapping[str, Any]) -> Any:
        """Return what a trial has of a dotted key: from the space, or from the run that is varied."""
        if key in trial:
            return trial[key]
        tree: Any = self.spec.train
        for part in key.split("."):
            tree = tree.get(part, MISSING) if isinstance(tree, Mapping) else MISSING
        return tree


Place = tuple[tuple[str, str], ...]
"""A configuration: the texts of its swept keys."""

Row = tuple[str, list[str]]
"""What it is of, and the cells of the sides."""


@dataclass(frozen=True)
class Shared:
    """A configuration that several sides have."""

    words: str
    figures: list[tuple[str, str]]
    """Of each side, the objective and samples/s."""
    against: list[tuple[str, str]]
    """What may be said of each side but the first against the first, of the same two."""


@dataclass(frozen=True)
class Comparison:
    """All that is shown."""

    sides: list[Side]
    changes: list[str]
    """What changed in the answer, or why that cannot be said, a sentence a side but the first."""
    answers: list[Row]
    differences: list[Row]
    """What the sweeps differ in besides."""
    shared: list[Shared]
    rest: str
    """How many configurations not all of them have."""


def read_side(location: str, name: str) -> Side:
    """Read a sweep's directory; ConfigError where there is none."""
    spec = read_kept(location)
    records = Journal(spec.storage).records()
    found = answer(spec.config, records)
    return Side(name, spec, records, read_environment(spec.storage), found)


def compare(locations: Sequence[str]) -> Comparison:
    """Read sweeps and compare all but the first with the first; ConfigError for what is none, or too few."""
    rule, fix = "names one sweep", "name the directories of two or more"
    if len(locations) < 2:
        raise ConfigError("DIRECTORY", locations[0], rule, fix)
    if len(locations) > len(ascii_uppercase):
        raise ConfigError("DIRECTORY", len(locations), f"may be {len(ascii_uppercase)} sweeps at most", "name fewer")
    return comparison([read_side(one, name) for one, name in zip(locations, ascii_uppercase, strict=False)])


def comparison(sides: list[Side]) -> Comparison:
    """Compare sides that have been read."""
    keys = list(dict.fromkeys(key for side in sides for key in side.config.space))
    groups = [_groups(side, keys) for side in sides]
    telling = [key for key in keys if len({dict(place)[key] for group in groups for place in group}) > 1] or keys
    words = {key: key.rpartition(".")[2] for key in telling}

    def name(place: Place) -> str:
        side, runs = next((side, group[place]) for side, group in zip(sides, groups, strict=True) if place in group)
        given = {key: side.value(key, runs[0].config) for key in telling}
        return in_short(words, TrialRecord("x", given, "done", 0, 0))

    first, *others = sides
    shared = []
    for place in dict.fromkeys(place for group in groups for place in group):
        if sum(place in group for group in groups) < 2:
            continue
        runs = [group.get(place, []) for group in groups]
        figures = [_figures(side, own) for side, own in zip(sides, runs, strict=True)]
        against = [_against(first, side, runs[0], own) for side, own in zip(others, runs[1:], strict=True)]
        shared.append(Shared(name(place), figures, against))
    changes = [_change(first, side, keys, name) for side in others]
    return Comparison(sides, changes, _answers(sides), list(_differences(sides)), shared, _rest(sides, groups))


def _groups(side: Side, keys: Sequence[str]) -> dict[Place, list[TrialRecord]]:
    """Return the runs of each configuration, by the texts of its swept keys: its repeats where there are two, which ran
    alone, or else what the search ran.
    """
    found: dict[Place, list[TrialRecord]] = {}
    for record in side.records:
        if record.finished:
            found.setdefault(_place(side, record, keys), []).append(record)
    return {place: _to_compare(runs) for place, runs in found.items()}


def _place(side: Side, record: TrialRecord, keys: Sequence[str]) -> Place:
    return tuple((key, repr(side.value(key, record.config))) for key in keys)


def _to_compare(runs: list[TrialRecord]) -> list[TrialRecord]:
    repeats = [run for run in runs if run.purpose == "repeat"]
    whole = [run for run in runs if run.purpose == "trial"]
    return repeats if len(repeats) > 1 else (whole or runs)[:1]


def task_differs(first: Side, other: Side) -> str | None:
    """Return why nothing of two sweeps can be compared."""
    tasks = [side.spec.train.get("task") or side.spec.train.get("train_func") for side in (first, other)]
    if tasks[0] == tasks[1]:
        return None
    trained = f"{first.name} trains {tasks[0]}, {other.name} {tasks[1]}"
    return printable(f"{first.name} and {other.name} cannot be compared, in nothing: {trained}.")


def objective_differs(first: Side, other: Side) -> str | None:
    """Return why two sweeps' answers cannot be compared, though their throughput can."""
    one, two = first.config.objective, other.config.objective
    what = None
    if (one.metric, one.direction) != (two.metric, two.direction):
        what = f"the objective of {first.name} is {one.metric}, that of {other.name} {two.metric}"
        if one.metric == two.metric:
            what = f"{one.metric} is to be {one.direction} in {first.name} and {two.direction} in {other.name}"
    elif one.metric in TO_TARGET and one.target != two.target:
        what = f"the target of {first.name} is {target(one)}, that of {other.name} {target(two)}"
    if what is None:
        return None
    return printable(f"The answers of {first.name} and {other.name} cannot be compared, only samples/s: {what}.")


def objective_ratio(objective: Objective, first: Sequence[TrialRecord], second: Sequence[TrialRecord]) -> Ratio | None:
    """Return how many times as good the second's runs are by the objective; None where nothing is known of noise."""
    if objective.metric == "samples_per_s":
        return rates_ratio(first, second)
    ratio = times_ratio(first, second) if objective.metric in TO_TARGET else None
    if ratio is None or objective.metric == "time_to_target":
        return ratio
    prices = [_price(runs) for runs in (first, second)]
    return ratio.times(prices[0] / prices[1]) if prices[0] and prices[1] else None


def _price(runs: Sequence[TrialRecord]) -> float:
    """Return dollars a second of the lane that ran them; 0 where not known."""
    rates = [run.metrics.get("usd_to_target", 0.0) / run.time_to_target_s for run in runs if run.time_to_target_s]
    return next((rate for rate in rates if rate), 0.0)


def _verdict(objective: Objective, ratio: Ratio | None, runs: Sequence[Sequence[TrialRecord]]) -> str:
    """Return what may be said of the objective of two groups of runs."""
    if ratio is not None:
        return ratio.words(*(("cheaper", "dearer") if objective.metric == "usd_to_target" else ()))
    values = [[objective_value(objective, run) for run in own] for own in runs]
    if not all(any(value is not None for value in own) for own in values):
        return "-"
    return "no claim: one run each"


def _against(first: Side, other: Side, ours: list[TrialRecord], theirs: list[TrialRecord]) -> tuple[str, str]:
    if not ours or not theirs or task_differs(first, other):
        return "-", "-"
    objective, rates = first.config.objective, rates_ratio(ours, theirs)
    of_objective = "-"
    if objective_differs(first, other) is None and objective.metric != "samples_per_s":
        of_objective = _verdict(objective, objective_ratio(objective, ours, theirs), [ours, theirs])
    return of_objective, rates.words() if rates is not None else "-"


def _figures(side: Side, runs: list[TrialRecord]) -> tuple[str, str]:
    """Return the objective and samples/s of runs of one configuration."""
    metric = side.config.objective.metric
    values = [value for run in runs if (value := objective_value(side.config.objective, run)) is not None]
    rates = [run.samples_per_s for run in runs if run.samples_per_s]
    many = f" ({len(values)} repeats)" if len(values) > 1 else ""
    shown_value = "-"
    if len(values) == 1 and metric == "time_to_target":
        shown_value = span(runs[0].missed_target_s, values[0])
    elif values:
        ends = dict.fromkeys(amount(metric, end) for end in (min(values), max(values)))
        shown_value = " to ".join(ends) + many
    return shown_value, number(sum(rates) / len(rates), 4) if rates else "-"


def _change(first: Side, other: Side, keys: Sequence[str], name: Callable[[Place], str]) -> str:
    """Return what changed in the answer from the first side to another."""
    if why := task_differs(first, other) or objective_differs(first, other):
        return why
    before, after = first.answer.best, other.answer.best
    pair = f"{first.name} to {other.name}"
    if before is None or after is None:
        return f"From {pair}: {first.name if before is None else other.name} has no best trial to compare."
    ours, theirs = _groups(first, keys), _groups(other, keys)
    places = [_place(side, best, keys) for side, best in ((first, before), (other, after))]
    objective, words = first.config.objective, [name(place) for place in places]
    if places[0] == places[1]:
        runs = ours.get(places[0], []), theirs.get(places[0], [])
        verdict = _verdict(objective, objective_ratio(objective, *runs), runs)
        return f"From {pair} the best stays {words[0]}; {other.name} is {verdict}."
    head = f"From {pair} the best is another: {words[1]}, where it was {words[0]}"
    told, is_sure = [], True
    for side, group, own, foreign in ((first, ours, places[0], places[1]), (other, theirs, places[1], places[0])):
        if foreign not in group or own not in group:
            told.append(f"{side.name} has not tried {words[places.index(foreign)]}")
            is_sure = False
            continue
        ratio = objective_ratio(objective, group[foreign], group[own])
        if ratio is not None and ratio.is_claim and ratio.value > 1:
            told.append(f"in {side.name} its own best is {ratio.words('better')}")
        else:
            noise = ratio.words() if ratio is not None else "no claim: one run each"
            told.append(f"{side.name} does not tell the two apart ({noise})")
            is_sure = False
    end = "" if is_sure else ", so this may be noise"
    return f"{head}; {' and '.join(told)}{end}."


def _answers(sides: list[Side]) -> list[Row]:
    """Return the answers side by side."""
    rows: list[Row] = [("sweep", [f"{side.config.name}, {side.spec.uri}" for side in sides])]
    cells: dict[str, list[str]] = {}
    for at, side in enumerate(sides):
        best, objective = side.answer.best, side.config.objective
        labels = {key: key.rpartition(".")[2] for key in side.config.space}
        final = next((one for one in side.answer.finals if best is not None and one.record.id == best.id), None)
        value = objective_value(objective, best) if best is not None else None
        shown_value = amount(objective.metric, value) if value is not None else "-"
        if best is not None and value is not None and objective.metric == "time_to_target":
            shown_value = span(best.missed_target_s, value)
        if final is not None:
            low, high = duration(final.time_s.low), duration(final.time_s.high)
            shown_value = f"{duration(final.time_s.value)} alone, 95 % {low} to {high}, {final.repeats} repeats"
        fastest = max((one for one in side.records if one.finished and one.samples_per_s), key=_rate_of, default=None)
        usd = best.metrics.get("usd_to_target") if best is not None else None
        spent = max((one.end_time for one in side.records), default=0.0)
        column = {
            "best trial": in_short(labels, best) if best is not None else "none",
            printable(_named(objective)): shown_value,
            "its samples/s": number(best.samples_per_s, 4) if best is not None and best.samples_per_s else "-",
            "its dollars to the target": f"{number(usd, 3)} USD" if usd is not None else "-",
            "highest samples/s": f"{number(_rate_of(fastest), 4)}, {in_short(labels, fastest)}" if fastest else "-",
            "trials": f"{sum(one.finished for one in side.records)} of {len(side.records)} ended well",
            "took": duration(spent - min((one.start_time for one in side.records), default=spent)),
        }
        for what in dict.fromkeys([*cells, *column]):
            known = cells.setdefault(what, ["-"] * at)
            known.append(column.get(what, "-"))
    return rows + [row for row in cells.items() if set(row[1]) != {"-"}]


def _rate_of(record: TrialRecord) -> float:
    return record.samples_per_s or 0.0


def _named(objective: Objective) -> str:
    return f"{objective.metric} {target(objective)}".replace("_", " ", 2) if objective.target else objective.metric


def _differences(sides: list[Side]) -> Iterator[Row]:
    """Give what the sweeps differ in: keys of the run and of the sweep, versions and hardware."""
    trees = [dict(_flat(side.spec.train)) for side in sides]
    keys = dict.fromkeys(key for tree in trees for key in tree if key.partition(".")[0] not in _OWN)
    for key in dict.fromkeys([*keys, *(key for side in sides for key in side.config.space)]):
        cells = [_of_key(side, tree, key) for side, tree in zip(sides, trees, strict=True)]
        if len(set(cells)) > 1:
            yield printable(key), cells
    for key in ("objective", "search", "scheduler", "isolation", "lanes", "usd_per_hour", "seed", "budget"):
        values = [side.config.model_dump(mode="json", exclude_none=True).get(key) for side in sides]
        cells = [redact(shown(value)) for value in values]
        if len(set(cells)) > 1:
            yield f"sweep: {key}", cells
    for key in dict.fromkeys(name for side in sides for name in side.environment):
        none = "not known: it has no summary.json"
        cells = [redact(side.environment.get(key, "-") if side.environment else none) for side in sides]
        if len(set(cells)) > 1:
            yield printable(key), cells


def _of_key(side: Side, tree: Mapping[str, Any], key: str) -> str:
    """Return a key of a side's run, or what its space says of it."""
    if key in side.config.space:
        values = side.config.space[key]
        listed = values if isinstance(values, list) else [values.model_dump(exclude_none=True)]
        return redact(f"swept: {', '.join(map(shown, listed))}")
    return redact(shown(tree[key])) if key in tree else "-"


def _flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _rest(sides: list[Side], groups: Sequence[Mapping[Place, Any]]) -> str:
    """Return how many configurations only one side has."""
    places = {place for group in groups for place in group}
    alone = [
        (side.name, count)
        for side, group in zip(sides, groups, strict=True)
        if (count := sum(place in group and sum(place in one for one in groups) == 1 for place in places))
    ]
    parts = [f"{count} of {name}" for name, count in islice(alone, _MOST_NOT_SHARED)]
    more = f" and others of {len(alone) - _MOST_NOT_SHARED} more" if len(alone) > _MOST_NOT_SHARED else ""
    return f"Not compared, as no other sweep has them: {', '.join(parts)}{more}." if parts else ""
