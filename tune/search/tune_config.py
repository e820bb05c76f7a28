"""Trials as Ray Tune's configurations hold them: wrapped and unwrapped here and nowhere else. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tune.trials.stop_rule import Purpose

_KEY = "suggestion"


@dataclass(frozen=True)
class Suggestion:
    """A trial that a search asks for."""

    trial: dict[str, Any]
    """Dotted TrainConfig keys and their values."""
    purpose: Purpose | None = None
    """Set by search frontier, whose trials end when they have shown enough."""
    member: str | None = None
    """The trial's id, in a population, where the values change."""


def wrap(suggestion: Suggestion) -> dict[str, Any]:
    """Return Tune's configuration of a suggestion: all of it under one key."""
    return {_KEY: {name: value for name, value in vars(suggestion).items() if value is not None}}


def unwrap(config: Mapping[str, Any]) -> Suggestion:
    """Return the suggestion that a configuration holds; without the key it is a trial that Tune drew key by key."""
    return Suggestion(**config[_KEY]) if _KEY in config else Suggestion(dict(config))
