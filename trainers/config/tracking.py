"""The key `tracking`: the experiment trackers that are told of a run or a sweep."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from trainers.config.model import Settings
from trainers.errors import ConfigError, did_you_mean

TRACKERS = ("mlflow", "wandb", "tensorboard")
"""All but a user's own; each needs a package of its name but for the last."""
_OWN_SINK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class TrackerConfig(Settings):
    """One experiment tracker."""

    tracker: str = Field(max_length=256, examples=["mlflow"])
    """mlflow, wandb, tensorboard, or a sink of your own as `module:Class`."""
    project: str | None = Field(
        default=None, min_length=1, max_length=128, examples=["digits"]
    )
    """The project (W&B) or experiment (MLflow) that runs go to."""


def chosen(tracking: Sequence[str | TrackerConfig]) -> list[TrackerConfig]:
    """Return every entry of the key as a mapping has it."""
    return [
        TrackerConfig(tracker=entry) if isinstance(entry, str) else entry
        for entry in tracking
    ]


def _check(tracking: list[str | TrackerConfig]) -> list[str | TrackerConfig]:
    known = set()
    for entry in chosen(tracking):
        name = entry.tracker
        if name not in TRACKERS and not _OWN_SINK.fullmatch(name):
            listed = f"there are {', '.join(TRACKERS)}, and your own as `module:Class`"
            fix = did_you_mean(name, TRACKERS, listed)
            raise ConfigError("", name, "is no tracker", fix)
        if name in known:
            raise ConfigError("", name, "is listed twice", "keep one of the two")
        known.add(name)
        if entry.project is not None and name == "tensorboard":
            rule = f"has no effect with {name}"
            raise ConfigError("", entry.project, rule, "remove `project`")
    return tracking


Tracking = Annotated[list[str | TrackerConfig], AfterValidator(_check)]
