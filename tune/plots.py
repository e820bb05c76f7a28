"""The report's figures: inline SVG whose colours are CSS variables, so that they follow light and dark."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Any

from tune.config import SweepConfig
from tune.journal import TrialRecord

_BATCH_KEYS = ("global_batch_size", "batch_size_per_worker", "microbatch_size")
FINISHED = ("done", "stopped")
"""Statuses of trials that have a result."""
_MAX_BARS = 24
_SIZE_IN = (4.2, 2.7)

# Colours that stand in the SVG only until `_Canvas.figure` puts the page's CSS variables in their place.
_FG, _MUTED, _GRID, _CARD, _BAD = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05"
_SERIES = tuple(f"#0a0c0{number}" for number in range(1, 7))
_VARIABLES = {_FG: "--fg", _MUTED: "--muted", _GRID: "--grid", _CARD: "--card", _BAD: "--bad"} | {
    color: f"--s{number}" for number, color in enumerate(_SERIES, 1)
}
_MARKERS = "os^Dv*"

_STYLE = {
    "axes.edgecolor": _GRID,
    "axes.facecolor": "none",
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.labelcolor": _MUTED,
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
    "text.color": _FG,
    "text.parse_math": False,  # names come from the user's configuration: a `$` is a dollar
    "xtick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.color": _GRID,
    "ytick.labelcolor": _MUTED,
    "ytick.major.size": 0,
}


@dataclass(frozen=True)
class Figure:
    """One figure of the report."""

    title: str
    caption: str
    svg: str
    """An `<svg>` element; its ids are unique in the page."""


def figures(
    config: SweepConfig,
    records: list[TrialRecord],
    labels: dict[str, str],
    words: dict[str, str],
    best: TrialRecord | None,
) -> list[Figure]:
    """The figures that the records have data for.

    `labels` are the column names of the dotted keys, `words` the short names of the trials by id.
    """
    from matplotlib import style

    with style.context(["default", _STYLE]):
        plot = _Plot(config, records, labels, words, best)
        drawn = [plot.throughput(), plot.memory(), plot.curves(), plot.targets()]
    return [figure for figure in drawn if figure]


class _Canvas:
    """One set of axes and the hover text of its marks."""

    def __init__(self, name: str, height_in: float = _SIZE_IN[1]) -> None:
        from matplotlib.figure import Figure as Sheet

        self.name = name
        self.sheet = Sheet(figsize=(_SIZE_IN[0], height_in), layout="constrained")
        self.axes = self.sheet.add_subplot()
        self.axes.grid(visible=False, axis="x")
        self._tips: dict[str, str] = {}

    def tip(self, text: str) -> str:
        """The gid of a mark that shows `text` when the mouse is over it."""
        gid = f"tip-{len(self._tips)}"
        self._tips[gid] = text
        return gid

    def legend(self) -> None:
        """Names of the series above the axes, in as many columns as there is room for."""
        handles, names = self.axes.get_legend_handles_labels()
        if names:
            in_one_row = sum(map(len, names)) + 6 * len(names) <= 52
            columns = len(names) if in_one_row else max(1, 52 // (max(map(len, names)) + 6))
            self.sheet.legend(handles, names, loc="outside upper left", ncols=columns)

    def figure(self, title: str, caption: str) -> Figure:
        """Render; colours become CSS variables and ids get this canvas's name in front."""
        stream = io.StringIO()
        self.sheet.savefig(stream, format="svg", metadata={"Date": None})
        svg = stream.getvalue()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>", "", svg, flags=re.DOTALL)
        svg = svg.replace("xlink:href=", "href=").replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
        svg = re.sub(r'(?<=\sid=")|(?<=href="#)|(?<=url\(#)', f"{self.name}-", svg)
        for gid, text in self._tips.items():
            opening = f'<g id="{self.name}-{gid}">'
            svg = svg.replace(opening, f"{opening}<title>{html.escape(text)}</title>")
        for color, variable in _VARIABLES.items():
            svg = svg.replace(color, f"var({variable})")
        label = html.escape(f"{title}. {caption}")
        head, box = svg[: svg.index(">")], re.search(r'viewBox="[^"]*"', svg)
        svg = svg.replace(head, f'<svg role="img" aria-label="{label}" {box[0] if box else ""}', 1)
        return Figure(title, caption, svg.strip())


@dataclass
class _Plot:
    """What the figures share: which key is the x axis, which one the colour."""

    config: SweepConfig
    records: list[TrialRecord]
    labels: dict[str, str]
    words: dict[str, str]
    best: TrialRecord | None

    def __post_init__(self) -> None:
        numeric = [key for key in self.labels if all(_is_number(value) for value in self._values(key))]
        batch = [key for key in _BATCH_KEYS if key in numeric]
        self.x = (batch or numeric or list(self.labels))[0]
        self.is_numeric = self.x in numeric
        others = [key for key in self.labels if key != self.x]
        self.by = "precision" if "precision" in others else others[0] if others else None
        self.series = self._values(self.by) if self.by else [None]

    def throughput(self) -> Figure | None:
        """Samples/s against the batch size."""
        rates = [(record, record.samples_per_s) for record in self.records if record.status in FINISHED]
        marks = [(r, rate, f"{rate:,.0f} samples/s") for r, rate in rates if rate and math.isfinite(rate)]
        if not marks:
            return None
        canvas = _Canvas("throughput")
        self._against_x(canvas, marks)
        canvas.axes.set_ylim(bottom=0)
        self._x_axis(canvas)
        canvas.axes.set_ylabel("samples/s")
        canvas.legend()
        best = " The largest mark is the best trial." if self.best else ""
        return canvas.figure("Throughput", f"After warm-up, evaluation left out{self._each()}.{best}")

    def memory(self) -> Figure | None:
        """Peak memory against the batch size; trials that ran out of it in a strip on top."""
        failed = [record for record in self.records if record.status == "out_of_memory"]
        finished = [record for record in self.records if record.status in FINISHED]
        peaks = [(record, record.peak_memory_bytes) for record in finished if record.peak_memory_bytes]
        if not peaks and not failed:
            return None
        canvas = _Canvas("memory")
        most = max((peak for _, peak in peaks), default=0)
        unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
        rows = sorted({self._series_of(record) for record in failed})
        self._against_x(canvas, [(r, peak / size, f"{peak / size:.4g} {unit}") for r, peak in peaks], rows)
        for record in failed:
            height = 0.96 - 0.09 * rows.index(self._series_of(record))
            canvas.axes.plot(
                [self._position(record)], [height], color=self._color(record), marker="X", markersize=8,
                transform=canvas.axes.get_xaxis_transform(),
                gid=canvas.tip(self._tip(record, "out of memory")),
            )
        if failed:
            canvas.axes.plot([], [], _FG, marker="X", markersize=8, linestyle="none", label="out of memory")
        canvas.axes.set_ylim(0, most / size * 1.08 / (0.96 - 0.09 * len(rows)) or 1)
        canvas.axes.yaxis.set_visible(bool(peaks))
        self._x_axis(canvas)
        canvas.axes.set_ylabel(f"peak memory, {unit}")
        canvas.legend()
        crosses = " Trials that ran out of memory are on top." if failed else ""
        return canvas.figure("Peak memory", f"Largest over the workers{self._each()}.{crosses}")

    def curves(self) -> Figure | None:
        """The evaluated metric against training time, a line a trial."""
        objective = self.config.objective
        seen = [name for record in self.records for row in record.curve for name in row]
        validated = [name for name in seen if name.startswith("val_")]
        metric = next((n for n in [*(objective.target or {}), objective.metric, *validated] if n in seen), "")
        lines = [(record, points) for record in self.records if (points := _points(record, metric))]
        if not lines:
            return None
        canvas = _Canvas("curves")
        unit, size = _time_unit(max(x for _, points in lines for x, _ in points))
        for record, points in sorted(lines, key=lambda line: self._is_best(line[0])):
            best = self._is_best(record)
            times, values = [x / size for x, _ in points], [y for _, y in points]
            canvas.axes.plot(
                times, values, color=self._color(record), linewidth=2.8 if best else 1.1,
                alpha=1 if best else 0.75, marker="." if len(points) == 1 else None, zorder=3 if best else 2,
                gid=canvas.tip(self._tip(record, f"ends at {values[-1]:.4g}")),
            )
            if record.status not in FINISHED:
                canvas.axes.plot(times[-1:], values[-1:], color=_BAD, marker="X", markersize=7, zorder=4,
                                 gid=canvas.tip(self._tip(record, record.status)))
        target = (objective.target or {}).get(metric)
        low, high = _closer([points for _, points in lines], target)
        canvas.axes.set_ylim(low, high)
        is_cut = any(not low <= y <= high for _, points in lines for _, y in points)
        if target is not None:
            canvas.axes.axhline(target, color=_FG, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        canvas.axes.set_xlim(left=0)
        canvas.axes.set_xlabel(f"training time, {unit}")
        canvas.axes.set_ylabel(metric)
        self._series_legend(canvas, {self._series_of(record) for record, _ in lines})
        notes = [
            f"{metric} at each evaluation, a line a trial.",
            f"The thick line is the best ({self.words[self.best.id]})." if self.best else "",
            "The dashed line is the target." if target is not None else "",
            "The worst evaluations are off the axis." if is_cut else "",
            "A cross is where a trial failed." if any(r.status not in FINISHED for r, _ in lines) else "",
        ]
        return canvas.figure("Learning curves", " ".join(note for note in notes if note))

    def targets(self) -> Figure | None:
        """Training time until the target, a bar a trial, the best first."""
        times = {
            record.id: time_s
            for record in self.records
            if (time_s := record.time_to_target_s) is not None and record.status in FINISHED
        }
        if not times or not self.config.objective.target:
            return None
        rows = sorted(self.records, key=lambda record: times.get(record.id, math.inf))[:_MAX_BARS]
        canvas = _Canvas("targets", 0.7 + 0.21 * max(len(rows), 4))
        unit, size = _time_unit(max(times[record.id] for record in rows if record.id in times))
        for row, record in enumerate(rows):
            length, color = times.get(record.id, 0.0) / size, _MUTED
            text: str = "not reached" if record.status in FINISHED else record.status
            if record.id in times:
                text, color = f"{length:.3g} {unit}", _FG
                bar, = canvas.axes.barh(row, length, height=0.68, color=self._color(record))
                bar.set_gid(canvas.tip(self._tip(record, text)))
            weight = "bold" if self._is_best(record) else "normal"
            canvas.axes.annotate(text, (length, row), (4, 0), textcoords="offset points", va="center",
                                 color=color, fontsize=8, fontweight=weight)
        canvas.axes.set_yticks(range(len(rows)), [_cut(self.words[record.id]) for record in rows])
        canvas.axes.set_ylim(len(rows) - 0.4, -0.6)
        canvas.axes.margins(x=0.16)
        canvas.axes.grid(visible=False, axis="y")
        canvas.axes.grid(visible=True, axis="x")
        canvas.axes.set_axisbelow(True)
        canvas.axes.set_xlabel(f"training time, {unit}")
        self._series_legend(canvas, {self._series_of(record) for record in rows if record.id in times})
        (name, value), = self.config.objective.target.items()
        cut = f" The first {len(rows)} of {len(self.records)} trials." if self.records[len(rows) :] else ""
        return canvas.figure("Time to target", f"Training time until {name} first reached {value:g}.{cut}")

    def _against_x(
        self, canvas: _Canvas, marks: list[tuple[TrialRecord, float, str]], also: Collection[int] = ()
    ) -> None:
        """A mark a trial; on a grid a line a series, through the median of the trials at one x.

        The legend has the series with marks and those in `also`.
        """
        line = "-" if self.config.search == "grid" else "none"
        canvas.axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        for number, value in enumerate(self.series):
            own = [mark for mark in marks if self._series_of(mark[0]) == number]
            if not own and number not in also:
                continue
            color, marker = _SERIES[number % len(_SERIES)], _MARKERS[number % len(_MARKERS)]
            at: dict[float, list[float]] = {}
            for record, y, _ in own:
                at.setdefault(self._position(record), []).append(y)
            xs = sorted(at)
            canvas.axes.plot(xs, [median(at[x]) for x in xs], color=color, linestyle=line, linewidth=1.6,
                             marker=marker, markevery=[], label=self._series_name(value))
            for record, y, text in own:
                canvas.axes.plot([self._position(record)], [y], color=color, marker=marker,
                                 markersize=8.5 if self._is_best(record) else 5.5, clip_on=False, zorder=3,
                                 gid=canvas.tip(self._tip(record, text)))

    def _x_axis(self, canvas: _Canvas) -> None:
        """Ticks at the values that were tried; logarithmic to base 2 for batch sizes."""
        values = self._values(self.x)
        positions = [self._at(value) for value in values]
        spread = self.x in _BATCH_KEYS or positions[-1] >= 8 * positions[0]
        log = self.is_numeric and positions[0] > 0 and spread
        if log:
            canvas.axes.set_xscale("log", base=2)
        scale = math.log2 if log else float
        first, width = scale(positions[0]), scale(positions[-1]) - scale(positions[0])
        margin = 0.06 * width or 0.5
        limits = (first - margin, first + width + margin)
        canvas.axes.set_xlim(*(2**limit for limit in limits) if log else limits)
        ticks: list[tuple[float, str]] = []
        for position, value in zip(positions, values, strict=True):
            if not ticks or scale(position) - scale(ticks[-1][0]) >= width / 9:
                ticks.append((position, _cut(shown(value))))
        canvas.axes.set_xticks([position for position, _ in ticks], [text for _, text in ticks])
        canvas.axes.minorticks_off()
        canvas.axes.set_xlabel(self.labels[self.x])

    def _series_legend(self, canvas: _Canvas, present: set[int]) -> None:
        for number in sorted(present) if self.by else []:
            canvas.axes.plot([], [], color=_SERIES[number % len(_SERIES)], linewidth=2.5,
                             label=self._series_name(self.series[number]))
        canvas.legend()

    def _series_name(self, value: Any) -> str:
        if self.by is None:
            return ""
        return _cut(shown(value) if self.by == "precision" else f"{self.labels[self.by]} {shown(value)}")

    def _each(self) -> str:
        return f", for each {self.labels[self.by]}" if self.by else ""

    def _series_of(self, record: TrialRecord) -> int:
        return self.series.index(record.config.get(self.by)) if self.by else 0

    def _color(self, record: TrialRecord) -> str:
        return _SERIES[self._series_of(record) % len(_SERIES)]

    def _position(self, record: TrialRecord) -> float:
        return self._at(record.config.get(self.x))

    def _at(self, value: Any) -> float:
        return float(value if self.is_numeric else self._values(self.x).index(value))

    def _values(self, key: str) -> list[Any]:
        """The values of a key that were tried: in the order of the space's list, else rising."""
        listed = self.config.space.get(key)
        tried = [record.config.get(key) for record in self.records]
        distinct = [value for index, value in enumerate(tried) if value not in tried[:index]]
        if all(_is_number(value) for value in distinct):
            return sorted(distinct)
        first = [value for value in listed if value in tried] if isinstance(listed, list) else []
        return first + sorted((value for value in distinct if value not in first), key=str)

    def _is_best(self, record: TrialRecord) -> bool:
        return self.best is not None and record.id == self.best.id

    def _tip(self, record: TrialRecord, text: str) -> str:
        return f"{self.words[record.id]}: {text}"


def shown(value: Any) -> str:
    """A value of the configuration, as YAML has it; numbers to four digits."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= 26 else text[:23] + "..."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _points(record: TrialRecord, metric: str) -> list[tuple[float, float]]:
    rows = [(row.get("train_time_s", math.nan), row.get(metric, math.nan)) for row in record.curve]
    return [(x, y) for x, y in rows if math.isfinite(x) and math.isfinite(y)]


def _closer(lines: list[list[tuple[float, float]]], target: float | None) -> tuple[float, float]:
    """Limits of a metric's axis without the fifth of the values that is worst, where all runs are alike."""
    values = sorted(y for points in lines for _, y in points)
    fifth = len(values) // 5
    rises = sum(points[-1][1] - points[0][1] for points in lines) > 0
    kept = values[fifth:] if rises else values[: len(values) - fifth]
    if target is not None:
        kept.append(target)
    margin = 0.05 * (max(kept) - min(kept)) or 0.05 * abs(kept[0]) or 1.0
    return min(kept) - margin, max(kept) + margin


def _time_unit(longest_s: float) -> tuple[str, float]:
    if longest_s < 300:
        return "s", 1.0
    return ("min", 60.0) if longest_s < 3 * 3600 else ("h", 3600.0)
