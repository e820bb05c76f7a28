"""An axis of one key's values, and the figure that shows the objective against every key that was swept."""

import math
from typing import Any

from tune.report.answer import objective_value
from tune.report.canvas import Canvas, Figure
from tune.report.figure_data import Axis, FigureData, cut
from tune.report.words import amount, is_number, printable, shown

_TICK_CHARS = 56  # as many as fit side by side below the axes
_MOST_KEYS, _MOST_TRIALS = 12, 300


def every_key(data: FigureData) -> Figure | None:
    """Draw the objective against each key that varied, a panel a key, where other figures do not have them all."""
    objective = data.config.objective
    values = [(one, objective_value(objective, one)) for one in data.records if one.purpose != "repeat"]
    found = [(record, value) for record, value in values if is_number(value)]
    if not data.hidden or not found:
        return None
    found.sort(key=lambda pair: pair[1], reverse=objective.direction == "max")
    of_all = f" The best {_MOST_TRIALS} of {len(found)} trials." if len(found) > _MOST_TRIALS else ""
    found = found[:_MOST_TRIALS]
    # Those that no other figure has come first.
    axes = [*data.hidden, *(axis for axis in data.varied if axis not in data.hidden)][:_MOST_KEYS]
    panels: list[Figure] = []
    for axis in axes:
        canvas = Canvas(f"key{len(panels)}")
        for record, value in sorted(found, key=lambda pair: data.is_best(pair[0])):
            best = data.is_best(record)
            look: dict[str, Any] = {"marker": "o", "markersize": 8.5 if best else 5, "zorder": 3, "linestyle": "none"}
            text = data.tip(record, amount(objective.metric, value))
            canvas.mark(axis.position(record), value, text, data.color(record), clip_on=False, **look)
        set_axis(axis, canvas)
        canvas.axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        canvas.axes.set_ylabel(printable(objective.metric) + (", s" if objective.metric == "time_to_target" else ""))
        canvas.legend(data.legend(record for record, _ in found))
        panels.append(canvas.figure(axis.label, ""))
    left = [axis.label for axis in data.varied if axis not in axes]
    more = f" Not drawn: {', '.join(left)}." if left else ""
    large = " The large mark is the best." if data.best else ""
    caption = f"{printable(objective.metric)} against each key that was swept, a mark a trial.{large}{of_all}{more}"
    return Figure.of_panels("Every key", caption, panels)


def set_axis(axis: Axis, canvas: Canvas) -> None:
    """Set ticks of the x axis at the values that were tried; logarithmic to base 2 for batch sizes."""
    positions, log = axis.positions, axis.is_log
    if log:
        canvas.axes.set_xscale("log", base=2)
    scale = math.log2 if log else float
    first, width = scale(positions[0]), scale(positions[-1]) - scale(positions[0])
    margin = 0.06 * width or (0.5 if log else abs(first) / 2 or 0.5)
    limits = (first - margin, first + width + margin)
    canvas.axes.set_xlim(*(2**limit for limit in limits) if log else limits)
    ticks: list[tuple[float, str]] = []
    for position, value in zip(positions, axis.values, strict=True):
        if not ticks or scale(position) - scale(ticks[-1][0]) >= width / 9:
            ticks.append((position, cut(shown(value))))
    canvas.axes.set_xticks([position for position, _ in ticks], [text for _, text in ticks])
    if sum(len(text) + 2 for _, text in ticks) > _TICK_CHARS:
        canvas.axes.tick_params("x", labelrotation=25)
        for label in canvas.axes.get_xticklabels():
            label.set_horizontalalignment("right")
    canvas.axes.minorticks_off()
    canvas.axes.set_xlabel(axis.label)
