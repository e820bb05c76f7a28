"""The report's figures: of trials (throughput, memory, curves, time to target), and of the search that made them."""

import math
from collections.abc import Collection, Mapping
from statistics import median
from typing import Any

from tune.config import SweepConfig, may_change
from tune.report.canvas import BAD, FG, MUTED, SERIES, Canvas, Figure, styled
from tune.report.figure_data import SIZE_KEYS, FigureData, cut
from tune.report.words import is_number, memory_unit, printable, shown, time_unit
from tune.search.finalists import finals
from tune.search.frontier_grid import Frontier
from tune.trials.journal import trial_id
from tune.trials.record import TrialRecord

_MARKERS = "os^Dv*"
_MAX_BARS = 24
_TICK_CHARS = 56  # as many as fit side by side below the axes
_LEAST = 3  # fewer trials are no front
_ROW = 0.09  # of the height of the axes: one row of trials that ran out of memory

Points = list[tuple[float, float]]  # a trial's evaluations: training time, s, and a metric


def figures(
    config: SweepConfig, records: list[TrialRecord], best: TrialRecord | None, train: Mapping[str, Any] | None = None
) -> list[Figure]:
    """Draw the figures that the records have data for; search frontier needs `train`, the TrainConfig mapping."""
    data = FigureData(config, records, best)
    with styled():
        believed = beliefs(data, train) if config.search == "frontier" and train is not None else None
        drawn = [throughput(data), memory(data), curves(data), targets(data), believed, pareto(data), course(data)]
    return [figure for figure in drawn if figure]


def throughput(data: FigureData) -> Figure | None:
    """Draw samples/s against the batch size."""
    rates = [(record, record.samples_per_s) for record in data.finished]
    marks = [(record, rate, f"{rate:,.0f} samples/s") for record, rate in rates if rate and is_number(rate)]
    if not marks:
        return None
    canvas = Canvas("throughput")
    _against_x(data, canvas, marks)
    canvas.axes.set(ylim=(0, None), ylabel="samples/s")
    canvas.legend()
    best = " The largest mark is the best trial." if data.best else ""
    boundary = " Beyond a dotted line memory runs out." if data.out_of_memory else ""
    return canvas.figure("Throughput", f"After warm-up, evaluation left out{data.each()}.{best}{boundary}")


def memory(data: FigureData) -> Figure | None:
    """Draw peak memory against the batch size, and trials that ran out of it in a strip on top."""
    failed = data.out_of_memory
    peaks = [(record, record.peak_memory_bytes) for record in data.finished if record.peak_memory_bytes]
    if not peaks and not failed:
        return None
    canvas = Canvas("memory")
    most = max((peak for _, peak in peaks), default=0)
    size, unit = memory_unit(most)
    rows = sorted({data.series(record.config) for record in failed})
    _against_x(data, canvas, [(r, peak / size, f"{peak / size:.4g} {unit}") for r, peak in peaks], rows)
    top = canvas.axes.get_xaxis_transform()
    cross: dict[str, Any] = {"marker": "X", "markersize": 8}
    for record in failed:
        height = 0.96 - _ROW * rows.index(data.series(record.config))
        text = data.tip(record, "out of memory")
        canvas.mark(data.position(record), height, text, data.color(record), transform=top, **cross)
    if failed:
        canvas.axes.plot([], [], FG, linestyle="none", label="out of memory", **cross)
    canvas.axes.set(ylim=(0, most / size * 1.08 / (0.96 - _ROW * len(rows)) or 1), ylabel=f"peak memory, {unit}")
    canvas.axes.yaxis.set_visible(bool(peaks))
    canvas.legend()
    crosses = " Trials that ran out of memory are on top, beyond the dotted line of their colour." if failed else ""
    return canvas.figure("Peak memory", f"Largest over the workers{data.each()}.{crosses}")


def curves(data: FigureData) -> Figure | None:
    """Draw the evaluated metric against training time, a line a trial."""
    objective = data.config.objective
    seen = list(dict.fromkeys(name for record in data.records for row in record.curve for name in row))
    wanted = [*(objective.target or {}), objective.metric, *(name for name in seen if name.startswith("val_"))]
    metric = next((name for name in wanted if name in seen), "")
    lines = [(record, points) for record in data.records if (points := _points(record, metric))]
    if not lines:
        return None
    canvas = Canvas("curves")
    size, unit = time_unit(max(x for _, points in lines for x, _ in points))
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
    goal = (objective.target or {}).get(metric)
    goal = goal if is_number(goal) else None
    low, high = _closer([points for _, points in lines], goal)
    is_cut = any(not low <= y <= high for _, points in lines for _, y in points)
    canvas.axes.set(xlim=(0, None), ylim=(low, high), xlabel=f"training time, {unit}", ylabel=printable(metric))
    if goal is not None:
        canvas.axes.axhline(goal, color=FG, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    canvas.legend(data.legend(record for record, _ in lines))
    notes = [
        f"{printable(metric)} at each evaluation, a line a trial.",
        f"The thick line is the best ({data.words[data.best.id]})." if data.best else "",
        "The dashed line is the target." if goal is not None else "",
        "The worst evaluations are off the axis." if is_cut else "",
        "A cross is where a trial failed." if not all(record.finished for record, _ in lines) else "",
    ]
    return canvas.figure("Learning curves", " ".join(note for note in notes if note))


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
            text, color = f"{length:.3g} {unit}", FG
            (bar,) = canvas.axes.barh(row, length, height=0.68, color=data.color(record))
            bar.set_gid(canvas.tip(data.tip(record, text)))
        weight = "bold" if data.is_best(record) else "normal"
        look: dict[str, Any] = {"va": "center", "color": color, "fontsize": 8, "fontweight": weight}
        canvas.axes.annotate(text, (length, row), (4, 0), textcoords="offset points", **look)
    canvas.axes.set_yticks(range(len(rows)), [cut(data.words[record.id]) for record in rows])
    canvas.axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel=f"training time, {unit}", axisbelow=True, xmargin=0.16)
    canvas.axes.grid(visible=False, axis="y")
    canvas.axes.grid(visible=True, axis="x")
    canvas.legend(data.legend(record for record in rows if record.id in times))
    ((metric, value),) = data.config.objective.target.items()
    of_all = f" The first {len(rows)} of {len(trials)} trials." if trials[len(rows) :] else ""
    return canvas.figure("Time to target", f"Training time until {printable(metric)} first reached {value:g}.{of_all}")


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
        canvas.mark(x, y, text, data.color(record), marker="o", markersize=size, zorder=3, linestyle="none")
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


def beliefs(data: FigureData, train: Mapping[str, Any]) -> Figure | None:
    """Draw what search frontier expects of every batch size, with its interval; what was observed as marks."""
    reached = [(one, time_s) for one in data.finished if is_number(time_s := one.time_to_target_s)]
    if not reached:
        return None
    frontier = Frontier(data.config, train)
    expected = frontier.predictions(data.records)
    canvas = Canvas("beliefs")
    longest_s = max(time_s for _, time_s in reached)
    unit_s, seconds = time_unit(longest_s)
    for at, name in enumerate(data.names):
        rows = []
        for place, trial in frontier.trials.items():
            if data.series(trial) == at:
                interval = expected[trial_id(trial)]
                heights = (min(y, 10 * longest_s) / unit_s for y in (interval.low, interval.value, interval.high))
                rows.append((place.size, *heights))
        if rows:
            sizes, low, middle, high = zip(*sorted(rows), strict=True)
            canvas.axes.fill_between(sizes, low, high, color=SERIES[at], alpha=0.15, linewidth=0)
            canvas.axes.plot(sizes, middle, color=SERIES[at], linewidth=1.6, label=name)
    size_of = {trial_id(trial): place.size for place, trial in frontier.trials.items()}
    for record, reached_s in reached:
        size = size_of.get(trial_id(record.config))
        if size is not None:
            look: dict[str, Any] = {"marker": "o" if record.purpose != "repeat" else "D", "linestyle": "none"}
            look["markersize"] = 7.5 if data.is_best(record) else 4.5
            text = data.tip(record, f"{reached_s / unit_s:.3g} {seconds}")
            canvas.mark(size, reached_s / unit_s, text, data.color(record), zorder=3, **look)
    canvas.axes.set_xscale("log", base=2)
    all_sizes = sorted({place.size for place in frontier.places})
    ticks = all_sizes[:: math.ceil(len(all_sizes) / 8)]
    canvas.axes.set_xticks(ticks, [str(size) for size in ticks])
    canvas.axes.minorticks_off()
    canvas.axes.axhline(0, color=FG, linewidth=0)
    limits = (0, 1.6 * longest_s / unit_s)
    canvas.axes.set(ylim=limits, xlabel="global batch size", ylabel=f"time to target, {seconds}")
    canvas.legend()
    caption = (
        "Lines and bands are what the search expects of every batch size, and its 95 % interval; circles are trials, "
        "diamonds repeats. Where a band leaves the axis the target may never be reached."
    )
    return canvas.figure("Expected time to target", caption)


def course(data: FigureData) -> Figure | None:
    """Draw the value that the weights of each of a population's trials were trained with, against the epoch."""
    tried = {
        key: [part["config"].get(key) for record in data.records for part in record.schedule]
        for key in data.config.space
        if may_change(key)
    }
    key = next((key for key, values in tried.items() if all(map(is_number, values)) and len(set(values)) > 1), None)
    if key is None:
        return None
    canvas = Canvas("course")
    for record in sorted(data.records, key=data.is_best):
        if not record.schedule or "epoch" not in (record.curve or [{}])[-1]:
            continue
        ends = [*(part["epoch"] for part in record.schedule[1:]), record.curve[-1]["epoch"]]
        values = [part["config"][key] for part in record.schedule]
        best = data.is_best(record)
        canvas.axes.step(
            [record.schedule[0]["epoch"], *ends],
            [*values, values[-1]],
            where="post",
            color=SERIES[0] if best else MUTED,
            linewidth=2.8 if best else 1.1,
            alpha=1 if best else 0.6,
            gid=canvas.tip(data.tip(record, f"{record.status}, from trial {record.exploited_from or 'none'}")),
        )
    if min(tried[key]) > 0 and max(tried[key]) > 8 * min(tried[key]):
        canvas.axes.set_yscale("log")
    canvas.axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    canvas.axes.minorticks_off()
    canvas.axes.set(xlim=(0, None), xlabel="epoch", ylabel=data.labels[key])
    thick = " The thick line is the best." if data.best else ""
    caption = f"What the weights of each trial were trained with; where lines part, one went on from another.{thick}"
    return canvas.figure(f"Course of {data.labels[key]}", caption)


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
        canvas.axes.plot(xs, [median(found[x]) for x in xs], color=SERIES[at], label=name, **look)
        for record, y, text in own:
            size = 8.5 if data.is_best(record) else 5.5
            look = {"marker": _MARKERS[at], "markersize": size, "clip_on": False, "zorder": 3}
            canvas.mark(data.position(record), y, data.tip(record, text), SERIES[at], **look)
    _x_axis(data, canvas)
    for at in range(len(data.names) if data.is_numeric else 0):
        failed = [data.position(record) for record in data.out_of_memory if data.series(record.config) == at]
        fitted = [data.position(record) for record in data.finished if data.series(record.config) == at]
        below = [x for x in fitted if failed and x < min(failed)]
        if below and max(below) > 0:
            x = math.sqrt(max(below) * min(failed))
            canvas.axes.axvline(x, color=SERIES[at], linewidth=1.1, linestyle=(0, (2, 2)), zorder=1)


def _x_axis(data: FigureData, canvas: Canvas) -> None:
    """Set ticks at the values that were tried; logarithmic to base 2 for batch sizes."""
    positions = list(data.places.values())
    spread = data.x in SIZE_KEYS or positions[-1] >= 8 * positions[0]
    log = data.is_numeric and positions[0] > 0 and spread
    if log:
        canvas.axes.set_xscale("log", base=2)
    scale = math.log2 if log else float
    first, width = scale(positions[0]), scale(positions[-1]) - scale(positions[0])
    margin = 0.06 * width or (0.5 if log else abs(first) / 2 or 0.5)
    limits = (first - margin, first + width + margin)
    canvas.axes.set_xlim(*(2**limit for limit in limits) if log else limits)
    ticks: list[tuple[float, str]] = []
    for position, value in zip(positions, data.values, strict=True):
        if not ticks or scale(position) - scale(ticks[-1][0]) >= width / 9:
            ticks.append((position, cut(shown(value))))
    canvas.axes.set_xticks([position for position, _ in ticks], [text for _, text in ticks])
    if sum(len(text) + 2 for _, text in ticks) > _TICK_CHARS:
        canvas.axes.tick_params("x", labelrotation=25)
        for label in canvas.axes.get_xticklabels():
            label.set_horizontalalignment("right")
    canvas.axes.minorticks_off()
    canvas.axes.set_xlabel(data.labels[data.x])


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
