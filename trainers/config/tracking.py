"""The key `tracking`: the experiment trackers that are told of a run or a sweep."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from trainers.config.model import Settings
from trainers.errors import ConfigError, did_you_mean

PACKAGES: Mapping[str, str | None] = {
    "mlflow": "mlflow",
    "wandb": "wandb",
    "trackio": "trackio",
    "tensorboard": None,
    "csv": None,
}
"""Every tracker by its name, and the package that it needs."""
_OWN_SINK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class TrackerConfig(Settings):
    """One experiment tracker."""

    tracker: str = Field(max_length=256, examples=["mlflow"])
    """mlflow, wandb, trackio, tensorboard, csv, or a sink of your own as
    `module:Class`.
    """
    project: str | None = Field(
        default=None, min_length=1, max_length=128, examples=["digits"]
    )
    """The project (W&B, trackio) or experiment (MLflow) that runs go to."""


def chosen(tracking: Sequence[str | TrackerConfig]) -> list[TrackerConfig]:
    """Return every entry of the key as a mapping has it."""
    return [
        TrackerConfig(tracker=one) if isinstance(one, str) else one for one in tracking
    ]


def _check(tracking: list[str | TrackerConfig]) -> list[str | TrackerConfig]:
    names = [one.tracker for one in chosen(tracking)]
    for one in chosen(tracking):
        if one.tracker not in PACKAGES and not _OWN_SINK.fullmatch(one.tracker):
            listed = f"there are {', '.join(PACKAGES)}, and your own as `module:Class`"
            fix = did_you_mean(one.tracker, PACKAGES, listed)
            raise ConfigError("", one.tracker, "is no tracker", fix)
        if names.count(one.tracker) > 1:
            raise ConfigError("", one.tracker, "is listed twice", "keep one of the two")
        if one.project is not None and PACKAGES.get(one.tracker, "") is None:
            raise ConfigError(
                "", one.project, f"has no effect with {one.tracker}", "remove `project`"
            )
    return tracking


Tracking = Annotated[list[str | TrackerConfig], AfterValidator(_check)]
