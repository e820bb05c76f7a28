"""End workers that make no progress, after saving the stacks of every rank.

A thread of each worker watches the loop's heartbeat, from before the task is
imported until the result is written. During training steps, the loop beats
with each batch; any other phase (an import, a download, a checkpoint) has a
single, longer budget. If a call never releases the GIL, so that no thread can
run, the C-level timer of `faulthandler` writes the stacks and ends the process
instead.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainers.causes import (
    broke_with_others,
    forget_kernel_kills,
    line_of_task,
)
from trainers.config.sections import FailureConfig
from trainers.context import RunContext
from trainers.errors import RunFailedError
from trainers.storage import Storage

HUNG_EXIT_CODE = 74
"""Exit code of a worker that its watchdog ended."""
GRACE_S = 5.0
"""Time that each rank has to save its stacks before any rank exits: one hanging
rank blocks all others, so they report at about the same time.
"""
CAUSE_S = 10.0
CAUSE_OF_NODE_S = 60.0
"""How long a rank whose collective failed waits for its launcher to see which
rank, or which node, has died.
"""

_WAITING = ", waiting for other ranks"


class Watchdog:
    """Ends this process if the thread that created the watchdog exceeds a time budget."""

    def __init__(self, failure: FailureConfig, context: RunContext) -> None:
        self._failure = failure
        self._context = context
        self._thread_id = threading.get_ident()
        self.spent_s: dict[str, float] = {}
        """The time spent in each phase that has ended."""
        self._phase = ("the start", False)
        self.beat()
        self._entered = self._last
        self._closed = threading.Event()
        # Unnamed: no file is left even if the process is killed.
        self._file = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open until `close`)
        self._stderr = self._duplicate_stderr()
        self._thread = threading.Thread(
            target=self._watch, name="watchdog", daemon=True
        )
        self._thread.start()

    def beat(self) -> None:
        """Note that the loop is making progress."""
        self._last = time.monotonic()

    def enter(self, phase: str, steps: bool = False) -> None:
        """Begin another phase; with `steps`, each beat renews a step's budget."""
        # Beat first: an old beat must not count against a shorter budget.
        self.beat()
        left, _ = self._phase
        self.spent_s[left] = (
            self.spent_s.get(left, 0.0) + self._last - self._entered
        )
        self._entered = self._last
        self._phase = (phase, steps)

    @contextlib.contextmanager
    def phase(self, phase: str, steps: bool = False) -> Iterator[None]:
        """Enter a phase for the block, then return to the previous phase."""
        before = self._phase
        self.enter(phase, steps)
        yield
        self.enter(*before)

    def close(self) -> None:
        """Stop watching: the loop has ended."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            os.close(self._stderr)

    def _duplicate_stderr(self) -> int:
        """Return a descriptor for `faulthandler`, open until `close`.

        If standard error has none, as in a notebook, it is that of a temporary
        file.
        """
        streams: tuple[Any, ...] = (sys.stderr, sys.__stderr__)
        for stream in streams:
            with contextlib.suppress(AttributeError, OSError, ValueError):
                return os.dup(stream.fileno())
        return os.dup(self._file.fileno())

    def _watch(self) -> None:
        of_steps_s = self._failure.hang_timeout_s
        interval_s = min(10.0, max(0.01, of_steps_s / 4))
        silent_s = 0.0
        while True:
            phase, steps = self._phase
            budget_s = of_steps_s if steps else self._failure.of_phases_s
            # The timer only runs out if this thread cannot restart it.
            faulthandler.dump_traceback_later(
                budget_s + 2 * GRACE_S + interval_s,
                exit=True,
                file=self._stderr,
            )
            # Wake up when the budget ends, so that ranks that hang at the same
            # time also report at the same time.
            if self._closed.wait(
                min(interval_s, max(0.01, budget_s - silent_s))
            ):
                return
            silent_s = time.monotonic() - self._last
            if silent_s > budget_s and self._phase == (phase, steps):
                budget = f"failure.hang_timeout_s {of_steps_s:g}"
                if not steps:
                    budget += f" allows a phase {budget_s:g} s"
                self._end(f"{silent_s:.0f} s in {phase}", budget)

    def _end(self, where: str, budget: str) -> None:
        try:
            faulthandler.dump_traceback_later(
                10 * GRACE_S, exit=True, file=self._stderr
            )
            self._tell(where, budget)
        finally:
            with contextlib.suppress(Exception):
                # A suspended loader process would not notice the end of this
                # process.
                for child in multiprocessing.active_children():
                    child.kill()
            os._exit(HUNG_EXIT_CODE)

    def _tell(self, where: str, budget: str) -> None:
        """Report where this rank hangs: to standard error, storage and the launcher.

        Each report has its own thread, because a report may hang too.
        """
        context = self._context
        began = time.monotonic()
        stack = traceback.extract_stack(sys._current_frames()[self._thread_id])
        frames = [(frame.filename, frame.lineno or 0) for frame in stack]
        file, line = line_of_task(frames)
        waits = context.world_size > 1 and _waits_for_others(stack[-1])
        waiting = _WAITING if waits else ""
        at = f"at {Path(file).name}:{line}"
        words = f"rank {context.rank} made no step for {where}{waiting} ({at}; {budget})"
        failure = RunFailedError("hung", words, time.time(), follows=waits)
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._file.seek(0)
        stacks = f"{words}\n\n{self._file.read()}"

        def say() -> None:
            print(
                f"error: {failure} ({failure.advice})",
                file=sys.stderr,
                flush=True,
            )
            if context.storage is None:
                print(stacks, file=sys.stderr, flush=True)

        def save() -> None:
            now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            name = f"hangs/{now}-rank-{context.rank:05d}.txt"
            if context.storage is not None:
                context.storage.write(name, stacks.encode())

        def report() -> None:
            context.hung(failure, "".join(traceback.format_list(stack[-20:])))

        calls = [save, report]
        if not context.is_heard:
            calls.insert(0, say)
        tellers = [
            threading.Thread(target=call, daemon=True) for call in calls
        ]
        for teller in tellers:
            teller.start()
        for teller in tellers:
            teller.join(max(0.0, 2 * GRACE_S - (time.monotonic() - began)))
        time.sleep(max(0.0, GRACE_S - (time.monotonic() - began)))


def _waits_for_others(frame: traceback.FrameSummary) -> bool:
    """Return whether a stack with this last frame waits for other ranks.

    DDP's collectives run within the backward pass, so a backward pass counts
    as waiting.
    """
    ddp = "/torch/nn/parallel/distributed.py"
    in_torch = "/torch/distributed/" in frame.filename
    in_backward = frame.name == "_engine_run_backward"
    is_waiting = "work.wait()" in (frame.line or "")
    return (
        in_torch or frame.filename.endswith(ddp) or in_backward or is_waiting
    )


@contextlib.contextmanager
def watched(failure: FailureConfig, context: RunContext) -> Iterator[Watchdog]:
    """Watch this process during the block, unless `context` already has a watchdog.

    If a rank fails only because a collective broke, the rank waits before it
    exits: the launcher must first see the rank whose failure broke the
    collective.
    """
    if context.watchdog is not None:
        yield context.watchdog
        return
    forget_kernel_kills()
    watchdog = context.watchdog = Watchdog(failure, context)
    try:
        yield watchdog
    except Exception as error:
        watchdog.close()
        if context.world_size > 1 and broke_with_others(error):
            on_one_node = context.local_world_size == context.world_size
            deadline = time.monotonic() + (
                CAUSE_S if on_one_node else CAUSE_OF_NODE_S
            )
            # A launcher that has seen that failure asks this rank to stop.
            while time.monotonic() < deadline and not context.should_stop(0.0):
                time.sleep(0.1)
        raise
    finally:
        watchdog.close()
        context.watchdog = None


def saved_hangs(storage: Storage) -> list[str]:
    """Return the names of the saved stacks in a run's directory, oldest first."""
    return storage.names("hangs")


def read_hang(storage: Storage, name: str) -> RunFailedError:
    """Return the error that a hanging rank has saved."""
    words = storage.read(f"hangs/{name}").decode().partition("\n")[0]
    return RunFailedError("hung", words, follows=_WAITING in words)
