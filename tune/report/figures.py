"""The report's figures: of trials (throughput, memory, curves, time to target), with those of keys and time."""

import math
import textwrap
from collections.abc import Collection
from statistics import median
from typing import Any

from tune.config import SweepConfig
from tune.report.canvas import BAD, FG, MUTED, SERIES, Canvas, Figure, styled
from tune.report.figure_data import FigureData
from tune.report.key_figures import every_key, set_axis
from tune.report.time_figure import timeline
from tune.report.words import is_number, memory_unit, printable, span, time_unit
from tune.search.finalists import finals
from tune.trials.record import TrialRecord

_MARKERS = "os^Dv*"
_MAX_BARS = 24
_BAR_CHARS = 28  # of a line beside a bar
_LEAST = 3  # fewer trials are no front
_ROW = 0.09  # of the height of the axes: one row of trials that ran out of memory

Points = list[tuple[float, float]]  # a trial's evaluations: training time, s, and a metric


def figures(config: SweepConfig, records: list[TrialRecord], best: TrialRecord | None) -> list[Figure]:
    """Draw the figures that the records have data for."""
    data = FigureData(config, records, best)
    with styled():
        drawn = [throughput(data), memory(data), curves(data), targets(data), pareto(data)]
        drawn += [every_key(data), timeline(data)]
    return [figure for figure in drawn if figure]


def throughput(data: FigureData) -> Figure | None:
    """Draw samples/s against the batch size."""
    rates = {one.id: rate for one in data.finished if (rate := one.samples_per_s) and is_number(rate)}
    if not rates:
        return None
    best = " The largest mark is the best trial." if data.best else ""
    boundary = " Beyond a dotted line memory runs out." if data.out_of_memory else ""
    panels: list[Figure] = []
    for title, part in data.parts():
        marks = [(one, rates[one.id], f"{rates[one.id]:,.0f} samples/s") for one in part.finished if one.id in rates]
        canvas = Canvas(f"throughput{len(panels) or ''}", title=title)
        _against_x(part, canvas, marks)
        top = 1.05 * max(rates.values()) if data.facet else None
        canvas.axes.set(ylim=(0, top), ylabel="samples/s")
        canvas.legend(data.legend([]) if data.scale else ())
        panels.append(canvas.figure(title or "Throughput", ""))
    caption = f"After warm-up, evaluation left out{data.each()}.{best}{boundary}"
    return Figure.of_panels("Throughput", caption, panels)


def memory(data: FigureData) -> Figure | None:
    """Draw peak memory against the batch size, and trials that ran out of it in a strip on top."""
    peaks = {one.id: one.peak_memory_bytes for one in data.finished if one.peak_memory_bytes}
    if not peaks and not data.out_of_memory:
        return None
    most = max(peaks.values(), default=0)
    size, unit = memory_unit(most)
    rows = sorted({data.series(record.config) for record in data.out_of_memory})
    panels: list[Figure] = []
    for title, part in data.parts():
        found = [
            (one, peak / size, f"{peak / size:.4g} {unit}") for one in part.finished if (peak := peaks.get(one.id))
        ]
        canvas = Canvas(f"memory{len(panels) or ''}", title=title)
        _against_x(part, canvas, found, {data.series(record.config) for record in part.out_of_memory})
        top = canvas.axes.get_xaxis_transform()
        cross: dict[str, Any] = {"marker": "X", "markersize": 8}
        for record in part.out_of_memory:
            height = 0.96 - _ROW * rows.index(data.series(record.config))
            text = data.tip(record, "out of memory")
            canvas.mark(data.position(record), height, text, data.color(record), transform=top, **cross)
        if part.out_of_memory:
            canvas.axes.plot([], [], FG, linestyle="none", label="out of memory", **cross)
        canvas.axes.set(ylim=(0, most / size * 1.08 / (0.96 - _ROW * len(rows)) or 1), ylabel=f"peak memory, {unit}")
        canvas.axes.yaxis.set_visible(bool(peaks))
        canvas.legend(data.legend([]) if data.scale else ())
        panels.append(canvas.figure(title or "Peak memory", ""))
    on_top = " Trials that ran out of memory are on top, beyond the dotted line of their colour."
    caption = f"Largest over the workers{data.each()}.{on_top if data.out_of_memory else ''}"
    return Figure.of_panels("Peak memory", caption, panels)


def curves(data: FigureData) -> Figure | None:
    """Draw the evaluated metric against training time, a line a trial."""
    objective = data.config.objective
    seen = list(dict.fromkeys(name for record in data.records for row in record.curve for name in row))
    wanted = [*(objective.target or {}), objective.metric, *(name for name in seen if name.startswith("val_"))]
    metric = next((name for name in wanted if name in seen), "")
    lines = [(record, points) for record in data.records if (points := _points(record, metric))]
    if not lines:
        return None
    size, unit = time_unit(max(x for _, points in lines for x, _ in points))
    goal = (objective.target or {}).get(metric)
    goal = goal if is_number(goal) else None
    low, high = _closer([points for _, points in lines], goal)
    longest = 1.05 * max(x for _, points in lines for x, _ in points) / size if data.facet else None
    panels: list[Figure] = []
    for title, part in data.parts():
        own = [(record, points) for record, points in lines if part.has(record.config)]
        canvas = Canvas(f"curves{len(panels) or ''}", title=title)
        _lines(part, canvas, own, size)
        canvas.axes.set(xlim=(0, longest), ylim=(low, high), xlabel=f"training time, {unit}", ylabel=printable(metric))
        if goal is not None:
            canvas.axes.axhline(goal, color=FG, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        canvas.legend(data.legend(record for record, _ in own))
        panels.append(canvas.figure(title or "Learning curves", ""))
    is_cut = any(not low <= y <= high for _, points in lines for _, y in points)
    notes = [
        f"{printable(metric)} at each evaluation, a line a trial.",
        f"The thick line is the best ({data.words[data.best.id]})." if data.best else "",
        "The dashed line is the target." if goal is not None else "",
        "The worst evaluations are off the axis." if is_cut else "",
        "A cross is where a trial failed." if not all(record.finished for record, _ in lines) else "",
    ]
    return Figure.of_panels("Learning curves", " ".join(note for note in notes if note), panels)


def _lines(data: FigureData, canvas: Canvas, lines: list[tuple[TrialRecord, Points]], size: float) -> None:
    """Draw a line a trial, the best thick and on top; `size` is a unit of time, s."""
    for record, points in sorted(lines, key=lambda line: data.is_best(line[0])):
        best, (end_x, end_y) = data.is_best(record), points[-1]
        canvas.axes.plot(
            [x / size for x, _ in points],
            [y for _, y in points],
            color=data.color(record),
            linewidth=2.8 if best else 1.1,
            alpha=1 if best else 0.75,
            marker="." if len(points) == 1 else None,
            zorder=3 if best else 2,
            gid=canvas.tip(data.tip(record, f"ends at {end_y:.4g}")),
        )
        if not record.finished:
            text = data.tip(record, record.status)
            canvas.mark(end_x / size, end_y, text, BAD, marker="X", markersize=7, zorder=4)


def targets(data: FigureData) -> Figure | None:
    """Draw the training time until the target, a bar a trial, the best first; none for repeats and short trials."""
    trials = [record for record in data.records if record.purpose == "trial"]
    times = {one.id: time_s for one in trials if one.finished and is_number(time_s := one.time_to_target_s)}
    if not times or not data.config.objective.target:
        return None
    rows = sorted(trials, key=lambda record: times.get(record.id, math.inf))[:_MAX_BARS]
    canvas = Canvas("targets", 0.7 + 0.21 * max(len(rows), 4))
    size, unit = time_unit(max(times[record.id] for record in rows if record.id in times))
    for row, record in enumerate(rows):
        length, color = times.get(record.id, 0.0) / size, MUTED
        text: str = "not reached" if record.finished else record.status
        if record.id in times:
            before = record.missed_target_s
            sure = length if before is None else min(before / size, length)
            text, color = f"{length:.3g} {unit}", FG
            tip = canvas.tip(data.tip(record, text if before is None else span(before, times[record.id])))
            # Over the whole length, so that a bar without a part that is sure has its tip.
            (bar,) = canvas.axes.barh(row, length, height=0.68, color=data.color(record), alpha=0.4)
            bar.set_gid(tip)
            canvas.axes.barh(row, sure, height=0.68, color=data.color(record))
        weight = "bold" if data.is_best(record) else "normal"
        look: dict[str, Any] = {"va": "center", "color": color, "fontsize": 8, "fontweight": weight}
        canvas.axes.annotate(text, (length, row), (4, 0), textcoords="offset points", **look)
    names = ["\n".join(textwrap.wrap(data.words[record.id], _BAR_CHARS, max_lines=2)) for record in rows]
    canvas.axes.set_yticks(range(len(rows)), names, fontsize=6.5 if any("\n" in name for name in names) else 9)
    canvas.axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel=f"training time, {unit}", axisbelow=True, xmargin=0.16)
    canvas.axes.grid(visible=False, axis="y")
    canvas.axes.grid(visible=True, axis="x")
    canvas.legend(data.legend(record for record in rows if record.id in times))
    ((metric, value),) = data.config.objective.target.items()
    of_all = f" The first {len(rows)} of {len(trials)} trials." if trials[len(rows) :] else ""
    between = " It was met in the pale part of a bar, between two evaluations." * any(
        record.missed_target_s is not None for record in rows
    )
    caption = f"Training time until {printable(metric)} first reached {value:g}.{between}{of_all}"
    return canvas.figure("Time to target", caption)


def pareto(data: FigureData) -> Figure | None:
    """Draw time to target against peak memory: of a trial on the line, none is better at both."""
    repeated = {final.record.id: final.time_s for final in finals(data.config, data.records)}
    rows: list[tuple[float, float, TrialRecord]] = []
    for record in data.finished:
        time_s = repeated[record.id].value if record.id in repeated else record.time_to_target_s
        if record.purpose != "repeat" and is_number(time_s) and time_s and record.peak_memory_bytes:
            rows.append((float(record.peak_memory_bytes), time_s, record))
    if len(rows) < _LEAST or not data.config.objective.target:
        return None
    canvas = Canvas("pareto")
    unit_bytes, memory = memory_unit(max(peak for peak, _, _ in rows))
    unit_s, seconds = time_unit(max(time_s for _, time_s, _ in rows))
    front: list[tuple[float, float]] = []
    for peak, time_s, _ in sorted(rows, key=lambda row: row[:2]):
        if not front or time_s < front[-1][1]:
            front.append((peak, time_s))
    steps = [(peak / unit_bytes, time_s / unit_s) for peak, time_s in front]
    canvas.axes.step(*zip(*steps, strict=True), where="post", color=MUTED, linewidth=1.2, zorder=1)
    for peak, time_s, record in rows:
        x, y = peak / unit_bytes, time_s / unit_s
        if record.id in repeated:
            span = [repeated[record.id].low / unit_s, repeated[record.id].high / unit_s]
            canvas.axes.plot([x, x], span, color=data.color(record), linewidth=1.4, zorder=2)
        size = 8.5 if data.is_best(record) else 5.5
        text = data.tip(record, f"{y:.3g} {seconds}, {x:.3g} {memory}")
        marker = _MARKERS[data.facet.index(record.config)] if data.facet else "o"
        canvas.mark(x, y, text, data.color(record), marker=marker, markersize=size, zorder=3, linestyle="none")
    for marker, value in zip(_MARKERS, data.facet.values if data.facet else [], strict=False):
        canvas.axes.plot([], [], MUTED, linestyle="none", marker=marker, label=data.facet and data.facet.name(value))
    labels = {"xlabel": f"peak memory, {memory}", "ylabel": f"time to target, {seconds}"}
    canvas.axes.set(ylim=(0, None), xmargin=0.08, **labels)
    times = [(one.metrics.get("usd_to_target"), one.time_to_target_s) for one in data.records]
    rates = [usd / time_s for usd, time_s in times if usd is not None and is_number(time_s) and time_s > 0]
    if rates:
        usd = rates[0] * unit_s
        functions: Any = (lambda y: y * usd, lambda y: y / usd)
        right = canvas.axes.secondary_yaxis("right", functions=functions)
        right.set_ylabel("USD to target", color=MUTED)
    canvas.legend(data.legend(record for _, _, record in rows))
    lines = " Vertical lines are 95 % intervals of the finalists' repeats." if repeated else ""
    caption = f"A trial on the stepped line is beaten by no other at both time and memory.{lines}"
    return canvas.figure("Time to target against memory", caption)


def _against_x(
    data: FigureData, canvas: Canvas, marks: list[tuple[TrialRecord, float, str]], also: Collection[int] = ()
) -> None:
    """Draw a mark a trial, and on a grid a line a series through the median of the trials at one x.

    The legend has the series with marks and those in `also`. A dotted line for each series lies between the largest
    value that fitted and the smallest that ran out of memory.
    """
    line = "-" if data.config.search == "grid" else "none"
    canvas.axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    for at, name in enumerate(data.names):
        own = [mark for mark in marks if data.series(mark[0].config) == at]
        if not own and at not in also:
            continue
        found: dict[float, list[float]] = {}
        for record, y, _ in own:
            found.setdefault(data.position(record), []).append(y)
        xs = sorted(found)
        look: dict[str, Any] = {"linestyle": line, "linewidth": 1.6, "marker": _MARKERS[at], "markevery": []}
        color = MUTED if data.scale else SERIES[at]
        canvas.axes.plot(xs, [median(found[x]) for x in xs], color=color, label=name, **look)
        for record, y, text in own:
            size = 8.5 if data.is_best(record) else 5.5
            look = {"marker": _MARKERS[at], "markersize": size, "clip_on": False, "zorder": 3}
            canvas.mark(data.position(record), y, data.tip(record, text), data.color(record), **look)
    set_axis(data.x, canvas)
    for at in range(len(data.names) if data.x.is_numeric else 0):
        failed = [data.position(record) for record in data.out_of_memory if data.series(record.config) == at]
        fitted = [data.position(record) for record in data.finished if data.series(record.config) == at]
        below = [x for x in fitted if failed and x < min(failed)]
        if below and max(below) > 0:
            x = math.sqrt(max(below) * min(failed))
            canvas.axes.axvline(x, color=SERIES[at], linewidth=1.1, linestyle=(0, (2, 2)), zorder=1)


def _points(record: TrialRecord, metric: str) -> Points:
    rows = [(row.get("train_time_s"), row.get(metric)) for row in record.curve]
    return [(x, y) for x, y in rows if is_number(x) and is_number(y)]


def _closer(lines: list[Points], goal: float | None) -> tuple[float, float]:
    """Return limits of a metric's axis without the fifth of the values that is worst, where all runs are alike."""
    values = sorted(y for points in lines for _, y in points)
    fifth = len(values) // 5
    rises = sum(points[-1][1] - points[0][1] for points in lines) > 0
    kept = values[fifth:] if rises else values[: len(values) - fifth]
    if goal is not None:  # and a way to go up to it: where it is crossed is what counts
        beyond = (max if rises else min)(kept) - goal
        kept += [goal, goal - 0.35 * beyond]
    margin = 0.05 * (max(kept) - min(kept)) or 0.05 * abs(kept[0]) or 1.0
    return min(kept) - margin, max(kept) + margin
