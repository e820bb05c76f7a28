"""The report's figures: inline SVG whose colours are CSS variables, so that they follow light and dark."""

from __future__ import annotations

import html
import io
import math
import re
from dataclasses import dataclass
from statistics import median
from typing import Any

from tune.config import Range, SweepConfig
from tune.journal import TrialRecord

_BATCH_KEYS = ("global_batch_size", "batch_size_per_worker", "microbatch_size")
FINISHED = ("done", "stopped")
"""Statuses of trials that have a result."""
_MAX_BARS = 24
_WIDTH_IN = 4.6

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
        return [figure for figure in (plot.throughput(), plot.memory(), plot.curves(), plot.targets()) if figure]


class _Canvas:
    """One set of axes and the hover text of its marks."""

    def __init__(self, name: str, height_in: float = 2.9) -> None:
        from matplotlib.figure import Figure as Sheet

        self.name = name
        self.sheet = Sheet(figsize=(_WIDTH_IN, height_in), layout="constrained")
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
            columns = max(1, min(len(names), 48 // (max(map(len, names)) + 5)))
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
        svg = re.sub(r'<svg ((?:(?!width=|height=)[^>])*)[^>]*?(viewBox="[^"]*")[^>]*>',
                     lambda found: f'<svg role="img" aria-label="{label}" {found[2]}>', svg, count=1)
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
        measured = [record for record in self.records if _finite(record.samples_per_s)]
        if not measured:
            return None
        canvas = _Canvas("throughput")
        self._against_x(canvas, [(r, r.samples_per_s or 0.0, f"{r.samples_per_s:,.0f} samples/s") for r in measured])
        canvas.axes.set_ylim(bottom=0)
        self._x_axis(canvas)
        canvas.axes.set_ylabel("samples/s")
        canvas.legend()
        return canvas.figure("Throughput", f"After warm-up, evaluation left out{self._each()}.")

    def memory(self) -> Figure | None:
        """Peak memory against the batch size; trials that ran out of it in a strip on top."""
        measured = [record for record in self.records if record.peak_memory_bytes and record.status in FINISHED]
        failed = [record for record in self.records if record.status == "out_of_memory"]
        if not measured and not failed:
            return None
        canvas = _Canvas("memory")
        peak = max((record.peak_memory_bytes or 0 for record in measured), default=0)
        unit, size = ("GiB", 2**30) if peak >= 2**30 else ("MiB", 2**20)
        amounts = [(r, (r.peak_memory_bytes or 0) / size) for r in measured]
        self._against_x(canvas, [(r, amount, f"{amount:,.3g} {unit}") for r, amount in amounts])
        rows = sorted({self._series_of(record) for record in failed})
        strip = 0.09 * len(rows)
        for record in failed:
            series = self._series_of(record)
            canvas.axes.plot(
                [self._position(record)], [0.96 - 0.09 * rows.index(series)], color=_SERIES[series % len(_SERIES)],
                marker="X", markersize=8, linestyle="none", clip_on=False, gid=canvas.tip(self._tip(record, "out of memory")),
                transform=canvas.axes.get_xaxis_transform(),
            )
        canvas.axes.set_ylim(0, peak / size * 1.08 / (1 - strip - 0.04) or 1)
        self._x_axis(canvas)
        canvas.axes.set_ylabel(f"peak memory, {unit}")
        canvas.legend()
        crosses = " A cross on top is a trial that ran out of memory." if failed else ""
        return canvas.figure("Peak memory", f"Largest over the workers{self._each()}.{crosses}")

    def curves(self) -> Figure | None:
        """The evaluated metric against training time, a line a trial."""
        objective = self.config.objective
        named = [*(objective.target or {}), objective.metric]
        seen = [name for record in self.records for row in record.curve for name in row]
        metric = next((name for name in [*named, *(n for n in seen if n.startswith("val_"))] if name in seen), None)
        lines = [(record, _points(record, metric)) for record in self.records] if metric else []
        lines = [(record, points) for record, points in lines if points]
        if metric is None or not lines:
            return None
        canvas = _Canvas("curves")
        unit, size = _time_unit(max(x for _, points in lines for x, _ in points))
        for record, points in sorted(lines, key=lambda line: self._is_best(line[0])):
            best = self._is_best(record)
            times, values = [x / size for x, _ in points], [y for _, y in points]
            canvas.axes.plot(
                times, values, color=self._color(record), linewidth=2.8 if best else 1.1, alpha=1 if best else 0.75,
                marker="." if len(points) == 1 else None, zorder=3 if best else 2,
                gid=canvas.tip(self._tip(record, f"ends at {values[-1]:.4g}")),
            )
            if record.status not in FINISHED:
                canvas.axes.plot(times[-1:], values[-1:], color=_BAD, marker="X", markersize=7, zorder=4,
                                 gid=canvas.tip(self._tip(record, record.status)))
        values = [y for _, points in lines for _, y in points]
        if min(values) > 0 and max(values) > 20 * min(values) and not metric.endswith("accuracy"):
            canvas.axes.set_yscale("log")
        if objective.target and metric in objective.target:
            canvas.axes.axhline(objective.target[metric], color=_FG, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        canvas.axes.set_xlim(left=0)
        canvas.axes.set_xlabel(f"training time, {unit}")
        canvas.axes.set_ylabel(metric)
        self._series_legend(canvas, {self._series_of(record) for record, _ in lines})
        notes = [f"The thick line is the best trial ({self.words[self.best.id]})."] if self.best else []
        if objective.target and metric in objective.target:
            notes.append("The dashed line is the target.")
        if any(record.status not in FINISHED for record, _ in lines):
            notes.append("A cross is where a trial failed.")
        return canvas.figure("Learning curves", " ".join([f"{metric} at each evaluation, a line a trial.", *notes]))

    def targets(self) -> Figure | None:
        """Training time until the target, a bar a trial, the best first."""
        reached = [record for record in self.records if _finite(record.time_to_target_s) and record.status in FINISHED]
        target = self.config.objective.target
        if not reached or not target:
            return None
        reached.sort(key=lambda record: record.time_to_target_s or 0.0)
        rows = [*reached, *(record for record in self.records if record not in reached)][:_MAX_BARS]
        canvas = _Canvas("targets", 0.7 + 0.21 * max(len(rows), 4))
        unit, size = _time_unit(max(record.time_to_target_s or 0.0 for record in reached))
        for row, record in enumerate(rows):
            if record in reached:
                length = (record.time_to_target_s or 0.0) / size
                text, color = f"{length:.3g} {unit}", _FG
                bar, = canvas.axes.barh(row, length, height=0.68, color=self._color(record))
                bar.set_gid(canvas.tip(self._tip(record, text)))
            else:
                length, color = 0.0, _MUTED
                text = "not reached" if record.status in FINISHED else record.status
            canvas.axes.annotate(text, (length, row), (4, 0), textcoords="offset points", va="center", color=color,
                                 fontsize=8, fontweight="bold" if self._is_best(record) else "normal")
        canvas.axes.set_yticks(range(len(rows)), [_cut(self.words[record.id]) for record in rows])
        canvas.axes.set_ylim(len(rows) - 0.4, -0.6)
        canvas.axes.margins(x=0.16)
        canvas.axes.grid(visible=False, axis="y")
        canvas.axes.grid(visible=True, axis="x")
        canvas.axes.set_axisbelow(True)
        canvas.axes.set_xlabel(f"training time, {unit}")
        self._series_legend(canvas, {self._series_of(record) for record in reached})
        (name, value), = target.items()
        left_out = len(self.records) - len(rows)
        cut = f" The first {len(rows)} of {len(self.records)} trials." if left_out else ""
        return canvas.figure("Time to target", f"Training time until {name} first reached {value:g}.{cut}")

    def _against_x(self, canvas: _Canvas, marks: list[tuple[TrialRecord, float, str]]) -> None:
        """A mark a trial; a line a series, through the median where a series has many trials at one x."""
        for number, value in enumerate(self.series):
            own = [mark for mark in marks if self._series_of(mark[0]) == number]
            if not own:
                continue
            color, marker = _SERIES[number % len(_SERIES)], _MARKERS[number % len(_MARKERS)]
            at: dict[float, list[float]] = {}
            for record, y, _ in own:
                at.setdefault(self._position(record), []).append(y)
            xs = sorted(at)
            canvas.axes.plot(xs, [median(at[x]) for x in xs], color=color, linewidth=1.6, marker=marker,
                             markevery=[], label=self._series_name(value))
            for record, y, text in own:
                canvas.axes.plot([self._position(record)], [y], color=color, marker=marker,
                                 markersize=8.5 if self._is_best(record) else 5.5, clip_on=False, zorder=3,
                                 gid=canvas.tip(self._tip(record, text)))

    def _x_axis(self, canvas: _Canvas) -> None:
        """Ticks at the values that were tried; logarithmic to base 2 for batch sizes."""
        values = self._values(self.x)
        positions = [self._at(value) for value in values]
        log = self.is_numeric and positions[0] > 0 and (self.x in _BATCH_KEYS or positions[-1] >= 8 * positions[0])
        if log:
            canvas.axes.set_xscale("log", base=2)
        scale = math.log2 if log else float
        width = scale(positions[-1]) - scale(positions[0])
        ticks: list[int] = []
        for index, position in enumerate(positions):
            if not ticks or scale(position) - scale(positions[ticks[-1]]) >= width / 9:
                ticks.append(index)
        canvas.axes.set_xticks([positions[index] for index in ticks], [_cut(shown(values[index])) for index in ticks])
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
        order = [] if listed is None or isinstance(listed, Range) else listed
        distinct = [value for index, value in enumerate(tried) if value not in tried[:index]]
        if all(_is_number(value) for value in distinct):
            return sorted(distinct)
        return sorted(distinct, key=lambda value: (order.index(value) if value in order else len(order), str(value)))

    def _is_best(self, record: TrialRecord) -> bool:
        return self.best is not None and record.id == self.best.id

    def _tip(self, record: TrialRecord, text: str) -> str:
        return f"{self.words[record.id]}: {text}"


def shown(value: Any) -> str:
    """A value of the configuration as YAML would have it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= 26 else text[:23] + "..."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _points(record: TrialRecord, metric: str | None) -> list[tuple[float, float]]:
    rows = [(row.get("train_time_s"), row.get(metric or "")) for row in record.curve]
    return [(x, y) for x, y in rows if x is not None and y is not None and math.isfinite(x) and math.isfinite(y)]


def _time_unit(longest_s: float) -> tuple[str, float]:
    if longest_s < 300:
        return "s", 1.0
    return ("min", 60.0) if longest_s < 3 * 3600 else ("h", 3600.0)
