"""The figure of several objectives: the first against each of the others, with the front."""

from typing import Any

from tune.report.canvas import Canvas, Figure
from tune.report.figure_data import FigureData
from tune.report.words import amount, memory_unit, metric_words, time_unit
from tune.search.finalists import finals
from tune.search.front import front
from tune.trials.record import TrialRecord, value_of

_PALE = 0.4


def front_figure(data: FigureData) -> Figure | None:
    """Draw a panel for each metric beside the first, a mark a trial: full on the front, pale where it is beaten."""
    objective, config = data.config.objective, data.config
    members = {one.record.id: one for one in front(objective, data.records, finals(config, data.records))}
    rows: list[tuple[TrialRecord, list[float]]] = []
    for record in data.finished:
        found = [value for metric in objective.decisive if (value := value_of(metric, record)) is not None]
        if record.purpose != "repeat" and len(found) == len(objective.decisive):
            rows.append((record, found))
    if not members or len(rows) < 2:
        return None
    units = [_unit(metric, max(values[at] for _, values in rows)) for at, metric in enumerate(objective.decisive)]
    panels: list[Figure] = []
    for at, metric in enumerate(objective.decisive[1:], 1):
        canvas = Canvas(f"front{at}")
        for record, values in rows:
            member = members.get(record.id)
            is_on_front = member is not None and member.is_on_front
            x, y = values[at] / units[at][0], values[0] / units[0][0]
            if member is not None:
                wide, high = member.values[metric], member.values[objective.metric]
                look: dict[str, Any] = {"color": data.color(record), "linewidth": 1.2}
                look["alpha"] = 1 if is_on_front else _PALE
                canvas.axes.plot([x, x], [high.low / units[0][0], high.high / units[0][0]], **look)
                canvas.axes.plot([wide.low / units[at][0], wide.high / units[at][0]], [y, y], **look)
            size, alpha = 8.5 if data.is_best(record) else 5.5, 1.0 if is_on_front else _PALE
            text = data.tip(record, f"{amount(objective.metric, values[0])}, {amount(metric, values[at])}")
            look = {"marker": "o", "markersize": size, "alpha": alpha, "linestyle": "none", "zorder": 3}
            canvas.mark(x, y, text, data.color(record), **look)
        canvas.axes.set(xlabel=_label(metric, units[at][1]), ylabel=_label(objective.metric, units[0][1]), xmargin=0.08)
        canvas.legend(data.legend(record for record, _ in rows))
        panels.append(canvas.figure(metric_words(metric), ""))
    best = " The largest mark is the best." if data.best else ""
    caption = f"Full colour: no other trial beats it in all of the metrics; lines are 95 % intervals.{best}"
    return Figure.of_panels("Front", caption, panels)


def _unit(metric: str, most: float) -> tuple[float, str]:
    """Return the size and the name of the unit that suits values up to `most`."""
    if metric == "time_to_target":
        return time_unit(most)
    if metric == "peak_memory_bytes":
        return memory_unit(most)
    return 1.0, {"usd_to_target": "USD", "energy_j": "J"}.get(metric, "")


def _label(metric: str, unit: str) -> str:
    return f"{metric_words(metric)}, {unit}" if unit else metric_words(metric)
