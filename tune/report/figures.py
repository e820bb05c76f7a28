"""Draw the report's figures: objective, throughput, memory and learning curves."""

import functools
import html
import io
import itertools
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainers.config.function import BATCH_KEYS
from tune.config import TO_TARGET, SweepConfig
from tune.report.words import (
    amount,
    duration,
    in_words,
    is_number,
    labels,
    memory_unit,
    printable,
    shown,
    span,
    telling,
    time_unit,
)
from tune.search.finalists import finals
from tune.trials.record import TrialRecord, value_of

# Placeholders: `Canvas.figure` replaces them with the page's CSS variables.
FG = "#0a0b01"
MUTED = "#0a0b02"
BAD = "#0a0b03"
_GRID = "#0a0b04"
_CARD = "#0a0b05"
SERIES = tuple(f"#0a0c0{number}" for number in range(1, 7))
MARKERS = "os^DvP"
"""The shape of each series' marks, for who does not see their colours."""
_COLORS = {
    FG: "var(--fg)",
    MUTED: "var(--muted)",
    BAD: "var(--bad)",
    _GRID: "var(--grid)",
    _CARD: "var(--card)",
} | {color: f"var(--s{number})" for number, color in enumerate(SERIES, 1)}

_SIZE_IN = (4.2, 2.7)
_LEGEND_CHARS = 52  # as many as there is room for in one row
_ROW = 0.09  # of the height of the axes: a row of a series' trials out of memory
_TICK_CHARS = 56  # as many as fit side by side below the axes
SIZE_KEYS = (*BATCH_KEYS, "microbatch_size")
_STYLE = {
    "axes.edgecolor": _GRID,
    "axes.facecolor": "none",
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 9,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handletextpad": 0.4,
    "lines.markeredgecolor": _CARD,
    "lines.markeredgewidth": 0.8,
    "lines.markersize": 5.5,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",
    "text.color": FG,
    # names come from the user's configuration: a `$` is a dollar
    "text.parse_math": False,
    "xtick.color": _GRID,
    "xtick.labelcolor": MUTED,
    "ytick.color": _GRID,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
}

Points = list[tuple[float, float]]
"""A trial's evaluations: training time, s, and a metric."""


@dataclass(frozen=True)
class Figure:
    """One figure of the report."""

    title: str
    caption: str
    svg: str
    """An `<svg>` element; its ids are unique in the page.

    Of small multiples, one for each panel.
    """
    num_panels: int = 1


@contextmanager
def styled() -> Iterator[None]:
    """Set the style in which canvases are made and rendered."""
    from matplotlib import style

    with style.context(["default", _STYLE]), warnings.catch_warnings():
        # Text stays text, in the reader's fonts: it does not matter what matplotlib's
        # own lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


class Canvas:
    """One set of axes in matplotlib's style, and the hover text of its marks.

    It becomes inline SVG, whose colours are CSS variables.
    """

    def __init__(self, name: str) -> None:
        from matplotlib.figure import Figure as Sheet

        self.name = name
        self.sheet = Sheet(figsize=_SIZE_IN, layout="constrained")
        self.axes = self.sheet.add_subplot()
        self.axes.grid(visible=False, axis="x")
        # As many as have room for six digits each.
        self.axes.locator_params(axis="x", nbins=5)
        self._tips: dict[str, str] = {}

    def tip(self, text: str) -> str:
        """Return the gid of an artist that shows `text` when the mouse is over it."""
        gid = f"tip-{len(self._tips)}"
        self._tips[gid] = text
        return gid

    def move(self, lines: Iterable[Any], steps: float) -> None:
        """Move what was drawn by small steps to the right, beside what would cover it."""
        from matplotlib.transforms import ScaledTranslation

        place = self.axes.transData + ScaledTranslation(
            5 * steps / 72, 0, self.sheet.dpi_scale_trans
        )
        for line in lines:
            line.set_transform(place)

    def mark(self, x: float, y: float, text: str, color: str, **look: Any) -> None:
        """Draw one point that shows `text` when the mouse is over it."""
        self.axes.plot([x], [y], color=color, gid=self.tip(text), **look)

    def legend(self, series: Mapping[int, str]) -> None:
        """Write the names of what was drawn, and of series, above the axes."""
        for at, name in series.items():
            self.axes.plot([], [], color=SERIES[at], marker=MARKERS[at], label=name)
        handles, names = self.axes.get_legend_handles_labels()
        if names:
            widths = [len(name) + 6 for name in names]
            columns = max(1, _LEGEND_CHARS // max(widths))
            if sum(widths) <= _LEGEND_CHARS:
                columns = len(names)
            self.sheet.legend(handles, names, loc="outside upper left", ncols=columns)

    def figure(self, title: str, caption: str) -> Figure:
        """Render what was drawn."""
        stream = io.StringIO()
        self.sheet.savefig(stream, format="svg", metadata={"Date": None})
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
        """Return a tag with the canvas's name in its ids, and variables for colours.

        Texts are no tags and stay what they are, whatever they look like.
        """
        tag = found[0].replace("xlink:href=", "href=")
        if "#0a0" in tag:
            for color, css in _COLORS.items():
                tag = tag.replace(color, css)
        tip = re.match(r'<g id="(tip-\d+)">', tag)
        tag = re.sub(r'(?<=\sid=")|(?<=href="#)|(?<=url\(#)', f"{self.name}-", tag)
        if tip is None:
            return tag
        text = html.escape(self._tips[tip[1]])
        return f"{tag}<title>{text}</title>"


@dataclass(frozen=True)
class Axis:
    """A key of the configuration, and the values of it that were tried."""

    key: str
    label: str
    values: list[Any]
    """Rising where they are numbers, else as they were tried."""

    @functools.cached_property
    def is_numeric(self) -> bool:
        """Whether all of them are numbers."""
        return all(map(is_number, self.values))

    @property
    def is_log(self) -> bool:
        """Whether ratios of them are more telling than differences."""
        if not self.is_numeric or self.values[0] <= 0:
            return False
        return self.key in SIZE_KEYS or bool(self.values[-1] >= 8 * self.values[0])

    @functools.cached_property
    def positions(self) -> list[float]:
        """Their places on the axis."""
        if self.is_numeric:
            return [float(value) for value in self.values]
        return [float(at) for at in range(len(self.values))]

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

    def name(self, value: Any) -> str:
        """Return a value as a legend has it."""
        if self.key == "precision":
            return cut(shown(value))
        return cut(f"{self.label} {shown(value)}")


class FigureData:
    """The trials of a sweep, with a place on the x axis and a series each.

    Of the keys that vary, batch size or the first number is the x axis, and precision
    or the first key of few values the series.
    """

    def __init__(
        self, config: SweepConfig, records: list[TrialRecord], best: TrialRecord | None
    ) -> None:
        self.config = config
        self.records = records
        self.best = best
        self.finished = [record for record in records if record.finished]
        self.out_of_memory = [
            record for record in records if record.status == "out_of_memory"
        ]
        names = telling(config, records)
        self._words = {record.id: in_words(names, record) for record in records}
        axes = []
        for key, label in labels(config, records).items():
            axes.append(Axis(key, label, _tried(key, records)))
        self.varied = [
            axis for axis in axes if len(axis.values) > 1 and axis.key != "seed"
        ]
        """The keys of which more than one value was tried; a seed is a repeat."""
        self.x = _choose_x(axes)
        # More values than colours would be a legend larger than its figure, or nothing
        # to compare.
        rest = [axis for axis in self.varied if axis != self.x]
        few = [axis for axis in rest if len(axis.values) <= len(SERIES)]
        few.sort(key=lambda axis: axis.key != "precision")
        self.by = few[0] if few else None
        self.names = [""]
        if self.by is not None:
            self.names = [self.by.name(value) for value in self.by.values]

    def series(self, record: TrialRecord) -> int:
        """Return which series a trial belongs to."""
        return self.by.index(record) if self.by else 0

    def color(self, record: TrialRecord) -> str:
        """Return the colour of a trial's series."""
        return SERIES[self.series(record)]

    def legend(self, records: Iterable[TrialRecord]) -> dict[int, str]:
        """Return the names of the series that these trials belong to."""
        series = sorted({self.series(record) for record in records})
        return {at: self.names[at] for at in series}

    def each(self) -> str:
        """Return the series in words."""
        return f", for each {self.by.label}" if self.by else ""

    def is_best(self, record: TrialRecord) -> bool:
        """Whether the trial is the sweep's best."""
        return self.best is not None and record.id == self.best.id

    def tip(self, record: TrialRecord, text: str) -> str:
        """Return what is shown when the mouse is over a trial's mark."""
        return f"{self._words[record.id]}: {text}"


def _tried(key: str, records: list[TrialRecord]) -> list[Any]:
    """Return the values of a key that were tried."""
    tried: dict[str, Any] = {}
    for record in records:
        value = record.config.get(key)
        tried.setdefault(repr(value), value)
    values = list(tried.values())
    if all(map(is_number, values)):
        values.sort()
    return values


def _choose_x(axes: list[Axis]) -> Axis:
    """Return the key of the x axis: a batch size or the first number, one that varies."""
    numeric = [axis for axis in axes if axis.is_numeric]
    varied = [axis for axis in numeric if len(axis.values) > 1] or numeric
    sizes = [axis for axis in varied if axis.key in SIZE_KEYS]
    sizes.sort(key=lambda axis: SIZE_KEYS.index(axis.key))
    return [*sizes, *varied, *axes][0]


def cut(text: str) -> str:
    """Return text that fits beside an axis."""
    if len(text) <= 26:
        return text
    return text[:23] + "..."


def figures(
    config: SweepConfig, records: list[TrialRecord], best: TrialRecord | None
) -> list[Figure]:
    """Draw the figures that the records have data for."""
    data = FigureData(config, records, best)
    with styled():
        drawn = [objective(data), throughput(data), memory(data), curves(data)]
    return [figure for figure in drawn if figure]


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


def objective(data: FigureData) -> Figure | None:
    """Draw the objective against each key that varied, a panel a key."""
    metric = data.config.objective.metric
    marks = _marks(data)
    if metric == "samples_per_s" or not marks:  # the throughput has a figure of its own
        return None
    trials = [record for record in data.records if record.purpose != "repeat"]
    notes = ["A mark a trial."]
    if data.best:
        notes.append("The largest is the best.")
    num_missed = len(trials) - len(marks)
    if metric in TO_TARGET and num_missed > 0:
        notes.append(f"{num_missed} of {len(trials)} did not reach the target.")
    if any(mark.is_repeated for mark in marks):
        notes.append("Thick lines are 95 % intervals of the finalists' repeats.")
    title = label = printable(metric)
    size = 1.0
    if metric == "time_to_target":
        title = "Time to target"
        size, unit = time_unit(max(mark.value for mark in marks))
        label = f"time to target, {unit}"
    panels: list[Figure] = []
    others = [axis for axis in data.varied if axis != data.x]
    for axis in [data.x, *others]:
        canvas = Canvas(f"objective{len(panels) or ''}")
        _draw(data, axis, canvas, marks, size)
        canvas.axes.set_ylabel(label)
        canvas.legend(data.legend(mark.record for mark in marks))
        panels.append(canvas.figure(axis.label, ""))
    svg = "\n".join(panel.svg for panel in panels)
    return Figure(title, " ".join(notes), svg, len(panels))


def _marks(data: FigureData) -> list[Mark]:
    """Return the trials with a value of the objective."""
    metric = data.config.objective.metric
    marks = []
    finalists = finals(data.config, data.records) if metric == "time_to_target" else []
    times = {final.record.id: final.time_s for final in finalists}
    for record in data.records:
        value = value_of(metric, record)
        if record.purpose == "repeat" or not is_number(value):
            continue
        if record.id in times:
            time_s = times[record.id]
            low = duration(time_s.low)
            high = duration(time_s.high)
            text = f"{duration(time_s.value)}, 95 % interval {low} to {high}"
            ends = time_s.low, time_s.high
            marks.append(Mark(record, time_s.value, text, ends, True))
        elif metric == "time_to_target" and record.missed_target_s is not None:
            ends = record.missed_target_s, value
            marks.append(Mark(record, value, span(*ends), ends))
        else:
            marks.append(Mark(record, value, amount(metric, value)))
    return marks


def throughput(data: FigureData) -> Figure | None:
    """Draw samples/s against the batch size."""
    marks = []
    for record in data.finished:
        rate = record.samples_per_s
        if rate and is_number(rate):
            marks.append(Mark(record, rate, f"{rate:,.0f} samples/s"))
    if not marks:
        return None
    canvas = Canvas("throughput")
    _draw(data, data.x, canvas, marks, is_joined=True)
    canvas.axes.set(ylim=(0, None), ylabel="samples/s")
    canvas.legend(data.legend(mark.record for mark in marks))
    best = " The largest mark is the best trial." if data.best else ""
    caption = f"After warm-up, evaluation left out{data.each()}.{best}"
    return canvas.figure("Throughput", caption)


def memory(data: FigureData) -> Figure | None:
    """Draw peak memory against the batch size; a strip on top has trials out of memory."""
    marks = []
    for record in data.finished:
        peak = record.peak_memory_bytes
        if peak:
            marks.append(Mark(record, peak, amount("peak_memory_bytes", peak)))
    if not marks and not data.out_of_memory:
        return None
    most = max((mark.value for mark in marks), default=0.0)
    size, unit = memory_unit(most)
    canvas = Canvas("memory")
    _draw(data, data.x, canvas, marks, size, is_joined=True)
    cross: dict[str, Any] = {"marker": "X", "markersize": 8}
    for record in data.out_of_memory:
        y = 0.96 - _ROW * data.series(record)
        text = data.tip(record, "out of memory")
        place = canvas.axes.get_xaxis_transform()
        canvas.mark(
            data.x.position(record),
            y,
            text,
            data.color(record),
            transform=place,
            **cross,
        )
    caption = f"Largest over the workers{data.each()}."
    if data.out_of_memory:
        canvas.axes.plot([], [], FG, linestyle="none", label="out of memory", **cross)
        caption += " Trials that ran out of memory are on top."
        most = most / (0.96 - _ROW * len(data.names))
    canvas.axes.set(ylim=(0, most / size * 1.08 or 1), ylabel=f"peak memory, {unit}")
    canvas.axes.yaxis.set_visible(bool(marks))
    shown = [*(mark.record for mark in marks), *data.out_of_memory]
    canvas.legend(data.legend(shown))
    return canvas.figure("Peak memory", caption)


def curves(data: FigureData) -> Figure | None:
    """Draw the evaluated metric against training time, a line a trial."""
    metric = _drawn_metric(data)
    lines = []
    for record in data.records:
        points = _points(record, metric)
        if points:
            lines.append((record, points))
    if not lines:
        return None
    longest_s, _ = max(max(points) for _, points in lines)
    size, unit = time_unit(longest_s)
    target = data.config.objective.goal
    goal = None
    if target and target.metric == metric and is_number(target.value):
        goal = target.value
    values = [[y for _, y in points] for _, points in lines]
    low, high = _closer(values, goal)
    canvas = Canvas("curves")
    _lines(data, canvas, lines, size)
    canvas.axes.set(
        xlim=(0, None),
        ylim=(low, high),
        xlabel=f"training time, {unit}",
        ylabel=printable(metric),
    )
    canvas.legend(data.legend(record for record, _ in lines))
    notes = [f"{printable(metric)} at each evaluation, a line a trial."]
    if data.best:
        notes.append("The thick line is the best.")
    if goal is not None:
        look: dict[str, Any] = {"linewidth": 0.9, "linestyle": (0, (4, 3)), "zorder": 1}
        canvas.axes.axhline(goal, color=FG, **look)
        notes.append("The dashed line is the target.")
    if not all(low <= min(own) and max(own) <= high for own in values):
        notes.append("The worst evaluations are off the axis.")
    if not all(record.finished for record, _ in lines):
        notes.append("A cross is where a trial failed.")
    return canvas.figure("Learning curves", " ".join(notes))


def _drawn_metric(data: FigureData) -> str:
    """Return the evaluated metric to draw: the objective's, else the first of them."""
    seen: dict[str, None] = {}
    for record in data.records:
        for row in record.curve:
            seen.update(dict.fromkeys(row))
    evaluated = [name for name in seen if name.startswith("val_")]
    wanted = [*reversed(data.config.objective.watched), *evaluated]
    return next((name for name in wanted if name in seen), "")


def _lines(
    data: FigureData,
    canvas: Canvas,
    lines: list[tuple[TrialRecord, Points]],
    size: float,
) -> None:
    """Draw a line a trial, the best thick and on top; `size` is a unit of time, s."""
    for record, points in sorted(lines, key=lambda line: data.is_best(line[0])):
        look: dict[str, Any] = {"linewidth": 1.1, "alpha": 0.75, "zorder": 2}
        if data.is_best(record):
            look = {"linewidth": 2.8, "alpha": 1, "zorder": 3}
        end_x, end_y = points[-1]
        canvas.axes.plot(
            [x / size for x, _ in points],
            [y for _, y in points],
            color=data.color(record),
            marker=MARKERS[data.series(record)],
            markevery=[-1],
            gid=canvas.tip(data.tip(record, f"ends at {end_y:.4g}")),
            **look,
        )
        if not record.finished:
            text = data.tip(record, record.status)
            canvas.mark(
                end_x / size, end_y, text, BAD, marker="X", markersize=7, zorder=4
            )


def _draw(
    data: FigureData,
    axis: Axis,
    canvas: Canvas,
    marks: list[Mark],
    size: float = 1.0,
    is_joined: bool = False,
) -> None:
    """Draw a mark a trial, the best on top; `size` is the unit of their values.

    If joined, a grid has a line a series through medians.
    """
    found: dict[int, dict[float, list[float]]] = {}
    for mark in sorted(marks, key=lambda mark: data.is_best(mark.record)):
        x = axis.position(mark.record)
        y = mark.value / size
        at = data.series(mark.record)
        color = SERIES[at]
        found.setdefault(at, {}).setdefault(x, []).append(y)
        before = len(canvas.axes.lines)
        if mark.between is not None:
            ends = [end / size for end in mark.between]
            width = 2.4 if mark.is_repeated else 1
            canvas.axes.plot([x, x], ends, color=color, linewidth=width, alpha=0.7)
        look: dict[str, Any] = {"linestyle": "none", "clip_on": False, "zorder": 3}
        look["markersize"] = 8.5 if data.is_best(mark.record) else 5
        text = data.tip(mark.record, mark.text)
        canvas.mark(x, y, text, color, marker=MARKERS[at], **look)
        if axis != data.by and not is_joined:
            middle = (len(data.names) - 1) / 2
            canvas.move(canvas.axes.lines[before:], at - middle)
    if is_joined and data.config.search == "grid":
        for at, values in found.items():
            xs = sorted(values)
            medians = [median(values[x]) for x in xs]
            canvas.axes.plot(xs, medians, color=SERIES[at], linewidth=1.6)
    _set_axis(axis, canvas)
    canvas.axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def _points(record: TrialRecord, metric: str) -> Points:
    rows = [(row.get("train_time_s"), row.get(metric)) for row in record.curve]
    return [(x, y) for x, y in rows if is_number(x) and is_number(y)]


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


def _set_axis(axis: Axis, canvas: Canvas) -> None:
    """Set ticks of the x axis at the values that were tried; base 2 for batch sizes."""
    places = axis.positions
    if axis.is_log:
        canvas.axes.set_xscale("log", base=2)
        places = [math.log2(position) for position in places]
    first = places[0]
    width = places[-1] - first
    margin = 0.06 * width or 0.5
    if width == 0 and not axis.is_log:
        margin = abs(first) / 2 or 0.5
    low = first - margin
    high = first + width + margin
    if axis.is_log:
        low = 2**low
        high = 2**high
    canvas.axes.set_xlim(low, high)
    ticks: dict[float, str] = {}
    next_place = -math.inf
    for at, place in enumerate(places):
        if place >= next_place:
            ticks[axis.positions[at]] = cut(shown(axis.values[at]))
            next_place = place + width / 9
    canvas.axes.set_xticks(list(ticks), list(ticks.values()))
    if sum(len(text) + 2 for text in ticks.values()) > _TICK_CHARS:
        canvas.axes.tick_params("x", labelrotation=25)
        for label in canvas.axes.get_xticklabels():
            label.set_horizontalalignment("right")
    canvas.axes.minorticks_off()
    canvas.axes.set_xlabel(axis.label)
