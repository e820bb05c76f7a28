"""How a command reports: a live line, log lines, few lines (`--quiet`), or JSON.

Environment read: TERM, which is dumb for a terminal that cannot be drawn on;
RANK and what else torchrun sets: of its workers, only rank 0 reports.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from trainers.errors import redact

logger = logging.getLogger(__name__)

Record = dict[str, Any]
Take = Callable[[Record], None]
"""Receives one record of a run."""
Quiet = Annotated[
    bool, Field(description="only warnings, errors and the result")
]
Json = Annotated[
    bool,
    Field(
        alias="json",
        description="JSON on standard output, one object per line; all else on standard error",
    ),
]
PACKAGES = ("trainers", "cluster", "tune")
"""Packages whose log is shown."""
TORCHRUN = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
"""Variables that torchrun sets for each worker, and that a worker needs."""
_TELL_S = 0.25
_LAST_S = 5.0


def torchrun_rank() -> int | None:
    """Return this process's rank if torchrun started it, else None.

    A RANK alone, left over in a shell, is not torchrun's.
    """
    if os.environ.keys() >= TORCHRUN:
        return int(os.environ["RANK"])
    return None


def on_terminal() -> bool:
    """Whether standard output is a terminal that can be drawn on."""
    is_dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return not is_dumb and sys.stdout is not None and sys.stdout.isatty()


@dataclass
class Output:
    """How a command reports to its user.

    Within its block, with `as_json`, file descriptor 1 of this process and its
    children is redirected to standard error; records are written to the
    original standard output.
    """

    quiet: bool = False
    as_json: bool = False
    descriptor: int = field(default=1, init=False)
    """File descriptor of the command's own standard output."""

    @property
    def is_live(self) -> bool:
        """Whether a live line or table is drawn."""
        return not (self.quiet or self.as_json) and on_terminal()

    def __enter__(self) -> Output:
        if self.as_json:
            sys.stdout.flush()
            self.descriptor = os.dup(1)
            os.dup2(2, 1)
        return self

    def wanting(self, typed: Output) -> Output:
        """Adopt the command's parsed options (such as `--json=true`)."""
        self.quiet = typed.quiet
        if typed.as_json and not self.as_json:
            self.as_json = True
            self.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.as_json:
            sys.stdout.flush()
            os.dup2(self.descriptor, 1)
            os.close(self.descriptor)
            self.descriptor = 1

    def record(self, record: Mapping[str, Any]) -> None:
        """Write a record if `--json` is set; a closed pipe does not end the run."""
        if not self.as_json or torchrun_rank():
            return
        data = json.dumps(as_data(record)).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self.descriptor, data) :]
        except OSError as error:
            self.as_json = False
            logger.warning(
                "standard output accepts no more records (%s): the run continues without them",
                error,
            )

    def records(self, records: Iterable[Record]) -> None:
        """Write several records."""
        for record in records:
            self.record(record)

    def failed(
        self, status: str, message: str, exit_code: int, advice: str = ""
    ) -> int:
        """Record the failure of the command; return its exit code."""
        self.record(
            {
                "record": "error",
                "status": status,
                "message": message,
                "advice": advice,
                "exit_code": exit_code,
            }
        )
        return exit_code

    def result(self, text: str, line: str, record: Mapping[str, Any]) -> None:
        """Report the result: as text, as a line with `--quiet`, or as a record."""
        if self.as_json:
            self.record({"record": "result", **record})
        elif not torchrun_rank():
            print(redact(line if self.quiet else text), flush=True)


def as_data(value: Any) -> Any:
    """Convert to data for strict JSON: no secrets, and null for NaN and infinity."""
    if isinstance(value, Mapping):
        return {redact(str(key)): as_data(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(part) for part in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return redact(str(value))


class Sender:
    """Sends records from a thread, four times a second, so that callers never wait."""

    def __init__(self, send: Callable[[list[Record]], None]) -> None:
        self._send = send
        self._waiting = deque[Record]()
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="records", daemon=True
        )
        self._thread.start()

    def __call__(self, record: Record) -> None:
        """Queue a record."""
        self._waiting.append(record)

    def close(self) -> None:
        """Send what is left, for at most five seconds."""
        self._over.set()
        self._thread.join(_LAST_S)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.wait(_TELL_S)
            taken = [
                self._waiting.popleft() for _ in range(len(self._waiting))
            ]
            if taken:
                try:
                    self._send(taken)
                except Exception as error:  # the driver is gone, which Ray reports in various ways; the run continues
                    logger.debug("records are no longer sent: %s", error)
                    self._send = lambda records: None
