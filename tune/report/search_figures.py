"""More of the report's figures: time to target against memory and dollars, what search frontier believes, and the
course of a population's values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tune.config import may_change
from tune.report.answer import FINISHED, is_number
from tune.report.canvas import FG, MUTED, SERIES, Canvas, Figure
from tune.search.finalists import finals
from tune.trials.journal import trial_id
from tune.trials.record import TrialRecord

if TYPE_CHECKING:
    from tune.report.trial_figures import Plot

_LEAST = 3  # fewer trials are no front


def pareto(plot: Plot) -> Figure | None:
    """Time to target against peak memory: of a trial on the line, none is better at both."""
    repeated = {final.record.id: final.time_s for final in finals(plot.config, plot.records)}
    rows: list[tuple[float, float, TrialRecord]] = []
    for record in plot.records:
        time_s = repeated[record.id].value if record.id in repeated else record.time_to_target_s
        counts = record.status in FINISHED and record.purpose != "repeat" and is_number(time_s)
        if counts and time_s and record.peak_memory_bytes:
            rows.append((float(record.peak_memory_bytes), time_s, record))
    if len(rows) < _LEAST or not plot.config.objective.target:
        return None
    canvas = Canvas("pareto")
    unit_bytes, memory = (2**30, "GiB") if max(row[0] for row in rows) >= 2**30 else (2**20, "MiB")
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
            interval = repeated[record.id]
            span = [interval.low / unit_s, interval.high / unit_s]
            canvas.axes.plot([x, x], span, color=plot.color(record), linewidth=1.4, zorder=2)
        size = 8.5 if plot.is_best(record) else 5.5
        text = plot.tip(record, f"{y:.3g} {seconds}, {x:.3g} {memory}")
        canvas.mark(x, y, text, plot.color(record), marker="o", markersize=size, zorder=3, linestyle="none")
    canvas.axes.set_ylim(bottom=0)
    canvas.axes.margins(x=0.08)
    canvas.axes.set_xlabel(f"peak memory, {memory}")
    canvas.axes.set_ylabel(f"time to target, {seconds}")
    prices = [
        record.metrics["usd_to_target"] / time_s
        for record in plot.records
        if "usd_to_target" in record.metrics and is_number(time_s := record.time_to_target_s) and time_s > 0
    ]
    if prices:
        usd = prices[0] * unit_s
        functions: Any = (lambda y: y * usd, lambda y: y / usd)
        right = canvas.axes.secondary_yaxis("right", functions=functions)
        right.set_ylabel("USD to target", color=MUTED)
    plot.series_legend(canvas, [record for _, _, record in rows])
    lines = " Vertical lines are 95 % intervals of the finalists' repeats." if repeated else ""
    caption = f"A trial on the stepped line is beaten by no other at both time and memory.{lines}"
    return canvas.figure("Time to target against memory", caption)


def beliefs(plot: Plot, train: Mapping[str, Any]) -> Figure | None:
    """What search frontier expects of every batch size, with its interval; what was observed as marks."""
    from tune.search.frontier_grid import Frontier

    frontier = Frontier(plot.config, train)
    reached = [r for r in plot.records if is_number(r.time_to_target_s) and r.status in FINISHED]
    if not reached:
        return None
    expected = frontier.predictions(plot.records)
    canvas = Canvas("beliefs")
    unit_s, seconds = time_unit(max(record.time_to_target_s or 0.0 for record in reached))
    for at, name in enumerate(plot.names):
        rows = []
        for place, trial in frontier.trials.items():
            time_s = expected.get(trial_id(trial))
            if time_s is not None and plot.series_at(trial) == at:
                rows.append((place.size, time_s.low / unit_s, time_s.value / unit_s, time_s.high / unit_s))
        if rows:
            ceiling = 10 * max(record.time_to_target_s or 0.0 for record in reached) / unit_s
            xs, *bands = zip(*sorted(rows), strict=True)
            low, middle, high = ([min(y, ceiling) for y in band] for band in bands)
            canvas.axes.fill_between(xs, low, high, color=SERIES[at], alpha=0.15, linewidth=0)
            canvas.axes.plot(xs, middle, color=SERIES[at], linewidth=1.6, label=name)
    sizes_of = {trial_id(trial): place.size for place, trial in frontier.trials.items()}
    for record in reached:
        size, y = sizes_of.get(trial_id(record.config)), (record.time_to_target_s or 0.0) / unit_s
        if size is not None:
            look: dict[str, Any] = {"marker": "o" if record.purpose != "repeat" else "D", "linestyle": "none"}
            look["markersize"] = 7.5 if plot.is_best(record) else 4.5
            canvas.mark(size, y, plot.tip(record, f"{y:.3g} {seconds}"), plot.color(record), zorder=3, **look)
    longest = max(record.time_to_target_s or 0.0 for record in reached) / unit_s
    canvas.axes.set_ylim(0, 1.6 * longest)
    sizes = sorted({place.size for place in frontier.places})
    canvas.axes.set_xscale("log", base=2)
    ticks = sizes[:: math.ceil(len(sizes) / 8)]
    canvas.axes.set_xticks(ticks, [str(size) for size in ticks])
    canvas.axes.minorticks_off()
    canvas.axes.axhline(0, color=FG, linewidth=0)
    canvas.axes.set_xlabel("global batch size")
    canvas.axes.set_ylabel(f"time to target, {seconds}")
    canvas.legend()
    caption = (
        "Lines and bands are what the search expects of every batch size, and its 95 % interval; circles are trials, "
        "diamonds repeats. Where a band leaves the axis the target may never be reached."
    )
    return canvas.figure("Expected time to target", caption)


def course(plot: Plot) -> Figure | None:
    """The value that the weights of each of a population's trials were trained with, against the epoch."""
    keys = [key for key in plot.config.space if may_change(key)]
    varied = [key for key in keys if all(map(is_number, _values(plot.records, key)))]
    varied = [key for key in varied if len(set(_values(plot.records, key))) > 1]
    if not varied:
        return None
    key = varied[0]
    canvas = Canvas("course")
    for record in sorted(plot.records, key=plot.is_best):
        if not record.schedule or not record.curve:
            continue
        ends = [*(part["epoch"] for part in record.schedule[1:]), record.curve[-1]["epoch"]]
        values = [part["config"][key] for part in record.schedule]
        best = plot.is_best(record)
        canvas.axes.step(
            [record.schedule[0]["epoch"], *ends],
            [*values, values[-1]],
            where="post",
            color=SERIES[0] if best else MUTED,
            linewidth=2.8 if best else 1.1,
            alpha=1 if best else 0.6,
            gid=canvas.tip(plot.tip(record, f"{record.status}, from trial {record.exploited_from or 'none'}")),
        )
    values = _values(plot.records, key)
    if min(values) > 0 and max(values) > 8 * min(values):
        canvas.axes.set_yscale("log")
    canvas.axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    canvas.axes.minorticks_off()
    canvas.axes.set_xlim(left=0)
    canvas.axes.set_xlabel("epoch")
    canvas.axes.set_ylabel(plot.labels[key])
    thick = " The thick line is the best." if plot.best else ""
    caption = f"What the weights of each trial were trained with; where lines part, one went on from another.{thick}"
    return canvas.figure(f"Course of {plot.labels[key]}", caption)


def _values(records: list[TrialRecord], key: str) -> list[Any]:
    """All values of a key in the course of any trial's weights."""
    return [part["config"].get(key) for record in records for part in record.schedule]


def time_unit(longest_s: float) -> tuple[float, str]:
    """Seconds of the unit in which a duration is easily read, and its name."""
    if longest_s < 300:
        return 1.0, "s"
    return (60.0, "min") if longest_s < 3 * 3600 else (3600.0, "h")
