"""Whether the training functions of a sweep report the same on a warm lane as in a fresh process. Pure."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainers.errors import MISSING
from tune.lanes.messages import Submission, new_ticket

_OF_THE_MOMENT = frozenset(
    [
        *("time", "times", "timestamp", "date", "duration", "elapsed", "eta", "wall", "clock", "latency", "uptime"),
        *("s", "sec", "secs", "second", "seconds", "ms", "us", "ns", "minutes", "hours", "per"),
        *("speed", "throughput", "fps", "ips", "tps", "flops", "mfu", "utilization", "load", "cpu", "gpu"),
        *("memory", "mem", "bytes", "kb", "mb", "gb", "mib", "gib", "rss", "peak"),
        *("pid", "process", "thread", "host", "hostname", "node", "ip", "port", "id", "uuid"),
        *("path", "dir", "directory", "file"),
    ]
)
"""Words in the names of metrics that differ from run to run by their nature."""

Reports = list[list[dict[str, Any]]]
"""For each report the metrics of every rank."""

_COMPARE_S = 20.0
"""How long a function is run for comparison; longer only until its first report."""
_AGAIN = "-compared"


@dataclass
class _Open:
    """A function that is being compared."""

    running: Submission | None
    """None: it waits for a fresh process."""
    words: str | None = None
    """What it reported otherwise on a warm lane; None: that is not known yet."""


@dataclass
class Comparison:
    """One for each sweep.

    A function has fresh processes until a trial of it has ended well in one. Before the next, it runs once more on a
    lane as it is then. Where that gives other reports, and another fresh process does not, each of its trials has a
    process of its own; a function that differs from itself in fresh ones cannot be compared.
    """

    is_wanted: bool
    used: set[int] = field(default_factory=set)
    """The lanes whose processes have run a trial."""
    proven: set[str] = field(default_factory=set)
    alone: dict[str, str] = field(default_factory=dict)
    """The functions that need processes of their own, and why."""

    def __post_init__(self) -> None:
        self._first: dict[str, Submission] = {}
        """A trial of each function that has ended well in a fresh process."""
        self._open: dict[str, _Open] = {}

    def may_take(self, trial: Submission, lane: int) -> bool:
        """Whether a lane may run a trial as it is."""
        function = trial.function
        return not self.is_wanted or function is None or function in self.proven or lane not in self.used

    def instead(self, waiting: list[Submission], lane: int) -> Submission | str | None:
        """What a lane is to do that may take none of the trials that wait: run another for comparison, start again for
        a reason, or wait.
        """
        for function in dict.fromkeys(trial.function for trial in waiting if self.is_wanted):
            if function is None or function in self.proven:
                continue
            if lane not in self.used:
                one = self._open.get(function)
                if one is not None and one.running is None:
                    one.running = self._again(function)
                    return one.running
            elif function in self.alone:
                return self.alone[function]
            elif (open_one := self._open.get(function)) is not None:
                if open_one.running is None:
                    return f"{function} is run in a fresh process, for comparison"
            elif function in self._first:
                again = self._again(function)
                self._open[function] = _Open(again)
                return again
            else:
                return f"no trial of {function} has ended well in a fresh process yet"
        return None

    def is_over(self, trial: Submission, age_s: float) -> bool:
        """Whether a trial that runs for comparison has reported enough."""
        return trial.is_comparison and age_s > _COMPARE_S

    def ended(self, trial: Submission) -> str | None:
        """Note the end of a trial; returns what to say of it."""
        function = trial.function
        if function is None or not self.is_wanted:
            return None
        if not trial.is_comparison:
            has_ended_well = trial.outcome["status"] in ("done", "stopped") and trial.losses + trial.failures == 0
            if trial.is_fresh and has_ended_well and _reports(trial):
                self._first.setdefault(function, trial)
            return None
        one = self._open.pop(function)
        words = difference(_reports(self._first[function]), _reports(trial))
        if one.words is None and words is not None:
            self._open[function] = _Open(None, words)
        elif one.words is None or words is not None:
            self.proven.add(function)
        else:
            self.alone[function] = f"{function} does not give the same on a warm lane: {one.words}"
            return f"{self.alone[function]}: each trial of it has a process of its own"
        return None

    def drop(self, trial: Submission) -> None:
        """Forget a comparison whose lane has died: the next one tells."""
        one = self._open.get(trial.function or "")
        if one is not None and one.running is trial:
            del self._open[trial.function or ""]

    def _again(self, function: str) -> Submission:
        first = self._first[function].assignment
        name = f"{first.trial}{_AGAIN}"
        again = replace(first, ticket=new_ticket(name), trial=name, attempt=0, begun=None)
        return Submission(again, told=True, is_comparison=True)


def _reports(trial: Submission) -> Reports:
    """What rank 0 has reported, and the end where it came to one by itself."""
    reports: Reports = [[event.metrics] for event in trial.events if event.outcome is None]
    ends = trial.outcome["status"] != "stopped"
    return [*reports, [{"its end": trial.outcome["status"]}]] if ends else reports


def difference(first: Reports, again: Reports) -> str | None:
    """Return what differs first, in words, among the reports that both have; None: nothing.

    Numbers, strings and flags are compared, except metrics of the moment (times, speeds, processes, memory).
    """
    for number, pair in enumerate(zip(first, again, strict=False), 1):
        for rank, (before, after) in enumerate(zip(*pair, strict=False)):
            expected, found = dict(_flat(before)), dict(_flat(after))
            for key in dict.fromkeys([*expected, *found]):
                one, other = expected.get(key, MISSING), found.get(key, MISSING)
                if one != other and not (one != one and other != other):
                    return f"`{key}` is {_shown(other)}, not {_shown(one)} (report {number} of rank {rank})"
    return None


def _flat(metrics: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in metrics.items():
        words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", str(key))
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif isinstance(value, bool | int | float | str | None) and _OF_THE_MOMENT.isdisjoint(map(str.lower, words)):
            yield f"{before}{key}", value


def _shown(value: Any) -> str:
    return "missing" if value is MISSING else repr(value)
