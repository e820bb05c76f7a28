"""Draw the report's figures: objective, throughput, memory and learning curves.

figure.svg is the template of each; its colours are variables of the page's style sheet.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Self

from trainers.config.function import BATCH_KEYS
from trainers.config.model import Tree
from tune.config import TO_TARGET, SweepConfig
from tune.report.page import render
from tune.report.words import (
    Trials,
    amount,
    duration,
    is_number,
    memory_unit,
    printable,
    shown,
    span,
    time_unit,
)
from tune.search.finalists import finals
from tune.trials.record import Interval, Records, TrialRecord, value_of

_SHAPES = (
    "M-1,0a1,1 0 1,0 2,0a1,1 0 1,0 -2,0",  # circle
    "M-.9,-.9H.9V.9H-.9Z",  # square
    "M0,-1.1L1.1,.9H-1.1Z",  # triangle
    "M0,-1.2L1.2,0L0,1.2L-1.2,0Z",  # diamond
    "M0,1.1L1.1,-.9H-1.1Z",  # triangle on its tip
    "M-.4,-1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4Z",  # plus
)
"""Paths of each series' marks, for who does not see their colours."""
_CROSS = "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z"
_COLORS = [f"var(--s{number})" for number in range(1, 7)]
_BAD = "var(--bad)"
_FG = "var(--fg)"

_SHIFT = 7.0  # from the marks of one series to those of the next, at one place
_ROW = 0.09  # of the height of the axes: a row of a series' trials out of memory
_MOST_CHARS = 26  # of a name beside an axis
_MOST_TICKS = 6
_SIZE_KEYS = (*BATCH_KEYS, "microbatch_size")

Points = list[tuple[float, float]]
"""A trial's evaluations: training time, s, and a metric."""


@dataclass(frozen=True)
class Figure:
    """One figure of the report."""

    title: str
    caption: str
    svg: str
    """An `<svg>` element; of small multiples, one for each panel."""
    num_panels: int = 1


@dataclass(frozen=True)
class Scale:
    """An axis: which values it shows, and where."""

    label: str
    low: float
    high: float
    ticks: dict[float, str]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return where on the axis a value is: 0 at its start, 1 at its end."""
        form = math.log2 if self.is_log else float
        low, place, high = map(form, (self.low, value, self.high))
        return (place - low) / (high - low)


def _scale(label: str, low: float, high: float) -> Scale:
    """Return a scale with ticks at round numbers."""
    least = (high - low) / _MOST_TICKS
    power = 10 ** math.floor(math.log10(least))
    steps = [factor * power for factor in (1, 2, 5, 10)]
    step = next(step for step in steps if step >= least)
    ticks = {}
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        ticks[number * step] = f"{number * step:,.6g}"
    return Scale(label, low, high, ticks)


@dataclass(frozen=True)
class Axis:
    """A key of the configuration, and the values of it that were tried."""

    key: str
    label: str
    values: list[Any]
    """Rising where they are numbers, else as they were tried."""

    @classmethod
    def of(cls, key: str, label: str, records: Records) -> Self:
        """Return the axis of a key with the values that some trials have."""
        tried: Tree = {}
        for record in records:
            value = record.config.get(key)
            tried.setdefault(repr(value), value)
        values = list(tried.values())
        if all(map(is_number, values)):
            values.sort()
        return cls(key, label, values)

    @functools.cached_property
    def is_numeric(self) -> bool:
        """Whether all of them are numbers."""
        return all(map(is_number, self.values))

    @property
    def is_log(self) -> bool:
        """Whether ratios of them are more telling than differences."""
        if not self.is_numeric or self.values[0] <= 0:
            return False
        return self.key in _SIZE_KEYS or bool(self.values[-1] >= 8 * self.values[0])

    @functools.cached_property
    def positions(self) -> list[float]:
        """Their places on the axis."""
        places = self.values if self.is_numeric else range(len(self.values))
        return [float(place) for place in places]

    def index(self, record: TrialRecord) -> int:
        """Return which of the values a trial has."""
        # By their text: a NaN does not equal itself, True equals 1, and lists and
        # mappings have no hash.
        return self._places[repr(record.config.get(self.key))]

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {repr(value): at for at, value in enumerate(self.values)}

    def position(self, record: TrialRecord) -> float:
        """Return a trial's place on the axis."""
        return self.positions[self.index(record)]

    def scale(self) -> Scale:
        """Return its scale, with ticks at the values that were tried."""
        places = self.positions
        if self.is_log:
            places = list(map(math.log2, places))
        first = places[0]
        width = places[-1] - first
        margin = 0.06 * width or 0.5
        if width == 0 and not self.is_log:
            margin = abs(first) / 2 or 0.5
        low = first - margin
        high = first + width + margin
        if self.is_log:
            low = 2**low
            high = 2**high
        ticks: dict[float, str] = {}
        next_place = -math.inf
        for at, place in enumerate(places):
            if place >= next_place:
                ticks[self.positions[at]] = _cut(shown(self.values[at]))
                next_place = place + width / 9
        return Scale(self.label, low, high, ticks, self.is_log)

    def name(self, at: int) -> str:
        """Return a value as a legend has it."""
        value = shown(self.values[at])
        return _cut(value if self.key == "precision" else f"{self.label} {value}")


def _cut(text: str) -> str:
    """Return text that fits beside an axis."""
    if len(text) <= _MOST_CHARS:
        return text
    return f"{text[: _MOST_CHARS - 3]}..."


class FigureData(Trials):
    """The trials of a sweep, with a place on the x axis and a series each.

    Of the keys that vary, batch size or the first number is the x axis, and precision
    or the first key of few values the series.
    """

    def __init__(
        self, config: SweepConfig, records: Records, best: TrialRecord | None
    ) -> None:
        super().__init__(config, records)
        self.best = best
        keys = self.labels.items()
        axes = [Axis.of(key, label, records) for key, label in keys]
        several = [axis for axis in axes if len(axis.values) > 1]
        self.varied = [axis for axis in several if axis.key != "seed"]
        """The keys of which more than one value was tried; a seed is a repeat."""
        self.x = _choose_x(axes)
        # More values than colours would be a legend larger than its figure, or nothing
        # to compare.
        rest = [axis for axis in self.varied if axis != self.x]
        few = [axis for axis in rest if len(axis.values) <= len(_COLORS)]
        few.sort(key=lambda axis: axis.key != "precision")
        self.by = few[0] if few else None

    def series(self, record: TrialRecord) -> int:
        """Return which series a trial belongs to."""
        return self.by.index(record) if self.by else 0

    @property
    def each(self) -> str:
        """The series in words."""
        return f", for each {self.by.label}" if self.by else ""

    def is_best(self, record: TrialRecord) -> bool:
        """Whether the trial is the sweep's best."""
        return self.best is not None and record.id == self.best.id


def _choose_x(axes: list[Axis]) -> Axis:
    """Return the key of the x axis: a batch size or the first number, one that varies."""
    numeric = [axis for axis in axes if axis.is_numeric]
    varied = [axis for axis in numeric if len(axis.values) > 1] or numeric
    sizes = [axis for axis in varied if axis.key in _SIZE_KEYS]
    sizes.sort(key=lambda axis: _SIZE_KEYS.index(axis.key))
    return [*sizes, *varied, *axes][0]


@dataclass(frozen=True)
class Mark:
    """A trial's figure, and what is known of how sure it is."""

    record: TrialRecord
    value: float
    text: str
    between: tuple[float, float] | None = None
    """The 95 % interval of its repeats, or the evaluations between which it met the
    target.
    """
    is_repeated: bool = False

    def in_units_of(self, size: float) -> Self:
        """Return it with the value as a multiple of a unit."""
        between = self.between
        if between is not None:
            between = (between[0] / size, between[1] / size)
        return replace(self, value=self.value / size, between=between)


@dataclass(frozen=True)
class Dot:
    """A mark in a figure."""

    x: float
    y: float
    color: str
    shape: str
    size: float
    tip: str
    """What is shown when the mouse is over it."""
    shift: float = 0.0
    """How far it is moved to the right, beside what would cover it."""


@dataclass(frozen=True)
class Line:
    """A line in a figure."""

    points: Points
    color: str
    width: float = 1.0
    opacity: float = 1.0
    dash: str = ""
    shift: float = 0.0
    tip: str = ""


@dataclass
class Plot:
    """One set of axes, and what is drawn in it."""

    data: FigureData
    lines: list[Line] = field(default_factory=list)
    dots: list[Dot] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    """Series that were drawn."""
    has_crosses: bool = False
    is_cut: bool = False
    """Whether what is outside of the axes is not shown."""

    def dot(
        self, record: TrialRecord, x: float, y: float, text: str, **look: Any
    ) -> None:
        """Draw a mark of a trial, as its series."""
        series = self.data.series(record)
        tip = f"{self.data.name(record)}: {text}"
        own: Tree = {"color": _COLORS[series], "shape": _SHAPES[series], "size": 4}
        self.dots.append(Dot(x, y, tip=tip, **own | look))
        self.seen.add(series)

    def line(self, record: TrialRecord, points: Points) -> None:
        """Draw a trial's evaluations, those of the best thick."""
        series = self.data.series(record)
        end_x, end_y = points[-1]
        text = f"ends at {end_y:.4g}"
        look = (3.4, 1.0) if self.data.is_best(record) else (1.4, 0.75)
        tip = f"{self.data.name(record)}: {text}"
        self.lines.append(Line(points, _COLORS[series], *look, tip=tip))
        self.dot(record, end_x, end_y, text)
        if not record.finished:
            cross: Tree = {"color": _BAD, "shape": _CROSS, "size": 5}
            self.dot(record, end_x, end_y, record.status, **cross)

    def draw(self, axis: Axis, marks: Sequence[Mark], is_joined: bool = False) -> None:
        """Draw a mark a trial, the best on top.

        If joined, a grid has a line a series through medians.
        """
        data = self.data
        for mark in sorted(marks, key=lambda mark: data.is_best(mark.record)):
            x = axis.position(mark.record)
            series = data.series(mark.record)
            shift = 0.0
            if data.by and axis != data.by and not is_joined:
                shift = _SHIFT * (series - (len(data.by.values) - 1) / 2)
            if mark.between is not None:
                ends = [(x, end) for end in mark.between]
                width = 3.0 if mark.is_repeated else 1.3
                self.lines.append(Line(ends, _COLORS[series], width, 0.7, "", shift))
            size = 6 if data.is_best(mark.record) else 4
            self.dot(mark.record, x, mark.value, mark.text, size=size, shift=shift)
        if is_joined and data.config.search == "grid":
            self._join(axis, marks)

    def _join(self, axis: Axis, marks: Sequence[Mark]) -> None:
        """Draw a line a series through the medians of its marks."""
        found: dict[int, dict[float, list[float]]] = {}
        for mark in marks:
            own = found.setdefault(self.data.series(mark.record), {})
            own.setdefault(axis.position(mark.record), []).append(mark.value)
        for series, values in found.items():
            points = [(x, median(values[x])) for x in sorted(values)]
            self.lines.append(Line(points, _COLORS[series], 2.0))

    def figure(self, title: str, caption: str, x: Scale, y: Scale) -> Figure:
        """Render what was drawn, with a legend."""
        legend = []
        by = self.data.by
        if by is not None:
            for series in sorted(self.seen):
                legend.append((_COLORS[series], _SHAPES[series], by.name(series)))
        if self.has_crosses:
            legend.append((_FG, _CROSS, "out of memory"))
        svg = render(
            "figure.svg",
            title=title,
            caption=caption,
            x=x,
            y=y,
            lines=self.lines,
            dots=self.dots,
            legend=legend,
            is_cut=self.is_cut,
        )
        return Figure(title, caption, svg)


def figures(
    config: SweepConfig, records: Records, best: TrialRecord | None
) -> list[Figure]:
    """Draw the figures that the records have data for."""
    data = FigureData(config, records, best)
    drawn = [_objective(data), _throughput(data), _memory(data), _curves(data)]
    return [figure for figure in drawn if figure]


def _objective(data: FigureData) -> Figure | None:
    """Draw the objective against each key that varied, a panel a key."""
    metric = data.objective.metric
    marks = _marks(data, metric)
    if metric == "samples_per_s" or not marks:  # the throughput has a figure of its own
        return None
    num_trials = sum(record.purpose != "repeat" for record in data.records)
    num_missed = num_trials - len(marks)
    notes = ["A mark a trial."]
    if data.best:
        notes.append("The largest is the best.")
    if metric in TO_TARGET and num_missed > 0:
        notes.append(f"{num_missed} of {num_trials} did not reach the target.")
    if any(mark.is_repeated for mark in marks):
        notes.append("Thick lines are 95 % intervals of the finalists' repeats.")
    title = printable(metric)
    label = title
    if metric == "time_to_target":
        title = "Time to target"
        size_s, unit = time_unit(max(mark.value for mark in marks))
        label = f"time to target, {unit}"
        marks = [mark.in_units_of(size_s) for mark in marks]
    values = []
    for mark in marks:
        values += [mark.value, *(mark.between or ())]
    y = _around(label, min(values), max(values))
    panels = []
    others = [axis for axis in data.varied if axis != data.x]
    for axis in [data.x, *others]:
        plot = Plot(data)
        plot.draw(axis, marks)
        panel = plot.figure(axis.label, "", axis.scale(), y)
        panels.append(panel.svg)
    return Figure(title, " ".join(notes), "\n".join(panels), len(panels))


def _around(label: str, low: float, high: float) -> Scale:
    """Return a scale with some room on both sides of what it shows."""
    margin = 0.05 * (high - low) or 0.05 * abs(low) or 1.0
    return _scale(label, low - margin, high + margin)


def _marks(data: FigureData, metric: str) -> list[Mark]:
    """Return the trials with a value of the objective."""
    times: dict[str, Interval] = {}
    if metric == "time_to_target":
        for final in finals(data.config, data.records):
            times[final.record.id] = final.time_s
    marks = []
    for record in data.records:
        value = value_of(metric, record)
        if record.purpose == "repeat" or not is_number(value):
            continue
        mark = Mark(record, value, amount(metric, value))
        missed_s = record.missed_target_s
        if record.id in times:
            time_s = times[record.id]
            low = duration(time_s.low)
            high = duration(time_s.high)
            text = f"{duration(time_s.value)}, 95 % interval {low} to {high}"
            ends = (time_s.low, time_s.high)
            mark = Mark(record, time_s.value, text, ends, is_repeated=True)
        elif metric == "time_to_target" and missed_s is not None:
            mark = Mark(record, value, span(missed_s, value), (missed_s, value))
        marks.append(mark)
    return marks


def _measured(data: FigureData, metric: str) -> list[Mark]:
    """Return the trials that ended well, with what was measured of them."""
    marks = []
    for record in data.records:
        value = value_of(metric, record)
        if value and is_number(value):
            marks.append(Mark(record, value, amount(metric, value)))
    return marks


def _throughput(data: FigureData) -> Figure | None:
    """Draw samples/s against the batch size."""
    marks = _measured(data, "samples_per_s")
    if not marks:
        return None
    plot = Plot(data)
    plot.draw(data.x, marks, is_joined=True)
    caption = f"After warm-up, evaluation left out{data.each}."
    if data.best:
        caption += " The largest mark is the best trial."
    most = max(mark.value for mark in marks)
    y = _scale("samples/s", 0.0, 1.05 * most)
    return plot.figure("Throughput", caption, data.x.scale(), y)


def _memory(data: FigureData) -> Figure | None:
    """Draw peak memory against the batch size; a strip on top has trials out of memory."""
    marks = _measured(data, "peak_memory_bytes")
    lost = [record for record in data.records if record.status == "out_of_memory"]
    if not marks and not lost:
        return None
    most = max((mark.value for mark in marks), default=0.0)
    size, unit = memory_unit(most)
    marks = [mark.in_units_of(size) for mark in marks]
    caption = f"Largest over the workers{data.each}."
    most = 1.08 * most / size
    if lost:
        caption += " Trials that ran out of memory are on top."
        num_rows = len(data.by.values) if data.by else 1
        most /= 0.96 - _ROW * num_rows
    most = most or 1.0
    plot = Plot(data, has_crosses=bool(lost))
    plot.draw(data.x, marks, is_joined=True)
    for record in lost:
        x = data.x.position(record)
        y = most * (0.96 - _ROW * data.series(record))
        plot.dot(record, x, y, "out of memory", shape=_CROSS, size=5)
    scale = _scale(f"peak memory, {unit}", 0.0, most)
    if not marks:
        scale = Scale("", 0.0, most, {})
    return plot.figure("Peak memory", caption, data.x.scale(), scale)


def _curves(data: FigureData) -> Figure | None:
    """Draw the evaluated metric against training time, a line a trial."""
    metric = _drawn_metric(data)
    lines = []
    for record in data.records:
        points = _points(record, metric)
        if points:
            lines.append((record, points))
    if not lines:
        return None
    lines.sort(key=lambda line: data.is_best(line[0]))
    longest_s, _ = max(max(points) for _, points in lines)
    size_s, unit = time_unit(longest_s)
    longest = 1.05 * longest_s / size_s or 1.0
    target = data.objective.goal
    goal = None
    if target and target.metric == metric and is_number(target.value):
        goal = target.value
    values = [[y for _, y in points] for _, points in lines]
    low, high = _closer(values, goal)
    name = printable(metric)
    notes = [f"{name} at each evaluation, a line a trial."]
    plot = Plot(data, is_cut=True)
    for record, points in lines:
        plot.line(record, [(x / size_s, y) for x, y in points])
    if data.best:
        notes.append("The thick line is the best.")
    if goal is not None:
        ends = [(0.0, goal), (longest, goal)]
        plot.lines.append(Line(ends, _FG, 1.0, dash="5 4"))
        notes.append("The dashed line is the target.")
    if not all(low <= min(own) and max(own) <= high for own in values):
        notes.append("The worst evaluations are off the axis.")
    if not all(record.finished for record, _ in lines):
        notes.append("A cross is where a trial failed.")
    x = _scale(f"training time, {unit}", 0.0, longest)
    y = _scale(name, low, high)
    return plot.figure("Learning curves", " ".join(notes), x, y)


def _drawn_metric(data: FigureData) -> str:
    """Return the evaluated metric to draw: the objective's, else the first of them."""
    seen: dict[str, None] = {}
    for record in data.records:
        for row in record.curve:
            seen.update(dict.fromkeys(row))
    evaluated = [name for name in seen if name.startswith("val_")]
    wanted = [*reversed(data.objective.watched), *evaluated]
    return next((name for name in wanted if name in seen), "")


def _points(record: TrialRecord, metric: str) -> Points:
    points = []
    for row in record.curve:
        x = row.get("train_time_s")
        y = row.get(metric)
        if is_number(x) and is_number(y):
            points.append((x, y))
    return points


def _closer(lines: list[list[float]], goal: float | None) -> tuple[float, float]:
    """Return limits of a metric's axis without the worst fifth, where runs are alike."""
    values = sorted(itertools.chain.from_iterable(lines))
    fifth = len(values) // 5
    if sum(own[-1] - own[0] for own in lines) > 0:
        kept = values[fifth:]
        best = kept[-1]
    else:
        kept = values[: len(values) - fifth]
        best = kept[0]
    if goal is not None:  # and a way to go up to it: where it is crossed is what counts
        kept += [goal, goal - 0.35 * (best - goal)]
    low = min(kept)
    high = max(kept)
    margin = 0.05 * (high - low) or 0.05 * abs(kept[0]) or 1.0
    return low - margin, high + margin
