"""Figures of the search: what search frontier expects, and the course of a population's weights."""

import math
from typing import Any

from tune.config import may_change
from tune.report.canvas import FG, MUTED, SERIES, Canvas, Figure
from tune.report.figure_data import FigureData
from tune.report.words import is_number, time_unit
from tune.search.frontier_grid import Frontier
from tune.trials.journal import trial_id


def beliefs(data: FigureData, frontier: Frontier) -> Figure | None:
    """Draw what search frontier expects of every batch size, with its interval; what was observed as marks."""
    reached = [(one, time_s) for one in data.finished if is_number(time_s := one.time_to_target_s)]
    if not reached:
        return None
    expected = frontier.predictions(data.records)
    longest_s = max(time_s for _, time_s in reached)
    unit_s, seconds = time_unit(longest_s)
    all_sizes = sorted({place.size for place in frontier.places})
    ticks = all_sizes[:: math.ceil(len(all_sizes) / 8)]
    size_of = {trial_id(trial): place.size for place, trial in frontier.trials.items()}
    panels: list[Figure] = []
    for title, part in data.parts():
        own = [(place, trial) for place, trial in frontier.trials.items() if part.has(trial)]
        canvas = Canvas(f"beliefs{len(panels) or ''}", title=title)
        for at, name in enumerate(data.names):
            rows = []
            for place, trial in own:
                if data.series(trial) == at:
                    interval = expected[trial_id(trial)]
                    heights = (min(y, 10 * longest_s) / unit_s for y in (interval.low, interval.value, interval.high))
                    rows.append((place.size, *heights))
            if rows:
                sizes, low, middle, high = zip(*sorted(rows), strict=True)
                canvas.axes.fill_between(sizes, low, high, color=SERIES[at], alpha=0.15, linewidth=0)
                canvas.axes.plot(sizes, middle, color=SERIES[at], linewidth=1.6, label=name)
        for record, reached_s in reached:
            size = size_of.get(trial_id(record.config))
            if size is not None and part.has(record.config):
                look: dict[str, Any] = {"marker": "o" if record.purpose != "repeat" else "D", "linestyle": "none"}
                look["markersize"] = 7.5 if data.is_best(record) else 4.5
                text = data.tip(record, f"{reached_s / unit_s:.3g} {seconds}")
                canvas.mark(size, reached_s / unit_s, text, data.color(record), zorder=3, **look)
        canvas.axes.set_xscale("log", base=2)
        canvas.axes.set_xticks(ticks, [str(size) for size in ticks])
        canvas.axes.minorticks_off()
        canvas.axes.axhline(0, color=FG, linewidth=0)
        limits = (0, 1.6 * longest_s / unit_s)
        canvas.axes.set(ylim=limits, xlabel="global batch size", ylabel=f"time to target, {seconds}")
        canvas.legend()
        panels.append(canvas.figure(title or "Expected time to target", ""))
    caption = (
        "Lines and bands are what the search expects of every batch size, and its 95 % interval; circles are trials, "
        "diamonds repeats. Where a band leaves the axis the target may never be reached."
    )
    return Figure.of_panels("Expected time to target", caption, panels)


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
