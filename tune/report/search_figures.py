"""Figures of the search: time to target against memory and dollars, what search frontier expects, and the course of a
population's values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tune.config import may_change
from tune.report.canvas import FG, MUTED, SERIES, Canvas, Figure
from tune.report.figure_data import FigureData
from tune.report.finals import finals
from tune.report.words import is_number, memory_unit, time_unit
from tune.search.frontier_grid import Frontier
from tune.trials.journal import trial_id
from tune.trials.record import TrialRecord

_LEAST = 3  # fewer trials are no front


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
    canvas.axes.set_ylim(bottom=0)
    canvas.axes.margins(x=0.08)
    canvas.axes.set(xlabel=f"peak memory, {memory}", ylabel=f"time to target, {seconds}")
    usd_per_s = _usd_per_s(data.records)
    if usd_per_s is not None:
        usd = usd_per_s * unit_s
        functions: Any = (lambda y: y * usd, lambda y: y / usd)
        right = canvas.axes.secondary_yaxis("right", functions=functions)
        right.set_ylabel("USD to target", color=MUTED)
    canvas.legend(data.legend(record for _, _, record in rows))
    lines = " Vertical lines are 95 % intervals of the finalists' repeats." if repeated else ""
    caption = f"A trial on the stepped line is beaten by no other at both time and memory.{lines}"
    return canvas.figure("Time to target against memory", caption)


def _usd_per_s(records: list[TrialRecord]) -> float | None:
    """Return the price of a lane, as the first trial with one shows it."""
    for record in records:
        usd, time_s = record.metrics.get("usd_to_target"), record.time_to_target_s
        if usd is not None and is_number(time_s) and time_s > 0:
            return usd / time_s
    return None


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
    canvas.axes.set_ylim(0, 1.6 * longest_s / unit_s)
    canvas.axes.set_xscale("log", base=2)
    all_sizes = sorted({place.size for place in frontier.places})
    ticks = all_sizes[:: math.ceil(len(all_sizes) / 8)]
    canvas.axes.set_xticks(ticks, [str(size) for size in ticks])
    canvas.axes.minorticks_off()
    canvas.axes.axhline(0, color=FG, linewidth=0)
    canvas.axes.set(xlabel="global batch size", ylabel=f"time to target, {seconds}")
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
        if not record.schedule or not record.curve:
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
    canvas.axes.set_xlim(left=0)
    canvas.axes.set(xlabel="epoch", ylabel=data.labels[key])
    thick = " The thick line is the best." if data.best else ""
    caption = f"What the weights of each trial were trained with; where lines part, one went on from another.{thick}"
    return canvas.figure(f"Course of {data.labels[key]}", caption)
