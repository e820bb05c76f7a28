"""Draw the report's figures: objective, throughput, memory and learning curves."""

import itertools
import math
from dataclasses import dataclass
from statistics import median
from typing import Any

from tune.config import SweepConfig
from tune.objective import TO_TARGET
from tune.report.canvas import BAD, FG, Canvas, Figure, styled
from tune.report.figure_data import Axis, FigureData, cut
from tune.report.words import (
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
from tune.trials.record import TrialRecord, value_of

_ROW = 0.09  # of the height of the axes: a row of a series' trials out of memory
_TICK_CHARS = 56  # as many as fit side by side below the axes

Points = list[
    tuple[float, float]
]  # a trial's evaluations: training time, s, and a metric


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
    if metric in TO_TARGET and len(marks) < len(trials):
        notes.append(
            f"{len(trials) - len(marks)} of {len(trials)} did not reach the target."
        )
    if any(mark.is_repeated for mark in marks):
        notes.append("Thick lines are 95 % intervals of the finalists' repeats.")
    title = label = printable(metric)
    size = 1.0
    if metric == "time_to_target":
        title = "Time to target"
        size, unit = time_unit(max(mark.value for mark in marks))
        label = f"time to target, {unit}"
    panels: list[Figure] = []
    for axis in [data.x, *(axis for axis in data.varied if axis != data.x)]:
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
            ends = time_s.low, time_s.high
            text = f"{duration(time_s.value)}, 95 % interval {duration(ends[0])} to {duration(ends[1])}"
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
        canvas.mark(
            data.x.position(record),
            0.96 - _ROW * data.series(record),
            data.tip(record, "out of memory"),
            data.color(record),
            transform=canvas.axes.get_xaxis_transform(),
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
    size, unit = time_unit(max(max(points)[0] for _, points in lines))
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
        is_best = data.is_best(record)
        end_x, end_y = points[-1]
        canvas.axes.plot(
            [x / size for x, _ in points],
            [y for _, y in points],
            color=data.color(record),
            linewidth=2.8 if is_best else 1.1,
            alpha=1 if is_best else 0.75,
            marker="." if len(points) == 1 else None,
            zorder=3 if is_best else 2,
            gid=canvas.tip(data.tip(record, f"ends at {end_y:.4g}")),
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
    found: dict[str, dict[float, list[float]]] = {}
    for mark in sorted(marks, key=lambda mark: data.is_best(mark.record)):
        x = axis.position(mark.record)
        y = mark.value / size
        color = data.color(mark.record)
        found.setdefault(color, {}).setdefault(x, []).append(y)
        before = len(canvas.axes.lines)
        if mark.between is not None:
            ends = [end / size for end in mark.between]
            width = 2.4 if mark.is_repeated else 1
            canvas.axes.plot([x, x], ends, color=color, linewidth=width, alpha=0.7)
        look: dict[str, Any] = {"linestyle": "none", "clip_on": False, "zorder": 3}
        look["markersize"] = 8.5 if data.is_best(mark.record) else 5
        text = data.tip(mark.record, mark.text)
        canvas.mark(x, y, text, color, marker="o", **look)
        if axis != data.by and not is_joined:
            middle = (len(data.names) - 1) / 2
            canvas.move(canvas.axes.lines[before:], data.series(mark.record) - middle)
    if is_joined and data.config.search == "grid":
        for color, values in found.items():
            xs = sorted(values)
            medians = [median(values[x]) for x in xs]
            canvas.axes.plot(xs, medians, color=color, linewidth=1.6)
    _set_axis(axis, canvas)
    canvas.axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def _points(record: TrialRecord, metric: str) -> Points:
    rows = [(row.get("train_time_s"), row.get(metric)) for row in record.curve]
    return [(x, y) for x, y in rows if is_number(x) and is_number(y)]


def _closer(lines: list[list[float]], goal: float | None) -> tuple[float, float]:
    """Return limits of a metric's axis without the worst fifth, where runs are alike."""
    values = sorted(itertools.chain.from_iterable(lines))
    fifth = len(values) // 5
    rises = sum(own[-1] - own[0] for own in lines) > 0
    kept = values[fifth:] if rises else values[: len(values) - fifth]
    if goal is not None:  # and a way to go up to it: where it is crossed is what counts
        beyond = (max if rises else min)(kept) - goal
        kept += [goal, goal - 0.35 * beyond]
    margin = 0.05 * (max(kept) - min(kept)) or 0.05 * abs(kept[0]) or 1.0
    return min(kept) - margin, max(kept) + margin


def _set_axis(axis: Axis, canvas: Canvas) -> None:
    """Set ticks of the x axis at the values that were tried; base 2 for batch sizes."""
    positions = axis.positions
    log = axis.is_log
    if log:
        canvas.axes.set_xscale("log", base=2)
    scale = math.log2 if log else float
    first = scale(positions[0])
    width = scale(positions[-1]) - scale(positions[0])
    margin = 0.06 * width or (0.5 if log else abs(first) / 2 or 0.5)
    limits = (first - margin, first + width + margin)
    canvas.axes.set_xlim(*(2**limit for limit in limits) if log else limits)
    ticks: list[tuple[float, str]] = []
    for position, value in zip(positions, axis.values, strict=True):
        if not ticks or scale(position) - scale(ticks[-1][0]) >= width / 9:
            ticks.append((position, cut(shown(value))))
    canvas.axes.set_xticks(
        [position for position, _ in ticks], [text for _, text in ticks]
    )
    if sum(len(text) + 2 for _, text in ticks) > _TICK_CHARS:
        canvas.axes.tick_params("x", labelrotation=25)
        for label in canvas.axes.get_xticklabels():
            label.set_horizontalalignment("right")
    canvas.axes.minorticks_off()
    canvas.axes.set_xlabel(axis.label)
