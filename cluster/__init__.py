"""Clusters: files for `ray up` and Slurm, live nodes, and spot machines.

The entry point is `python -m cluster` (cluster/__main__.py).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from trainers.errors import ConfigError

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One finding.

    An error marks what would not work, or would let strangers run code. A warning marks
    what may be intended.
    """

    level: Level
    field: str
    value: Any
    rule: str
    fix: str

    def __str__(self) -> str:
        return str(ConfigError(self.field, self.value, self.rule, self.fix))


error = partial(Finding, "error")
warning = partial(Finding, "warning")
