"""The figure of where the sweep's time went: each lane's trials, starting told from training."""

from collections.abc import Sequence

from tune.report.canvas import MUTED, Canvas, Figure
from tune.report.figure_data import FigureData
from tune.report.words import duration, time_unit
from tune.trials.record import Spent, TrialRecord

_MOST_TRIALS = 150


def spent_in_all(records: Sequence[TrialRecord]) -> Spent | None:
    """Return the sums over trials of where their time on lanes went, from the first of them on; None where no record
    tells.
    """
    found = [record.spent for record in records if record.spent is not None]
    if not found:
        return None
    sums = (sum(getattr(one, name) for one in found) for name in ("starting_s", "training_s", "total_s"))
    return Spent(min(one.began for one in found), *sums)


def timeline(data: FigureData) -> Figure | None:
    """Draw a row a lane, a bar a trial: its start, then its training, then its evaluations, each added up."""
    known = [(one, one.spent, one.lane) for one in data.records if one.spent is not None and one.lane is not None]
    rows = [(spent.began, lane, spent, record) for record, spent, lane in known]
    bars = sorted(rows, key=lambda row: row[:2])[:_MOST_TRIALS]
    whole = spent_in_all([record for *_, record in bars])
    if whole is None:
        return None
    lanes = sorted({lane for _, lane, _, _ in bars})
    canvas = Canvas("timeline", 0.9 + 0.32 * max(len(lanes), 2))
    size, unit = time_unit(max(began + spent.total_s for began, _, spent, _ in bars) - whole.began)
    for began, lane, spent, record in bars:
        rest_s = max(0.0, spent.total_s - spent.starting_s - spent.training_s)
        text = f"starting {duration(spent.starting_s)}, training {duration(spent.training_s)}, rest {duration(rest_s)}"
        if spent.first_step_s is not None:
            text += f"; first step {duration(spent.first_step_s)}"
        left = (began - whole.began) / size
        parts = [(spent.starting_s, MUTED, 0.55), (spent.training_s, data.color(record), 1.0)]
        for part_s, color, alpha in [*parts, (rest_s, data.color(record), 0.4)]:
            (bar,) = canvas.axes.barh(lanes.index(lane), part_s / size, left=left, height=0.7, color=color, alpha=alpha)
            bar.set_gid(canvas.tip(data.tip(record, text)))
            left += part_s / size
    canvas.axes.set_yticks(range(len(lanes)), [f"lane {lane}" for lane in lanes])
    canvas.axes.set(ylim=(len(lanes) - 0.4, -0.6), xlim=(0, None), xlabel=f"since the first trial, {unit}")
    canvas.axes.set_axisbelow(True)
    canvas.axes.grid(visible=False, axis="y")
    canvas.axes.grid(visible=True, axis="x")
    canvas.legend(data.legend(record for *_, record in bars))
    of_all = f" The first {len(bars)} of {len(known)} trials." if len(known) > len(bars) else ""
    caption = (
        f"Grey: starting, {whole.starting_s / max(whole.total_s, 1e-9):.0%} of the trials' time on their lanes; "
        f"full colour: training, {whole.training_s / max(whole.total_s, 1e-9):.0%}; pale: evaluation.{of_all}"
    )
    return canvas.figure("Starting and training", caption)
