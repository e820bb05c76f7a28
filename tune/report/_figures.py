"""Draw the report's figures: objective, throughput, memory and learning curves."""

import html
import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from trainers.config.function import BATCH_KEYS
from trainers.config.model import Tree
from tune.config import TO_TARGET, SweepConfig
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

_VARIABLES = (
    "fg",
    "muted",
    "bad",
    "grid",
    "card",
    "s1",
    "s2",
    "s3",
    "s4",
    "s5",
    "s6",
)
_COLORS = {
    f"#0a0b{at:02}": f"var(--{name})" for at, name in enumerate(_VARIABLES)
}
"""The page's CSS variables, by the placeholder colours that stand for them in
drawings.

`Canvas.figure` replaces the placeholders; figures.mplstyle uses some of them,
too.
"""
_FG, _, _BAD, _, _, *_SERIES = _COLORS
_MARKERS = "os^DvP"
"""The shape of each series' marks, for readers who cannot see their colours."""
_STYLE = ["default", str(Path(__file__).with_name("figures.mplstyle"))]

_SIZE_IN = (4.2, 2.7)
_LEGEND_CHARS = 52  # as many as fit in one row
_ROW = 0.09  # height of a row of out-of-memory marks, as a share of the axes' height
_MOST_TICKS = 9
_TICK_CHARS = 6  # longest name below the axes that is not rotated
_MOST_CHARS = 26  # longest name beside an axis
_SIZE_KEYS = (*BATCH_KEYS, "microbatch_size")

Points = list[tuple[float, float]]
"""A trial's evaluations: pairs of training time, s, and a metric's value."""


@dataclass(frozen=True)
class Figure:
    """One figure of the report."""

    title: str
    caption: str
    svg: str
    """An `<svg>` element, or one per panel; their ids are unique in the page."""
    num_panels: int = 1


@dataclass(frozen=True)
class Axis:
    """A key of the configuration, and the values that were tried for it."""

    key: str
    label: str
    values: list[Any]
    """In rising order if they are all numbers, else in the order of the records."""

    @classmethod
    def of(cls, key: str, label: str, records: Records) -> Self:
        """Return the axis of a key, with its values in these records."""
        tried: Tree = {}
        for record in records:
            value = record.config.get(key)
            tried.setdefault(repr(value), value)
        values = list(tried.values())
        if all(map(is_number, values)):
            values.sort()
        return cls(key, label, values)

    @property
    def is_numeric(self) -> bool:
        """Whether all values are numbers."""
        return all(map(is_number, self.values))

    @property
    def is_log(self) -> bool:
        """Whether the axis is logarithmic, as for sizes and wide ranges of values."""
        if not self.is_numeric or self.values[0] <= 0:
            return False
        return self.key in _SIZE_KEYS or bool(
            self.values[-1] >= 8 * self.values[0]
        )

    @property
    def positions(self) -> list[float]:
        """The positions of the values on the axis."""
        places = self.values if self.is_numeric else range(len(self.values))
        return [float(place) for place in places]

    def index(self, record: TrialRecord) -> int:
        """Return the index of a trial's value."""
        # Compared as text: a NaN does not equal itself, True equals 1, and
        # lists and mappings have no hash.
        texts = list(map(repr, self.values))
        return texts.index(repr(record.config.get(self.key)))

    def position(self, record: TrialRecord) -> float:
        """Return a trial's position on the axis."""
        return self.positions[self.index(record)]

    def name(self, at: int) -> str:
        """Return the name of a value in a legend."""
        value = shown(self.values[at])
        return _cut(
            value if self.key == "precision" else f"{self.label} {value}"
        )


def _cut(text: str) -> str:
    """Shorten a text to what fits beside an axis."""
    if len(text) <= _MOST_CHARS:
        return text
    return f"{text[: _MOST_CHARS - 3]}..."


class FigureData(Trials):
    """The trials of a sweep; each has a position on the x axis and belongs to a series.

    Among the keys that vary, the x axis is the batch size or else the first
    numeric key. The series are by precision or else by the first key with few
    values.
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
        """The keys with more than one tried value, except `seed`: seeds are repeats."""
        self.x = _choose_x(axes)
        # With more values than colours, the legend would be larger than the
        # figure.
        rest = [axis for axis in self.varied if axis != self.x]
        few = [axis for axis in rest if len(axis.values) <= len(_SERIES)]
        few.sort(key=lambda axis: axis.key != "precision")
        self.by = few[0] if few else None

    def series(self, record: TrialRecord) -> int:
        """Return which series a trial belongs to."""
        return self.by.index(record) if self.by else 0

    @property
    def each(self) -> str:
        """The end of a caption that names the series; empty if there is one series."""
        return f", for each {self.by.label}" if self.by else ""

    def is_best(self, record: TrialRecord) -> bool:
        """Return whether the trial is the sweep's best."""
        return self.best is not None and record.id == self.best.id


def _choose_x(axes: list[Axis]) -> Axis:
    """Return the x axis: a batch size or else the first numeric key, if one varies."""
    numeric = [axis for axis in axes if axis.is_numeric]
    varied = [axis for axis in numeric if len(axis.values) > 1] or numeric
    sizes = [axis for axis in varied if axis.key in _SIZE_KEYS]
    sizes.sort(key=lambda axis: _SIZE_KEYS.index(axis.key))
    return [*sizes, *varied, *axes][0]


@dataclass(frozen=True)
class Mark:
    """A trial's value in a figure, and how certain it is."""

    record: TrialRecord
    value: float
    text: str
    between: tuple[float, float] | None = None
    """The 95 % interval from the trial's repeats, or the times of the two
    evaluations between which the trial met the target.
    """
    is_repeated: bool = False


class Canvas:
    """One set of matplotlib axes, and the hover texts of its marks.

    It is rendered as inline SVG, with CSS variables as colours.
    """

    def __init__(self, data: FigureData, name: str) -> None:
        from matplotlib.figure import Figure as Sheet

        self._data = data
        self._name = name
        self._sheet = Sheet(figsize=_SIZE_IN, layout="constrained")
        self.axes = self._sheet.add_subplot()
        self.axes.grid(visible=False, axis="x")
        self._tips: dict[str, str] = {}
        self._seen: set[int] = set()
        """The indices of the series that are drawn."""

    def _look(self, record: TrialRecord, text: str) -> Tree:
        """Return a trial's style: its series' look, and a hover text."""
        series = self._data.series(record)
        self._seen.add(series)
        gid = f"tip-{len(self._tips)}"
        self._tips[gid] = f"{self._data.name(record)}: {text}"
        return {
            "color": _SERIES[series],
            "marker": _MARKERS[series],
            "gid": gid,
        }

    def mark(
        self, record: TrialRecord, x: float, y: float, text: str, **look: Any
    ) -> None:
        """Draw one point of a trial, with a hover text."""
        self.axes.plot([x], [y], **self._look(record, text) | look)

    def line(self, record: TrialRecord, points: Points, size_s: float) -> None:
        """Draw a trial's evaluations; the best trial's line is thick and on top."""
        times = [time_s / size_s for time_s, _ in points]
        values = [value for _, value in points]
        look = self._look(record, f"ends at {values[-1]:.4g}")
        look |= {
            "linewidth": 1.1,
            "alpha": 0.75,
            "zorder": 2,
            "markevery": [-1],
        }
        if self._data.is_best(record):
            look |= {"linewidth": 2.8, "alpha": 1, "zorder": 3}
        self.axes.plot(times, values, **look)
        if not record.finished:
            cross: Tree = {
                "color": _BAD,
                "marker": "X",
                "markersize": 7,
                "zorder": 4,
            }
            self.mark(record, times[-1], values[-1], record.status, **cross)

    def draw(
        self,
        axis: Axis,
        marks: list[Mark],
        size: float = 1.0,
        is_joined: bool = False,
    ) -> None:
        """Draw one mark per trial, the best on top; values are divided by `size`.

        If `is_joined` and the search is a grid, a line per series joins the
        medians.
        """
        data = self._data
        for mark in sorted(marks, key=lambda mark: data.is_best(mark.record)):
            x = axis.position(mark.record)
            series = data.series(mark.record)
            if mark.between is not None:
                ends = [end / size for end in mark.between]
                width = 2.4 if mark.is_repeated else 1
                color = _SERIES[series]
                self.axes.plot(
                    [x, x], ends, color=color, linewidth=width, alpha=0.7
                )
            look: Tree = {"linestyle": "none", "clip_on": False, "zorder": 3}
            look["markersize"] = 8.5 if data.is_best(mark.record) else 5
            self.mark(mark.record, x, mark.value / size, mark.text, **look)
        if is_joined and data.config.search == "grid":
            self._join(axis, marks, size)
        self._set_axis(axis)
        self.axes.yaxis.set_major_formatter("{x:,.6g}")

    def _join(self, axis: Axis, marks: list[Mark], size: float) -> None:
        """Draw one line per series through the medians of its marks."""
        found: dict[int, dict[float, list[float]]] = {}
        for mark in marks:
            own = found.setdefault(self._data.series(mark.record), {})
            x = axis.position(mark.record)
            own.setdefault(x, []).append(mark.value / size)
        for series, values in found.items():
            xs = sorted(values)
            medians = [median(values[x]) for x in xs]
            self.axes.plot(xs, medians, color=_SERIES[series], linewidth=1.6)

    def _set_axis(self, axis: Axis) -> None:
        """Set the scale of the x axis, and its ticks at the values if they are few."""
        if axis.is_log:
            self.axes.set_xscale(
                "log", base=2 if axis.key in _SIZE_KEYS else 10
            )
            self.axes.minorticks_off()
        if axis.is_numeric and len(axis.values) > _MOST_TICKS:
            self.axes.xaxis.set_major_formatter("{x:.5g}")
        else:
            step = math.ceil(len(axis.values) / _MOST_TICKS)
            names = [_cut(shown(value)) for value in axis.values[::step]]
            look: Tree = {}
            if max(map(len, names)) > _TICK_CHARS:
                look = {"rotation": 25, "ha": "right"}
            self.axes.set_xticks(axis.positions[::step], names, **look)
        self.axes.set_xlabel(axis.label)

    def _write_legend(self) -> None:
        """Write a legend of the drawn series and other labels above the axes."""
        by = self._data.by
        for at in sorted(self._seen):
            look: Tree = {"color": _SERIES[at], "marker": _MARKERS[at]}
            self.axes.plot([], [], label=by.name(at) if by else "", **look)
        handles, names = self.axes.get_legend_handles_labels()
        if names:
            columns = max(1, _LEGEND_CHARS // (max(map(len, names)) + 6))
            self._sheet.legend(
                handles, names, loc="outside upper left", ncols=columns
            )

    def figure(self, title: str, caption: str) -> Figure:
        """Render the drawing with its legend as a figure."""
        self._write_legend()
        stream = io.StringIO()
        self._sheet.savefig(stream, format="svg", metadata={"Date": None})
        left_out = r"(?s)<metadata>.*?</metadata>|<style .*?</style>"
        svg = re.sub(left_out, "", stream.getvalue())
        svg = svg[svg.index("<svg") :]
        head = svg[: svg.index(">")]
        box = re.search(r'viewBox="[^"]*"', head)
        assert box is not None
        body = re.sub(r"<[^>]*>", self._inlined, svg.removeprefix(head))
        label = html.escape(f"{title}. {caption}")
        svg = f'<svg role="img" aria-label="{label}" {box[0]}{body}'
        return Figure(title, caption, svg.strip())

    def _inlined(self, found: re.Match[str]) -> str:
        """Return a tag with the canvas's name in its ids, and CSS variables as colours.

        Only tags are passed here, so that texts stay as they are.
        """
        tag = found[0].replace("xlink:href=", "href=")
        if "#0a0" in tag:
            for color, css in _COLORS.items():
                tag = tag.replace(color, css)
        tip = re.match(r'<g id="(tip-\d+)">', tag)
        tag = re.sub(
            r'(?<=\sid=")|(?<=href="#)|(?<=url\(#)', f"{self._name}-", tag
        )
        if tip is None:
            return tag
        text = html.escape(self._tips[tip[1]])
        return f"{tag}<title>{text}</title>"


def figures(
    config: SweepConfig, records: Records, best: TrialRecord | None
) -> list[Figure]:
    """Draw the figures that the records have data for."""
    data = FigureData(config, records, best)
    with _styled():
        drawn = [
            _objective(data),
            _throughput(data),
            _memory(data),
            _curves(data),
        ]
    return [figure for figure in drawn if figure]


@contextmanager
def _styled() -> Iterator[None]:
    """Apply the report's matplotlib style in this block."""
    from matplotlib import style

    with style.context(_STYLE), warnings.catch_warnings():
        # Text stays text, shown in the reader's fonts, so glyphs that
        # matplotlib's font lacks do not matter.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _objective(data: FigureData) -> Figure | None:
    """Draw the objective against each key that varied, with one panel per key."""
    metric = data.objective.metric
    marks = _marks(data, metric)
    # The throughput has its own figure.
    if metric == "samples_per_s" or not marks:
        return None
    num_trials = sum(record.purpose != "repeat" for record in data.records)
    num_missed = num_trials - len(marks)
    notes = ["One mark per trial."]
    if data.best:
        notes.append("The largest mark is the best trial.")
    if metric in TO_TARGET and num_missed > 0:
        notes.append(f"{num_missed} of {num_trials} did not reach the target.")
    if any(mark.is_repeated for mark in marks):
        notes.append(
            "Thick lines are 95 % intervals of the finalists' repeats."
        )
    title = printable(metric)
    label = title
    size = 1.0
    if metric == "time_to_target":
        title = "Time to target"
        size, unit = time_unit(max(mark.value for mark in marks))
        label = f"time to target, {unit}"
    panels = []
    others = [axis for axis in data.varied if axis != data.x]
    for number, axis in enumerate([data.x, *others]):
        canvas = Canvas(data, f"objective{number}")
        canvas.draw(axis, marks, size)
        canvas.axes.set_ylabel(label)
        panel = canvas.figure(axis.label, "")
        panels.append(panel.svg)
    return Figure(title, " ".join(notes), "\n".join(panels), len(panels))


def _marks(data: FigureData, metric: str) -> list[Mark]:
    """Return marks for the trials with a value of a metric."""
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
            mark = Mark(
                record, value, span(missed_s, value), (missed_s, value)
            )
        marks.append(mark)
    return marks


def _throughput(data: FigureData) -> Figure | None:
    """Draw samples/s against the batch size."""
    marks = _marks(data, "samples_per_s")
    if not marks:
        return None
    canvas = Canvas(data, "throughput")
    canvas.draw(data.x, marks, is_joined=True)
    canvas.axes.set(ylim=(0, None), ylabel="samples/s")
    caption = f"Samples/s after warm-up, without evaluation{data.each}."
    if data.best:
        caption += " The largest mark is the best trial."
    return canvas.figure("Throughput", caption)


def _memory(data: FigureData) -> Figure | None:
    """Draw peak memory against the batch size, with failed trials in a strip on top."""
    marks = _marks(data, "peak_memory_bytes")
    lost = [
        record for record in data.records if record.status == "out_of_memory"
    ]
    if not marks and not lost:
        return None
    most = max((mark.value for mark in marks), default=0.0)
    size, unit = memory_unit(most)
    canvas = Canvas(data, "memory")
    canvas.draw(data.x, marks, size, is_joined=True)
    axes = canvas.axes
    caption = f"The largest of the workers' peaks{data.each}."
    cross: Tree = {"marker": "X", "markersize": 8}
    above = axes.get_xaxis_transform()
    for record in lost:
        x = data.x.position(record)
        y = 0.96 - _ROW * data.series(record)
        canvas.mark(record, x, y, "out of memory", transform=above, **cross)
    if lost:
        axes.plot(
            [], [], _FG, linestyle="none", label="out of memory", **cross
        )
        caption += " Trials that ran out of memory are on top."
        num_rows = len(data.by.values) if data.by else 1
        most /= 0.96 - _ROW * num_rows
    axes.set(ylim=(0, most / size * 1.08 or 1), ylabel=f"peak memory, {unit}")
    axes.yaxis.set_visible(bool(marks))
    return canvas.figure("Peak memory", caption)


def _curves(data: FigureData) -> Figure | None:
    """Draw the evaluated metric against training time, with one line per trial."""
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
    size, unit = time_unit(longest_s)
    target = data.objective.goal
    mode = data.objective.mode_of(metric)
    goal = None
    if target and target.metric == metric and is_number(target.value):
        mode = target.mode
        goal = target.value
    is_max = mode == "max"
    values = [y for _, points in lines for _, y in points]
    values.sort(reverse=not is_max)
    worst = values[len(values) // 5]
    name = printable(metric)
    notes = [f"{name} at each evaluation, one line per trial."]
    canvas = Canvas(data, "curves")
    for record, points in lines:
        canvas.line(record, points, size)
    canvas.axes.set(
        xlim=(0, None), xlabel=f"training time, {unit}", ylabel=name
    )
    if data.best:
        notes.append("The thick line is the best trial.")
    if goal is not None:
        look: Tree = {"linewidth": 0.9, "linestyle": (0, (4, 3)), "zorder": 1}
        canvas.axes.axhline(goal, color=_FG, **look)
        notes.append("The dashed line is the target.")
        worst = min(worst, goal) if is_max else max(worst, goal)
    if mode is not None and worst != values[0]:
        limit: Tree = {"bottom" if is_max else "top": worst}
        canvas.axes.set_ylim(**limit)
        notes.append("The worst evaluations are off the axis.")
    if not all(record.finished for record, _ in lines):
        notes.append("A cross marks where a trial failed.")
    return canvas.figure("Learning curves", " ".join(notes))


def _drawn_metric(data: FigureData) -> str:
    """Return the metric to draw: the target's, else the objective's, else the first.

    Only metrics of evaluations are drawn.
    """
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
