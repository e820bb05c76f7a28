"""What a check knows of a cluster and its nodes, as plain data; `check --json` prints it as it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cluster.finding import Finding

Kind = Literal["matmul", "network", "local disk", "storage"]
"""What is measured of every node that trains."""


@dataclass(frozen=True)
class Rate:
    """One figure that is compared between nodes: higher is better."""

    kind: Kind
    what: str
    """What was measured, such as `matmul of cuda:3` or `writing to storage`."""
    value: float
    unit: str


@dataclass(frozen=True)
class GpuHealth:
    """What NVML says of one GPU."""

    index: int
    name: str
    uncorrected_errors: int = 0
    """Memory errors since the driver was loaded that ECC could not correct."""
    rows_failed: bool = False
    """A defective row could not be replaced, or its replacement waits for a reset."""
    slowed_by: tuple[str, ...] = ()
    other_processes: int = 0
    failure: str | None = None
    """Why NVML says nothing of it."""


@dataclass(frozen=True)
class NodeFacts:
    """What is known of one node that is alive."""

    node_id: str
    host: str
    address: str
    trains: bool
    """Whether it has CPUs or GPUs for workers; a head often has none."""
    silent_in: str | None = None
    """The part of the check in which it gave no answer; nothing later is known of it."""
    failure: str | None = None
    """What it answered instead of a result."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    clock_offset_s: float | None = None
    """Its clock less the mean of all."""
    clock_error_s: float = 0.0
    """The offset is known to within this."""
    own_address: str | None = None
    """What its own name resolves to."""
    storage: str | None = None
    """What is wrong with the shared storage here; None when a marker went both ways."""
    device: str = ""
    """Model of its CPU or GPUs; rates are compared between equal ones."""
    num_gpus: int = 0
    """As Ray counts them."""
    gpus: tuple[GpuHealth, ...] | None = None
    """None where NVML does not answer."""
    rates: tuple[Rate, ...] = ()


@dataclass(frozen=True)
class LostNode:
    """A node that died unexpectedly and did not come back."""

    node_id: str
    host: str
    address: str
    reason: str


@dataclass(frozen=True)
class Collective:
    """One all-reduce over a group of devices."""

    between: str
    num_ranks: int
    mb_per_s: float | None = None
    """Bus bandwidth, as NCCL's own tests define it: what each rank's link carries."""
    failure: str | None = None
    wrong_on: tuple[str, ...] = ()
    """Node ids where the sum was not the right one."""


@dataclass(frozen=True)
class ClusterFacts:
    """All that a check has found out."""

    nodes: tuple[NodeFacts, ...]
    lost: tuple[LostNode, ...] = ()
    workers_wanted: int | None = None
    collectives: tuple[Collective, ...] = ()
    reference: Mapping[str, str | None] = field(default_factory=dict)
    """Versions where the check was started: they decide where the nodes are split in halves."""


@dataclass(frozen=True)
class NodeFinding:
    """A remark on one node, or on the cluster where `node_id` is empty."""

    node_id: str
    host: str
    finding: Finding

    def __str__(self) -> str:
        return f"{self.host}: {self.finding}"
