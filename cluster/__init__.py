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
    """A problem in a cluster file or on a node.

    Level "error" means that the setup would not work, or would not be secure.
    Level "warning" means that the setup may be intended.
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
