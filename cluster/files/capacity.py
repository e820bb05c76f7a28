"""Nodes and their resources: how many workers fit, and the price per hour."""

import csv
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

PRICES = Path(__file__).with_name("prices.csv")

# Ray counts resources in units of 1/10000, and a float sum such as 3 * 0.1 has
# a rounding error.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class NodeType:
    """One kind of node that a cluster file may start."""

    name: str
    resources: Mapping[str, float] = field(default_factory=dict)
    """The resources that one such node offers to Ray: {"CPU": 8, "GPU": 1}."""
    min_workers: int = 0
    """How many worker nodes of this type are always up."""
    max_workers: int = 0
    """How many worker nodes of this type may be up."""
    is_head: bool = False
    """Whether the head node is of this type, in addition to the worker nodes."""
    instance_type: str | None = None
    """The cloud's name for the machine; None on premises."""
    spot: bool = False
    """Whether the machine is spot (preemptible): cheaper, and taken back at
    short notice.
    """
    priority: int = 0
    """If several types fit equally well, Ray starts the one with the highest priority."""


@dataclass(frozen=True)
class Cost:
    """The price per hour of a set of nodes."""

    usd_per_hour: float | None
    """The price if spot nodes cost the on-demand price, which is their
    maximum; None if a price is missing.
    """
    missing: tuple[str, ...] = ()
    """Node types whose price is not known."""
    spot_usd_per_hour: float | None = None
    """The price if spot nodes cost their spot prices; None if there is no spot
    node, or if a spot price is not known.
    """


@dataclass(frozen=True)
class Price:
    """One instance type's list prices in a region (Linux, shared tenancy)."""

    provider: str
    instance_type: str
    region: str
    gpus: int
    vcpus: int
    usd_per_hour: float
    spot_usd_per_hour: float | None
    """The median over the region's zones; None if unknown or not offered there."""


def worker_slots(
    nodes: Sequence[Mapping[str, float]],
    cpus_per_worker: float,
    gpus_per_worker: float,
) -> int:
    """Return how many workers fit at the same time, each on a single node.

    Workers are identical, so filling each node separately is optimal. Since a
    group may span nodes, the result `// num_workers` is the number of groups
    that fit. A worker must need at least one of the two resources.
    """
    return sum(
        _slots(node, cpus_per_worker, gpus_per_worker) for node in nodes
    )


def grow(
    node_types: Sequence[NodeType],
    max_workers: int,
    cpus_per_worker: float,
    gpus_per_worker: float,
    workers: int | None = None,
) -> dict[str, int]:
    """Return how many worker nodes of each type there are after growth.

    Nodes are added to those that are always up, within the limits of each type
    and of the cluster. The type with the most slots per node goes first, then
    the one with the higher priority. If `workers` is given, growth stops with
    the fewest nodes on which that many workers fit. If not, growth goes up to
    the limits.
    """
    counts = {
        node_type.name: node_type.min_workers for node_type in node_types
    }
    nodes = nodes_of(node_types, counts)
    slots = worker_slots(nodes, cpus_per_worker, gpus_per_worker)
    budget = max_workers - sum(counts.values())
    gains = [
        (_slots(t.resources, cpus_per_worker, gpus_per_worker), t)
        for t in node_types
    ]
    for gain, node_type in sorted(
        gains, key=lambda pair: (-pair[0], -pair[1].priority)
    ):
        if gain == 0:
            break
        room = max(
            0, min(budget, node_type.max_workers - node_type.min_workers)
        )
        if workers is not None:
            room = min(room, max(0, math.ceil((workers - slots) / gain)))
        counts[node_type.name] += room
        budget -= room
        slots += room * gain
    return counts


def nodes_of(
    node_types: Sequence[NodeType], counts: Mapping[str, int]
) -> list[Mapping[str, float]]:
    """Return the resources of the head and of each worker node.

    `counts` has the number of worker nodes of each type, by the type's name.
    """
    nodes: list[Mapping[str, float]] = []
    for node_type in node_types:
        num_nodes = counts.get(node_type.name, 0) + node_type.is_head
        nodes += [node_type.resources] * num_nodes
    return nodes


def total(nodes: Sequence[Mapping[str, float]], resource: str) -> float:
    """Sum one resource over all nodes."""
    return math.fsum(node.get(resource, 0) for node in nodes)


def cost(
    node_types: Sequence[NodeType],
    counts: Mapping[str, int],
    prices: Mapping[str, Price],
) -> Cost:
    """Return the price per hour of the head and all worker nodes.

    `counts` has the number of worker nodes of each node type, and `prices` has
    the price of each instance type, both by name.
    """
    usd_per_hour = []
    with_spot = []
    missing = []
    has_spot = False
    is_spot_known = True
    for node_type in node_types:
        num_nodes = counts.get(node_type.name, 0) + node_type.is_head
        if not num_nodes:
            continue
        known = prices.get(node_type.instance_type or "")
        if known is None:
            missing.append(node_type.name)
        price = known.usd_per_hour if known else 0.0
        usd_per_hour.append(num_nodes * price)
        if node_type.spot:
            has_spot = True
            spot_price = known.spot_usd_per_hour if known else None
            is_spot_known = is_spot_known and spot_price is not None
            price = spot_price or 0.0
        with_spot.append(num_nodes * price)
    return Cost(
        None if missing else math.fsum(usd_per_hour),
        tuple(missing),
        math.fsum(with_spot) if has_spot and is_spot_known else None,
    )


def _slots(
    node: Mapping[str, float], cpus_per_worker: float, gpus_per_worker: float
) -> int:
    amounts = {"CPU": cpus_per_worker, "GPU": gpus_per_worker}
    return min(
        math.floor(node.get(name, 0) / asked + _TOLERANCE)
        for name, asked in amounts.items()
        if asked
    )


def load_prices(provider: str, region: str | None = None) -> dict[str, Price]:
    """Return a provider's prices by instance type.

    If a price in `region` is unknown, the most expensive region's is used.
    """
    known = [price for price in read_prices() if price.provider == provider]
    known.sort(key=lambda price: (price.region == region, price.usd_per_hour))
    return {price.instance_type: price for price in known}


@functools.cache
def read_prices() -> tuple[Price, ...]:
    """Return all rows of prices.csv."""
    with PRICES.open(newline="", encoding="utf-8") as stream:
        rows = [
            {name: value or None for name, value in row.items()}
            for row in csv.DictReader(stream)
        ]
    return TypeAdapter(tuple[Price, ...]).validate_python(rows)
