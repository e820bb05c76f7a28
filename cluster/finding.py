"""One remark on a cluster file, in the form of Paceline's errors: field, value, rule and fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainers.errors import ConfigError

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One remark on a cluster file: field, value, rule and fix.

    An error is what would not work, or would run the code of strangers; a warning what may be meant so.
    """

    level: Level
    field: str
    value: Any
    rule: str
    fix: str

    def __str__(self) -> str:
        return str(ConfigError(self.field, self.value, self.rule, self.fix))
