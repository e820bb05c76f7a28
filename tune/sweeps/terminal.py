"""The sweep while it runs: a live table on a terminal or in a notebook, plain lines in a log."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainers.redaction import redact
from trainers.terminal import TerminalConsole, live
from tune.config import SweepConfig
from tune.report.table import as_html
from tune.report.words import duration, shown
from tune.trials.record import TrialRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class View:
    """All that is shown."""

    config: SweepConfig
    total: int | None
    """Trials that are planned, where that is known."""
    statuses: Mapping[str, int]
    """Trials that have ended, by status."""
    state: Mapping[str, Any]
    """What the mailbox's `watch` returns."""
    configs: Mapping[str, Mapping[str, Any]]
    """Configurations of the trials that have started, by id."""
    best: tuple[float, TrialRecord] | None
    """The objective's best value so far, and whose it is."""
    spent_s: float


def shown_config(config: Mapping[str, Any]) -> str:
    """A trial's configuration in a line: the last parts of its keys."""
    return "  ".join(f"{key.rsplit('.', 1)[-1]} {shown(value)}" for key, value in config.items())


def render(view: View) -> RenderableType:
    """The live table."""
    config, running = view.config, view.state["running"]
    ended = sum(view.statuses.values())
    counts = ", ".join(f"{count} {status}" for status, count in view.statuses.items() if count)
    head = f"{config.name}   {ended}/{view.total or '?'} trials" + (f": {counts}" if counts else "")
    table = Table(box=None, pad_edge=False, show_header=bool(running))
    for column in ("lane", "trial", "step", "newest", "for"):
        table.add_column(column, justify="right" if column in ("lane", "step", "for") else "left")
    for lane, trial in sorted(running.items()):
        metrics = trial["metrics"]
        newest = "  ".join(f"{key} {metrics[key]:.4g}" for key in metrics if key.startswith(("val_", "train_l")))
        words, age_s = shown_config(view.configs.get(trial["trial"], {})), time.time() - trial["started"]
        cells = str(lane), words, str(metrics.get("step", "")), newest, duration(age_s)
        table.add_row(*(Text(redact(cell)) for cell in cells))
    lines = []
    if view.best is not None:
        value, record = view.best
        lines.append(f"best so far   {config.objective.metric} {value:.4g}   {shown_config(record.config)}")
    for label, (low, high) in view.state["boundary"].items():
        known = [f"{low} fits"] * (low is not None) + [f"{high} does not"] * (high is not None)
        lines.append(f"microbatch    {label}: {', '.join(known)}")
    spent = f"time          {duration(view.spent_s)}, {len(running)} of {len(view.state['lanes'])} lanes busy"
    if config.usd_per_hour is not None:
        spent += f", {config.usd_per_hour * view.spent_s / 3600:.2f} USD"
    if config.time_budget_s is not None:
        spent += f"; {duration(max(0.0, config.time_budget_s - view.spent_s))} of the budget left"
    return Group(Text(head, style="bold"), table, *(Text(redact(line)) for line in [*lines, spent]))


class Terminal:
    """Lines, and beside them the live table where standard output is a terminal or a notebook's."""

    def __init__(self, console: Console | None = None, is_live: bool = True) -> None:
        """`is_live`: a table is wanted."""
        self._console = console or TerminalConsole()
        self._is_live = is_live
        self._draw: Callable[[RenderableType], None] | None = None
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        if not self._is_live:
            return self
        if self._console.is_jupyter:
            from IPython.display import HTML, display

            # rich's own needs ipywidgets, and the notebook their extension.
            cell = display(HTML(""), display_id=True)
            self._draw = lambda shown: cell.update(HTML(as_html(shown)))
            self._undo.callback(cell.update, HTML(""))
        if self._console.is_terminal:
            region = self._undo.enter_context(live(self._console))
            self._draw = lambda shown: region.update(shown, refresh=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the table away."""
        self._undo.close()
        self._draw = None

    def update(self, view: View) -> None:
        """Redraw the live table, where there is one."""
        if self._draw is not None:
            self._draw(render(view))

    def say(self, words: str) -> None:
        """Print a line that stays."""
        logger.info("%s", words)
