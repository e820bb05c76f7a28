"""A live region at the bottom of the terminal, below other output; a run's live line.

The cursor stays visible, so that no end of the process, however sudden, can
leave it hidden.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from trainers.errors import in_digits, printable
from trainers.output import PACKAGES, Record, Take, on_terminal

REDRAWS_PER_S = 4
_ERASE_LINE = "\r\x1b[2K"


class TerminalConsole(Console):
    """Rich's console on standard output, without wrapping or hiding the cursor."""

    def __init__(self, **options: Any) -> None:
        # FORCE_COLOR makes Rich take a pipe for a terminal.
        super().__init__(
            **{
                "force_terminal": on_terminal(),
                "highlight": False,
                "soft_wrap": True,
                **options,
            }
        )

    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor as it is."""
        return False


class _Printed(io.TextIOBase):
    """Replaces a standard stream, and passes on whole lines.

    Of a line that is redrawn, such as a progress bar, it passes on only the
    last state.
    """

    def __init__(self, stream: TextIO, give: Callable[[str], None]) -> None:
        self._stream = stream
        self._give = give
        self._open = ""
        self._pid = os.getpid()
        self.rich_proxied_file = stream
        """The stream that Rich itself writes to."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        lines = (self._open + text).split("\n")
        self._open = lines.pop()
        if lines:
            self._tell("\n".join(map(_last_state, lines)))
        return len(text)

    def flush(self) -> None:
        # Pass on a prompt, or a word before a long wait, but not a line that
        # is being redrawn.
        if "\r" not in self._open:
            self.finish()

    def finish(self) -> None:
        """Pass on a last line that has no newline."""
        if self._open:
            self._tell(_last_state(self._open))
            self._open = ""

    def _tell(self, lines: str) -> None:
        # A forked process has no thread that draws, and may find the drawing
        # lock held forever.
        give = self._give if os.getpid() == self._pid else beside(self._stream)
        give(lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


def _last_state(line: str) -> str:
    return line.removesuffix("\r").rpartition("\r")[2]


def beside(stream: TextIO) -> Callable[[str], None]:
    """Return a function that prints above a live line drawn by another process.

    The function overwrites the live line, which the other process redraws
    below.
    """

    def give(lines: str) -> None:
        stream.write(
            "".join(f"{_ERASE_LINE}{line}\n" for line in lines.split("\n"))
        )
        stream.flush()

    return give


@contextlib.contextmanager
def printing(
    give: Callable[[TextIO], Callable[[str], None]],
) -> Iterator[None]:
    """Within the block, pass to `give(stream)` what Python prints or our log writes."""
    names = ["stdout"]
    if sys.stderr is not None and sys.stderr.isatty():
        names.append("stderr")
    handlers: list[logging.Handler] = []
    for package in PACKAGES:
        handlers += logging.getLogger(package).handlers
    with contextlib.ExitStack() as stack:
        for name in names:
            stream = getattr(sys, name)
            own: Any = _Printed(stream, give(stream))
            stack.callback(own.finish)
            stack.callback(setattr, sys, name, stream)
            setattr(sys, name, own)
            for handler in handlers:
                if not isinstance(handler, logging.StreamHandler):
                    continue
                if handler.stream is stream:
                    stack.callback(handler.setStream, stream)
                    handler.setStream(own)
        yield


@contextlib.contextmanager
def live(
    console: Console, draw: Callable[[], RenderableType] | None = None
) -> Iterator[Live]:
    """Show a live region during the block; `draw` is called four times a second."""
    region = Live(
        console=console,
        get_renderable=draw,
        auto_refresh=draw is not None,
        refresh_per_second=REDRAWS_PER_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )

    def above(lines: str) -> None:
        console.print(Text("\n").join(map(Text.from_ansi, lines.split("\n"))))

    with region, printing(lambda stream: above):
        yield region


class Course:
    """A run's progress, according to its records so far."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = time.monotonic()
        self._heard = 0.0
        self._start: Record = {}
        self._first: Record | None = None
        """The first record of this launch that counts steps; resuming and
        compiling came before it.
        """
        self._newest: Record = {}
        self._figures: dict[str, float] = {}

    def take(self, record: Record) -> None:
        """Update the progress with a record."""
        self._newest = record
        self._heard = time.monotonic()
        if record["record"] == "report":
            # A training function may report anything.
            self._figures = {
                str(name): float(value)
                for name, value in record["metrics"].items()
                if isinstance(value, int | float)
            }
            return
        if record["record"] == "start":
            # This launch began, or its group has started again.
            self._start = record
            self._first = None
        elif self._first is None:
            self._first = record
        shown = ("train_loss", "val_", "samples_per_s")
        self._figures |= {
            name: value
            for name, value in record.items()
            if name.startswith(shown)
        }

    def left_s(self) -> float | None:
        """Estimate the seconds left in the run, pauses included; None if unknown."""
        end = self._start.get("total_steps")
        first = self._first
        newest = self._newest
        if end is None or first is None or newest["step"] == first["step"]:
            return None
        took_s = newest["wall_time_s"] - first["wall_time_s"]
        each_s = took_s / (newest["step"] - first["step"])
        left_s: float = (end - newest["step"]) * each_s
        most_s = self._start.get("max_time_s")
        if most_s is not None:
            left_s = min(left_s, most_s - newest["wall_time_s"])
        return max(0.0, left_s - (time.monotonic() - self._heard))

    def line(self) -> Text:
        """Return the current line; a narrow terminal cuts off its end."""
        newest = self._newest
        end = self._start.get("total_steps")
        figures = dict(self._figures)
        speed = figures.pop("samples_per_s", None)
        loss = figures.pop("train_loss", None)
        parts = [self._name]
        if end:
            parts.append(
                f"step {newest['step']}/{end} ({newest['step'] / end:.0%})"
            )
        elif not newest:
            parts.append("starting")
        if (left_s := self.left_s()) is not None:
            parts.append(f"ETA {clock(left_s)}")
        if "epoch" in newest:
            parts.append(f"epoch {newest['epoch']:.2f}")
        if loss is not None:
            parts.append(f"loss {in_digits(loss)}")
        if speed is not None:
            parts.append(f"{speed:,.0f} samples/s")
        parts += [f"{name} {value:.4g}" for name, value in figures.items()]
        parts.append(f"for {clock(time.monotonic() - self._began)}")
        text = printable("  ".join(parts))
        return Text(text, no_wrap=True, overflow="ellipsis", end="")


def clock(time_s: float) -> str:
    """Format a duration as hours:minutes:seconds."""
    minutes, seconds = divmod(round(time_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


@contextlib.contextmanager
def live_line(name: str) -> Iterator[Take]:
    """Show a run's live line in the block; yield the receiver of its records."""
    course = Course(name)
    with live(TerminalConsole(), course.line):
        yield course.take
