"""What is said of a run's time: shares, and what would change them; plain data, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from trainers.config.yaml import dump_yaml
from trainers.explain.readings import Span
from trainers.explain.suspect import WORTH


@dataclass(frozen=True)
class Advice:
    """A cause, what would change it, and the gain as a share of the run's time."""

    kind: str
    words: str
    changes: dict[str, Any]
    fix: str
    predicted: Span
    verified: Span | None = None
    """Measured beside the old configuration; None where no key of the configuration changes it, or nobody asked."""

    def lines(self) -> Iterable[str]:
        """As the user reads it."""
        yield f"{self.kind}: {self.words}"
        for name, value in self.changes.items():
            yield f"    {dump_yaml({name: value}).strip()}"
        if self.fix:
            yield f"    {'or: ' if self.changes else ''}{self.fix}"
        measured = "" if self.verified is None else f"; measured side by side {_percent(self.verified)}"
        yield f"    predicted {_percent(self.predicted)} of the time{measured}"


@dataclass(frozen=True)
class Explanation:
    """Where a run's time goes, and what would change that."""

    uri: str
    shares: dict[str, float]
    """Of the run's time, by segment; they add up to 1."""
    advice: list[Advice] = field(default_factory=list)
    """The largest gain first."""
    step_s: float | None = None
    """Mean time of a step in the profile."""
    profiled: bool = False
    recorded: bool = True
    """Whether the run has records, which a YAML file has not."""
    note: str = ""
    """Why there is no profile."""

    def ordered(self) -> list[tuple[str, float]]:
        """The shares, the largest first."""
        return sorted(self.shares.items(), key=lambda item: -item[1])

    def __str__(self) -> str:
        sources = ["a profile"] * self.profiled + ["the run's records"] * self.recorded
        if not sources:
            return f"{self.uri} has no records; {self.note}"
        lines = [f"{self.uri}: where the time goes, by {' and '.join(sources)}"]
        for name, share in self.ordered():
            lines.append(f"  {share * 1e2:5.1f} %  {name}")
        if self.note:
            lines.append(self.note)
        for number, one in enumerate(self.advice, 1):
            head, *rest = one.lines()
            lines += [f"{number}. {head}", *rest]
        if not self.advice:
            lines.append(f"nothing to gain above {WORTH:.0%}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """As it crosses between processes."""
        return json.dumps(asdict(self))


def _percent(span: Span) -> str:
    return f"{abs(span.value):.0%} {'less' if span.value >= 0 else 'more'} ({span.low:.0%} to {span.high:.0%} less)"
