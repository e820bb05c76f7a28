"""A checkpoint's manifest: the last file written, which makes it whole; and which checkpoints of a run are kept."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter

from trainers.config.sections import CheckpointConfig
from trainers.errors import CheckpointError, ConfigError

FORMAT = 1


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What stands in `manifest.json`."""

    step: int
    world_size: int
    files: dict[str, FileEntry]
    """By name."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures at this very step, when it was evaluated; else empty. Only finite ones."""
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved TrainConfig that trained it."""

    def to_json(self) -> bytes:
        """As `manifest.json` has it."""
        written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        finite = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        return json.dumps({"format": FORMAT, "written": written, **asdict(self), "metrics": finite}, indent=2).encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Read `manifest.json`; CheckpointError says what is wrong with it."""
        try:
            tree = json.loads(data)
            if tree["format"] != FORMAT:
                raise CheckpointError(f"its format is {tree['format']}, this version reads {FORMAT}")
            found = TypeAdapter(Manifest).validate_python(tree)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"its manifest is damaged ({error!r})") from error
        wanted = {"state.pt", *(rank_file(rank) for rank in range(found.world_size))}
        if missing := sorted(wanted - set(found.files)):
            raise CheckpointError(f"its manifest is damaged ({missing[0]} does not stand in it)")
        return found


def rank_file(rank: int) -> str:
    """Name of the file that holds one rank's random state."""
    return f"rank-{rank:05d}.pt"


def folder_name(step: int) -> str:
    """Name of a checkpoint: sorted as text, checkpoints are sorted by step."""
    return f"step-{step:012d}"


@dataclass(frozen=True)
class Best:
    """Which metric makes a checkpoint the best one, and in which direction."""

    metric: str
    smaller: bool

    @staticmethod
    def of(config: CheckpointConfig) -> Best | None:
        """As the configuration has it; None when it names no metric."""
        if config.best is None:
            return None
        smaller = config.best_mode == "min" if config.best_mode else config.best.endswith(("loss", "error"))
        return Best(config.best, smaller)

    def improves(self, figures: Mapping[str, float], before: float | None) -> bool:
        """Whether an evaluation is strictly better than the value that was best `before`; NaN never is.

        Raises ConfigError when the task does not report this metric.
        """
        if self.metric not in figures:
            rule, fix = "is no metric of this task's evaluation", f"use one of {', '.join(sorted(figures))}"
            raise ConfigError("checkpoint.best", self.metric, rule, fix)
        value = figures[self.metric]
        return math.isfinite(value) and (before is None or (value < before if self.smaller else value > before))

    def ranked(self, manifests: Mapping[str, Manifest]) -> list[str]:
        """Names of the checkpoints whose step was evaluated, best first, of equal ones the earliest."""
        values = {name: found.metrics[self.metric] for name, found in manifests.items() if self.metric in found.metrics}
        sign = 1 if self.smaller else -1
        return sorted(values, key=lambda name: (sign * values[name], name))


def surplus(names: Iterable[str], complete: Iterable[str], newest: str, keep: int, best: str | None) -> list[str]:
    """Which of the checkpoints `names` are deleted once `newest` is complete.

    The last `keep` complete ones stay, and the `best`. What lies after `newest` can only be a damaged part of the run
    that is being done again.
    """
    stay = {*sorted(name for name in complete if name <= newest)[-keep:], newest, best}
    return sorted(set(names) - stay)
