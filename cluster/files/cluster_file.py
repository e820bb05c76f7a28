"""What Paceline knows of a cluster file of any kind, and the reading of its YAML; needs no Ray."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.files.capacity import NodeType
from trainers.config.yaml import parse_documents, read_text
from trainers.errors import MISSING, ConfigError


@dataclass(frozen=True)
class ClusterFile:
    """A cluster that Ray or KubeRay would accept, with defaults filled in."""

    source: str
    """The path it was read from, and of several documents which one, for messages."""
    name: str
    provider: str
    """aws, gcp, azure, local, kuberay, ..."""
    max_workers: int
    """The most worker nodes that may be up at once, over all types."""
    node_types: tuple[NodeType, ...]
    written: Mapping[str, Any]
    """What the file says."""
    config: Mapping[str, Any]
    """What Ray makes of it; of a KubeRay document its RayCluster spec."""
    region: str | None = None
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The shell commands by the field they stand in, Ray's defaults where the file has none; KubeRay has none."""

    @property
    def sum_max_workers(self) -> int:
        """The sum of all types' limits; `max_workers` may be lower or higher."""
        return sum(node_type.max_workers for node_type in self.node_types)


def read_documents(path: Path, source: str) -> list[Any]:
    """Read the YAML documents of a file; ConfigError with line and column for what is no YAML."""
    try:
        text = read_text(path, source)
    except FileNotFoundError as error:
        raise ConfigError("the file", MISSING, "does not exist", "give the path of a cluster YAML", source) from error
    return parse_documents(text, source)


def join(field: str, key: object) -> str:
    """Return a dotted path one step deeper."""
    return f"{field}.{key}" if field else str(key)
