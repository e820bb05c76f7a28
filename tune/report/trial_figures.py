"""The report's figures: throughput and memory against the batch size, learning curves, time to the target."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from statistics import median
from typing import Any

from tune.config import BATCH_KEYS, SweepConfig
from tune.report.answer import FINISHED, in_short, is_number, labels, printable, shown
from tune.report.canvas import BAD, FG, MUTED, SERIES, Canvas, Figure, styled
from tune.report.search_figures import beliefs, course, pareto, time_unit
from tune.trials.record import TrialRecord

_BATCH_KEYS = (*BATCH_KEYS, "microbatch_size")
_MARKERS = "os^Dv*"
_MAX_BARS = 24
_TICK_CHARS = 56  # as many as stand side by side below the axes
_ROW = 0.09  # of the height of the axes: one row of trials that ran out of memory

Points = list[tuple[float, float]]
"""A trial's evaluations: training time, s, and a metric."""


def figures(
    config: SweepConfig,
    records: list[TrialRecord],
    best: TrialRecord | None,
    train: Mapping[str, Any] | None = None,
) -> list[Figure]:
    """The figures that the records have data for; `train`, the TrainConfig mapping, is what search frontier needs."""
    plot = Plot(config, records, best)
    with styled():
        believed = beliefs(plot, train) if config.search == "frontier" and train is not None else None
        drawn = [plot.throughput(), plot.memory(), plot.curves(), plot.targets(), believed, pareto(plot), course(plot)]
    return [figure for figure in drawn if figure]


class Plot:
    """What the figures share: which key is the x axis, which one the colour."""

    def __init__(self, config: SweepConfig, records: list[TrialRecord], best: TrialRecord | None) -> None:
        self.config, self.records, self.best = config, records, best
        self.labels = labels(config, records)
        self.words = {record.id: in_short(self.labels, record) for record in records}
        tried = {key: self._tried(key) for key in self.labels}
        numeric = [key for key, values in tried.items() if all(map(is_number, values))]
        varied = [key for key in numeric if len(tried[key]) > 1] or numeric
        self.x = next((key for key in (*_BATCH_KEYS, *varied) if key in varied), next(iter(tried)))
        self.is_numeric = self.x in numeric
        self.values = tried[self.x]
        self.places = {repr(value): float(value if self.is_numeric else at) for at, value in enumerate(self.values)}
        # More values than colours would be a legend larger than its figure, or nothing to compare.
        others = [key for key, values in tried.items() if key != self.x and 2 <= len(values) <= len(SERIES)]
        self.by = "precision" if "precision" in others else next(iter(others), None)
        self.names = [self._series_name(value) for value in tried[self.by]] if self.by else [""]
        self.series = {repr(value): at for at, value in enumerate(tried[self.by])} if self.by else {}

    def throughput(self) -> Figure | None:
        """Samples/s against the batch size."""
        rates = [(record, record.samples_per_s) for record in self.records if record.status in FINISHED]
        marks = [(r, rate, f"{rate:,.0f} samples/s") for r, rate in rates if rate and is_number(rate)]
        if not marks:
            return None
        canvas = Canvas("throughput")
        self._against_x(canvas, marks)
        canvas.axes.set_ylim(bottom=0)
        canvas.axes.set_ylabel("samples/s")
        canvas.legend()
        best = " The largest mark is the best trial." if self.best else ""
        if any(record.status == "out_of_memory" for record in self.records):
            best += " Beyond a dotted line memory runs out."
        return canvas.figure("Throughput", f"After warm-up, evaluation left out{self._each()}.{best}")

    def memory(self) -> Figure | None:
        """Peak memory against the batch size; trials that ran out of it in a strip on top."""
        failed = [record for record in self.records if record.status == "out_of_memory"]
        finished = [record for record in self.records if record.status in FINISHED]
        peaks = [(record, record.peak_memory_bytes) for record in finished if record.peak_memory_bytes]
        if not peaks and not failed:
            return None
        canvas = Canvas("memory")
        most = max((peak for _, peak in peaks), default=0)
        unit, size = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
        rows = sorted({self._series_of(record) for record in failed})
        self._against_x(canvas, [(r, peak / size, f"{peak / size:.4g} {unit}") for r, peak in peaks], rows)
        top = canvas.axes.get_xaxis_transform()
        cross: dict[str, Any] = {"marker": "X", "markersize": 8}
        for record in failed:
            height = 0.96 - _ROW * rows.index(self._series_of(record))
            text = self.tip(record, "out of memory")
            canvas.mark(self._position(record), height, text, self.color(record), transform=top, **cross)
        if failed:
            canvas.axes.plot([], [], FG, linestyle="none", label="out of memory", **cross)
        canvas.axes.set_ylim(0, most / size * 1.08 / (0.96 - _ROW * len(rows)) or 1)
        canvas.axes.yaxis.set_visible(bool(peaks))
        canvas.axes.set_ylabel(f"peak memory, {unit}")
        canvas.legend()
        crosses = " Trials that ran out of memory are on top, beyond the dotted line of their colour." if failed else ""
        return canvas.figure("Peak memory", f"Largest over the workers{self._each()}.{crosses}")

    def curves(self) -> Figure | None:
        """The evaluated metric against training time, a line a trial."""
        objective = self.config.objective
        seen = list(dict.fromkeys(name for record in self.records for row in record.curve for name in row))
        validated = [name for name in seen if name.startswith("val_")]
        metric = next((n for n in [*(objective.target or {}), objective.metric, *validated] if n in seen), "")
        lines = [(record, points) for record in self.records if (points := _points(record, metric))]
        if not lines:
            return None
        canvas = Canvas("curves")
        size, unit = time_unit(max(x for _, points in lines for x, _ in points))
        for record, points in sorted(lines, key=lambda line: self.is_best(line[0])):
            self._curve(canvas, record, [(x / size, y) for x, y in points])
        target = (objective.target or {}).get(metric)
        target = target if is_number(target) else None
        low, high = _closer([points for _, points in lines], target)
        canvas.axes.set_ylim(low, high)
        is_cut = any(not low <= y <= high for _, points in lines for _, y in points)
        if target is not None:
            canvas.axes.axhline(target, color=FG, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        canvas.axes.set_xlim(left=0)
        canvas.axes.set_xlabel(f"training time, {unit}")
        canvas.axes.set_ylabel(printable(metric))
        self.series_legend(canvas, [record for record, _ in lines])
        notes = [
            f"{printable(metric)} at each evaluation, a line a trial.",
            f"The thick line is the best ({self.words[self.best.id]})." if self.best else "",
            "The dashed line is the target." if target is not None else "",
            "The worst evaluations are off the axis." if is_cut else "",
            "A cross is where a trial failed." if any(r.status not in FINISHED for r, _ in lines) else "",
        ]
        return canvas.figure("Learning curves", " ".join(note for note in notes if note))

    def _curve(self, canvas: Canvas, record: TrialRecord, points: Points) -> None:
        best, (end_x, end_y) = self.is_best(record), points[-1]
        canvas.axes.plot(
            *zip(*points, strict=True),
            color=self.color(record),
            linewidth=2.8 if best else 1.1,
            alpha=1 if best else 0.75,
            marker="." if len(points) == 1 else None,
            zorder=3 if best else 2,
            gid=canvas.tip(self.tip(record, f"ends at {end_y:.4g}")),
        )
        if record.status not in FINISHED:
            canvas.mark(end_x, end_y, self.tip(record, record.status), BAD, marker="X", markersize=7, zorder=4)

    def targets(self) -> Figure | None:
        """Training time until the target, a bar a trial, the best first; repeats and short trials have none."""
        trials = [record for record in self.records if record.purpose == "trial"]
        finished = [record for record in trials if record.status in FINISHED]
        times = {record.id: time_s for record in finished if is_number(time_s := record.time_to_target_s)}
        if not times or not self.config.objective.target:
            return None
        rows = sorted(trials, key=lambda record: times.get(record.id, math.inf))[:_MAX_BARS]
        canvas = Canvas("targets", 0.7 + 0.21 * max(len(rows), 4))
        size, unit = time_unit(max(times[record.id] for record in rows if record.id in times))
        for row, record in enumerate(rows):
            length, color = times.get(record.id, 0.0) / size, MUTED
            text: str = "not reached" if record.status in FINISHED else record.status
            if record.id in times:
                text, color = f"{length:.3g} {unit}", FG
                (bar,) = canvas.axes.barh(row, length, height=0.68, color=self.color(record))
                bar.set_gid(canvas.tip(self.tip(record, text)))
            weight = "bold" if self.is_best(record) else "normal"
            look: dict[str, Any] = {"va": "center", "color": color, "fontsize": 8, "fontweight": weight}
            canvas.axes.annotate(text, (length, row), (4, 0), textcoords="offset points", **look)
        canvas.axes.set_yticks(range(len(rows)), [_cut(self.words[record.id]) for record in rows])
        canvas.axes.set_ylim(len(rows) - 0.4, -0.6)
        canvas.axes.margins(x=0.16)
        canvas.axes.grid(visible=False, axis="y")
        canvas.axes.grid(visible=True, axis="x")
        canvas.axes.set_axisbelow(True)
        canvas.axes.set_xlabel(f"training time, {unit}")
        self.series_legend(canvas, [record for record in rows if record.id in times])
        ((name, value),) = self.config.objective.target.items()
        cut = f" The first {len(rows)} of {len(trials)} trials." if trials[len(rows) :] else ""
        caption = f"Training time until {printable(name)} first reached {value:g}.{cut}"
        return canvas.figure("Time to target", caption)

    def _against_x(
        self, canvas: Canvas, marks: list[tuple[TrialRecord, float, str]], also: Collection[int] = ()
    ) -> None:
        """A mark a trial; on a grid a line a series, through the median of the trials at one x.

        The legend has the series with marks and those in `also`.
        """
        line = "-" if self.config.search == "grid" else "none"
        canvas.axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        for at, name in enumerate(self.names):
            own = [mark for mark in marks if self._series_of(mark[0]) == at]
            if not own and at not in also:
                continue
            color, marker = SERIES[at], _MARKERS[at]
            found: dict[float, list[float]] = {}
            for record, y, _ in own:
                found.setdefault(self._position(record), []).append(y)
            xs = sorted(found)
            look: dict[str, Any] = {"linestyle": line, "linewidth": 1.6, "marker": marker, "markevery": []}
            canvas.axes.plot(xs, [median(found[x]) for x in xs], color=color, label=name, **look)
            for record, y, text in own:
                look = {"marker": marker, "markersize": 8.5 if self.is_best(record) else 5.5}
                tip = self.tip(record, text)
                canvas.mark(self._position(record), y, tip, color, clip_on=False, zorder=3, **look)
        self._x_axis(canvas)
        self._boundary(canvas)

    def _boundary(self, canvas: Canvas) -> None:
        """A line for each series between the largest value that fitted and the smallest that ran out of memory."""
        if not self.is_numeric:
            return
        for at in range(len(self.names)):
            own = [record for record in self.records if self._series_of(record) == at]
            failed = [self._position(record) for record in own if record.status == "out_of_memory"]
            fitted = [self._position(record) for record in own if record.status in FINISHED]
            below = [x for x in fitted if failed and x < min(failed)]
            if below and max(below) > 0:
                x = math.sqrt(max(below) * min(failed))
                canvas.axes.axvline(x, color=SERIES[at], linewidth=1.1, linestyle=(0, (2, 2)), zorder=1)

    def _x_axis(self, canvas: Canvas) -> None:
        """Ticks at the values that were tried; logarithmic to base 2 for batch sizes."""
        positions = list(self.places.values())
        spread = self.x in _BATCH_KEYS or positions[-1] >= 8 * positions[0]
        log = self.is_numeric and positions[0] > 0 and spread
        if log:
            canvas.axes.set_xscale("log", base=2)
        scale = math.log2 if log else float
        first, width = scale(positions[0]), scale(positions[-1]) - scale(positions[0])
        margin = 0.06 * width or (0.5 if log else abs(first) / 2 or 0.5)
        limits = (first - margin, first + width + margin)
        canvas.axes.set_xlim(*(2**limit for limit in limits) if log else limits)
        ticks: list[tuple[float, str]] = []
        for position, value in zip(positions, self.values, strict=True):
            if not ticks or scale(position) - scale(ticks[-1][0]) >= width / 9:
                ticks.append((position, _cut(shown(value))))
        canvas.axes.set_xticks([position for position, _ in ticks], [text for _, text in ticks])
        if sum(len(text) + 2 for _, text in ticks) > _TICK_CHARS:
            canvas.axes.tick_params("x", labelrotation=25)
            for label in canvas.axes.get_xticklabels():
                label.set_horizontalalignment("right")
        canvas.axes.minorticks_off()
        canvas.axes.set_xlabel(self.labels[self.x])

    def series_legend(self, canvas: Canvas, present: list[TrialRecord]) -> None:
        """The names of the series that these trials belong to."""
        for at in sorted({self._series_of(record) for record in present}):
            canvas.axes.plot([], [], color=SERIES[at], linewidth=2.5, label=self.names[at])
        canvas.legend()

    def _series_name(self, value: Any) -> str:
        assert self.by is not None
        return _cut(shown(value) if self.by == "precision" else f"{self.labels[self.by]} {shown(value)}")

    def _each(self) -> str:
        return f", for each {self.labels[self.by]}" if self.by else ""

    def _series_of(self, record: TrialRecord) -> int:
        return self.series_at(record.config)

    def series_at(self, trial: Mapping[str, Any]) -> int:
        """Which series a configuration belongs to; -1: one that no trial has."""
        return self.series.get(repr(trial.get(self.by)), -1) if self.by else 0

    def color(self, record: TrialRecord) -> str:
        """Of a trial's series."""
        return SERIES[self._series_of(record)]

    def _position(self, record: TrialRecord) -> float:
        return self.places[repr(record.config.get(self.x))]

    def _tried(self, key: str) -> list[Any]:
        """The values of a key that were tried: rising where they are numbers, else in the order of the space's list."""
        # By their text: a NaN does not equal itself, True equals 1, and lists and mappings have no hash.
        tried = list({repr(record.config.get(key)): record.config.get(key) for record in self.records}.values())
        if all(map(is_number, tried)):
            return sorted(tried)
        space = self.config.space.get(key)
        listed = {repr(value): at for at, value in enumerate(space)} if isinstance(space, list) else {}
        return sorted(tried, key=lambda value: (listed.get(repr(value), math.inf), str(value)))

    def is_best(self, record: TrialRecord) -> bool:
        """Whether the trial is the sweep's best."""
        return self.best is not None and record.id == self.best.id

    def tip(self, record: TrialRecord, text: str) -> str:
        """What is shown when the mouse is over a trial's mark."""
        return f"{self.words[record.id]}: {text}"


def _cut(text: str) -> str:
    return text if len(text) <= 26 else text[:23] + "..."


def _points(record: TrialRecord, metric: str) -> Points:
    rows = [(row.get("train_time_s"), row.get(metric)) for row in record.curve]
    return [(x, y) for x, y in rows if is_number(x) and is_number(y)]


def _closer(lines: list[Points], target: float | None) -> tuple[float, float]:
    """Limits of a metric's axis without the fifth of the values that is worst, where all runs are alike."""
    values = sorted(y for points in lines for _, y in points)
    fifth = len(values) // 5
    rises = sum(points[-1][1] - points[0][1] for points in lines) > 0
    kept = values[fifth:] if rises else values[: len(values) - fifth]
    if target is not None:  # and a way to go up to it: where it is crossed is what counts
        beyond = (max if rises else min)(kept) - target
        kept += [target, target - 0.35 * beyond]
    margin = 0.05 * (max(kept) - min(kept)) or 0.05 * abs(kept[0]) or 1.0
    return min(kept) - margin, max(kept) + margin
