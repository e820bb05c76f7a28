"""One thing at a time on lanes that no search uses any more (Ray)."""

import time
from collections.abc import Callable
from typing import Any

import ray

from tune.lanes.messages import Assignment, Event

_QUIET_S = 60.0  # that a trial which the search has stopped may take to notice, or a lane to come up
_LOOK_S = 0.5


def await_quiet(mailbox: Any, settle: Callable[[], bool], check: Callable[[], None]) -> None:
    """Wait until no lane works, for a minute at most.

    `settle` returns whether no lane is starting, from which on none does: a start takes as much of the machine as a
    trial. `check` is called often, and raises where the sweep shall end.
    """
    deadline = time.monotonic() + _QUIET_S
    while (not settle() or ray.get(mailbox.watch.remote())["running"]) and time.monotonic() < deadline:
        check()
        time.sleep(_LOOK_S)


def run_alone(
    mailbox: Any, assignment: Assignment, check: Callable[[], None]
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Have a lane run it to its end; return its evaluations, and how it has ended."""
    ticket = ray.get(mailbox.submit.remote(assignment))
    curve: list[dict[str, float]] = []
    while True:
        reference = mailbox.next_event.remote(ticket, len(curve))
        while not ray.wait([reference], timeout=_LOOK_S)[0]:
            check()
        event: Event = ray.get(reference)
        if event.outcome is not None:
            mailbox.forget.remote(ticket)
            return curve, event.outcome
        curve.append(event.row)
