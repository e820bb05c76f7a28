"""A checkpoint's manifest, and which checkpoints of a run are kept.

The manifest is written last: a checkpoint with a manifest is complete.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trainers.config.model import Tree
from trainers.config.sections import (
    Mode,
    check_metric,
    direction_of,
)
from trainers.config.train import IDENTITY
from trainers.errors import CheckpointError, show
from trainers.storage import parse_json, validated

FORMAT = 2


Figures = Mapping[str, float]
"""The figures of an evaluation, by name."""


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    step: int
    world_size: int
    files: dict[str, FileEntry]
    """The checkpoint's files, by name."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The finite figures of an evaluation at this very step; empty if this step
    was not evaluated.
    """
    versions: dict[str, str] = field(default_factory=dict)
    config: Tree = field(default_factory=dict)
    """The resolved TrainConfig of the run."""
    format: int = FORMAT

    def to_json(self) -> bytes:
        """Return the content of `manifest.json`."""
        written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        finite = {
            name: value
            for name, value in self.metrics.items()
            if math.isfinite(value)
        }
        plain = json.loads(
            json.dumps({**asdict(self), "metrics": finite, "written": written})
        )
        return seal(plain)

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Read `manifest.json`; CheckpointError if it is damaged or was changed."""
        try:
            tree = parse_json(data, Tree)
            tree.pop("seal", None)
            written_as = tree.get("format")
            if written_as == FORMAT:
                if seal(tree) != data:
                    raise CheckpointError(
                        "the content does not match the seal"
                    )
                return validated(tree, Manifest)
        except CheckpointError as error:
            raise CheckpointError(
                f"its manifest is damaged or was changed: {error}"
            ) from None
        raise CheckpointError(
            f"its manifest has format {show(written_as)}, and this version of Paceline reads format {FORMAT}"
        )

    @property
    def is_sharded(self) -> bool:
        """Whether each rank wrote its rows of the tensors (_row_shards.py)."""
        return shard_file(0) in self.files

    def require_run(self, config: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless a run with this `config` wrote the checkpoint.

        The error names the key that differs.
        """
        for key in IDENTITY:
            was = self.config.get(key)
            now = json.loads(json.dumps(config.get(key)))
            if was != now:
                raise CheckpointError(
                    f"it belongs to another run: it was trained with {key} {json.dumps(was)}, and this run has {json.dumps(now)}"
                )


def seal(tree: Tree) -> bytes:
    """Return a manifest as it is written to storage.

    Its last key is the SHA-256 of the same text without that key.

    Each content has exactly one text, so any changed byte is detected.
    """
    digest = hashlib.sha256(json.dumps(tree, indent=2).encode()).hexdigest()
    return json.dumps({**tree, "seal": digest}, indent=2).encode()


def rank_file(rank: int) -> str:
    """Return the name of the file with one rank's random state."""
    return f"rank-{rank:05d}.pt"


def shard_file(rank: int) -> str:
    """Return the name of the file with one rank's rows of the tensors."""
    return f"shard-{rank:05d}.safetensors"


def folder_name(step: int) -> str:
    """Return a checkpoint's name; names sorted as text are in the order of steps."""
    return f"step-{step:012d}"


@dataclass(frozen=True)
class Best:
    """The metric that ranks evaluations, and which direction is better."""

    metric: str
    smaller: bool
    key: str = "checkpoint.best"
    """The configuration key that names the metric."""

    @staticmethod
    def of(
        metric: str | None, mode: Mode | None, key: str = "checkpoint.best"
    ) -> Best | None:
        """Make a Best from a metric and its mode; None without a metric."""
        if metric is None:
            return None
        return Best(metric, (mode or direction_of(metric)) == "min", key)

    def improves(self, figures: Figures, before: float | None) -> bool:
        """Return whether an evaluation is strictly better than the value `before`.

        NaN is never better.

        Raises ConfigError if the task does not report this metric.
        """
        check_metric(self.key, self.metric, figures)
        value = figures[self.metric]
        if before is None or not math.isfinite(value):
            return math.isfinite(value)
        return value < before if self.smaller else value > before

    def ranked(self, manifests: Mapping[str, Manifest]) -> list[str]:
        """Return the checkpoints that were evaluated for this metric, best first.

        Of equally good checkpoints, the earliest comes first.
        """
        values = {
            name: found.metrics[self.metric]
            for name, found in manifests.items()
            if self.metric in found.metrics
        }
        sign = 1 if self.smaller else -1
        return sorted(values, key=lambda name: (sign * values[name], name))


def surplus(
    names: Iterable[str],
    complete: Iterable[str],
    newest: str,
    keep: int,
    best: str | None,
) -> list[str]:
    """Return which checkpoints in `names` to delete once `newest` is complete.

    The last `keep` complete checkpoints and the `best` are kept. Anything
    after `newest` can only be a damaged leftover of steps that the run is
    repeating.
    """
    stay = {
        *sorted(name for name in complete if name <= newest)[-keep:],
        newest,
        best,
    }
    return sorted(set(names) - stay)
