"""The line that a run shows on a terminal, and when the run will be over, both from its records."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

from rich.text import Text

from trainers.errors import printable
from trainers.output import Record, Take
from trainers.terminal import TerminalConsole, live

_RECENT = 20
"""Windows of the log that say how long a step takes now."""


class Course:
    """Where a run is, by its records so far."""

    def __init__(self, name: str) -> None:
        self._name, self._began, self._heard = name, time.monotonic(), 0.0
        self._start: Record = {}
        self._newest: Record = {}
        self._figures: dict[str, float] = {}
        self._windows: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._first_other_s: float | None = None
        self._other_s = 0.0
        """Of evaluations and checkpoints, for each step up to the newest of them."""

    def take(self, record: Record) -> None:
        """Take note of a record."""
        if record["record"] == "start":  # of this launch, or of a group that has started again
            self._start, self._first_other_s, self._other_s = record, None, 0.0
            self._windows.clear()
        self._newest, self._heard = record, time.monotonic()
        if record["record"] == "report":  # of a training function, which may report anything
            metrics = record["metrics"].items()
            self._figures = {str(name): float(one) for name, one in metrics if isinstance(one, int | float)}
            return
        self._figures |= {name: one for name, one in record.items() if name.startswith(("train_loss", "val_"))}
        other_s = record["wall_time_s"] - (record["train_time_s"] - self._start.get("train_time_s", 0.0))
        if record["record"] == "train":
            self._figures |= {name: record[name] for name in ("samples_per_s",) if name in record}
            self._windows.append((record["step"], record["train_time_s"]))
            if self._first_other_s is None:  # resuming, and all else before the first step
                self._first_other_s = other_s
        elif self._first_other_s is not None and (steps := record["step"] - self._start.get("step", 0)):
            self._other_s = (other_s - self._first_other_s) / steps

    def left_s(self) -> float | None:
        """Seconds until the run is over, evaluations and checkpoints included; None where nobody can know."""
        end, now, newest = self._start.get("total_steps"), time.monotonic(), self._newest
        if end is None or not self._windows:
            return None
        (first, began_s), (last, ended_s) = self._windows[0], self._windows[-1]
        if last == first:  # one window, which may have compiled
            first, began_s = self._start["step"], self._start["train_time_s"]
        each_s = (ended_s - began_s) / max(1, last - first)
        left_s: float = (end - newest["step"]) * (each_s + self._other_s)
        if (most_s := self._start.get("max_time_s")) is not None:
            left_s = min(left_s, most_s - newest["wall_time_s"])
        return max(0.0, left_s - (now - self._heard))

    def line(self) -> Text:
        """The line as it is now: what matters most comes first, since a narrow terminal cuts its end off."""
        newest, end, figures = self._newest, self._start.get("total_steps"), dict(self._figures)
        speed, loss = figures.pop("samples_per_s", None), figures.pop("train_loss", None)
        parts = [self._name]
        if end:
            parts.append(f"step {newest['step']}/{end} ({newest['step'] / end:.0%})")
        elif not newest:
            parts.append("starting")
        if (left_s := self.left_s()) is not None:
            parts.append(f"ETA {clock(left_s)}")
        if "epoch" in newest:
            parts.append(f"epoch {newest['epoch']:.2f}")
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        if speed is not None:
            parts.append(f"{speed:,.0f} samples/s")
        parts += [f"{name} {value:.4g}" for name, value in figures.items()]
        parts.append(f"for {clock(time.monotonic() - self._began)}")
        return Text(printable("  ".join(parts)), no_wrap=True, overflow="ellipsis", end="")


def clock(time_s: float) -> str:
    """Hours, minutes and seconds, as a clock has them."""
    minutes, seconds = divmod(round(time_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


@contextlib.contextmanager
def live_line(name: str) -> Iterator[Take]:
    """Show a run's line in a block, by the records that are given."""
    course = Course(name)
    with live(TerminalConsole(), course.line):
        yield course.take
