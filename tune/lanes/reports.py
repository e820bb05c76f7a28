"""Whether two runs of a training function have reported the same. Pure."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainers.errors import MISSING

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
