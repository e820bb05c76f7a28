"""The live table: all that a person wants to know while a sweep runs, and
nothing where there is no terminal.
"""

import io
import logging
import time

from rich.console import Console

from tune.config import SweepConfig
from tune.sweeps._progress import Terminal, View, render
from tune.trials.journal import Live, Running
from tune.trials.record import TrialRecord


def config(**keys):
    return SweepConfig(
        name="digits", train={}, space={"global_batch_size": [32, 64]}, **keys
    )


def live(*running):
    return Live("running", 24, 2, list(running))


def view(**changes):
    best = TrialRecord(
        "a", {"global_batch_size": 64, "optimizer.lr": 0.1}, "done", 0, 1
    )
    config_of_trial = {"global_batch_size": 32, "precision": "bf16"}
    metrics = {"step": 120, "val_loss": 0.25, "epoch": 3}
    trial = Running("b", 1, time.time() - 12.3, config_of_trial, metrics)
    known = {
        "config": config(usd_per_hour=60.0, budget={"time_s": 600.0}),
        "live": live(trial),
        "statuses": {"done": 9, "out_of_memory": 2},
        "best": (0.123456, best),
        "spent_s": 90.0,
    }
    return View(**known | changes)


def text(shown):
    console = Console(width=140, file=io.StringIO(), force_terminal=False)
    console.print(render(shown))
    return console.file.getvalue()


def test_no_name_is_markup_or_moves_the_cursor():
    name = "val_[/red]\x1b[2J"
    record = TrialRecord(
        "a", {"task_args.[/b]\x1b": "[/red]\x1b[2J"}, "done", 0, 1
    )
    trial = Running(
        "b", 0, time.time(), record.config, {"step": 1, name: 0.25}
    )
    shown = text(view(live=live(trial), best=(1.0, record)))
    assert "\x1b" not in shown
    for words in (r"val_[/red]\x1b[2J 0.25", r"[/b]\x1b [/red]\x1b[2J"):
        assert words in shown, shown


def test_it_shows_all_that_there_is():
    shown = text(view())
    for words in (
        "digits   11/24 trials: 9 done, 2 out_of_memory",
        "global_batch_size 32  precision bf16",
        "120",
        "val_loss 0.25",
        "best so far   val_loss 0.1235   global_batch_size 64  lr 0.1",
        "1 of 2 lanes busy, 1.50 USD; 8.5 min of the budget left",
    ):
        assert words in shown, shown


def test_lines_stay_above_the_table(monkeypatch):
    """A handler that took hold of standard output before must not write
    through the table.
    """
    file = io.StringIO()
    monkeypatch.setattr("sys.stdout", file)
    handler = logging.StreamHandler(file)
    package = logging.getLogger("tune")
    package.addHandler(handler)
    monkeypatch.setattr(package, "level", logging.INFO)
    try:
        with Terminal(
            Console(file=None, force_terminal=True, width=120)
        ) as terminal:
            terminal.update(view())
            package.info("trial 1/24  done")
            assert handler.stream is not file
        assert handler.stream is file
    finally:
        package.removeHandler(handler)
    written = file.getvalue()
    assert (
        written.index("9 done")
        < written.index("trial 1/24  done")
        < written.rindex("9 done")
    )
