"""What fits on the nodes of a cluster file, now and when it has grown, and what they cost an hour; starts nothing."""

import datetime as dt
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table

from cluster.files.capacity import Cost, cost, grow, nodes_of, smallest, total, worker_slots
from cluster.files.cluster_file import ClusterFile
from cluster.files.prices import Price, load_prices
from trainers.errors import MISSING, ConfigError, printable


@dataclass(frozen=True)
class Size:
    """A cluster with a number of worker nodes of each type beside its head."""

    counts: Mapping[str, int]
    nodes: Sequence[Mapping[str, float]]
    """The resources of every node, the head's among them."""
    num_workers: int
    """Workers that fit side by side."""
    cost: Cost

    @property
    def words(self) -> str:
        """Its worker nodes."""
        return ", ".join(f"{count} {name}" for name, count in self.counts.items() if count) or "no worker node"

    @property
    def usd_per_hour(self) -> str:
        """Its price in words: a lower bound, or unknown, where prices are missing."""
        if self.cost.missing and not self.cost.usd_per_hour:
            return "unknown"
        return f"{'at least ' if self.cost.missing else ''}{self.cost.usd_per_hour:.2f}"

    @property
    def spot_usd_per_hour(self) -> str:
        """The same with spot nodes at their spot prices; a dash where there are none, or their price is not known."""
        return "-" if self.cost.spot_usd_per_hour is None else f"{self.cost.spot_usd_per_hour:.2f}"


@dataclass(frozen=True)
class ClusterPlan:
    """Workers of one shape on the nodes of a cluster file."""

    cluster: ClusterFile
    """With the resources of every node type, see `with_resources`."""
    cpus_per_worker: float
    gpus_per_worker: float
    given_usd_per_hour: Mapping[str, float] = field(default_factory=dict)
    """By instance type; goes before the price table."""

    @functools.cached_property
    def prices(self) -> Mapping[str, Price]:
        """The price table's, by instance type: of the cluster's region where known."""
        return load_prices(self.cluster.provider, self.cluster.region)

    @property
    def title(self) -> str:
        """The cluster in words."""
        return f"{printable(self.cluster.name)} ({self.cluster.provider}, {self.cluster.region or 'no region'})"

    @property
    def worker(self) -> str:
        """A worker's shape in words."""
        gpus = f" and {self.gpus_per_worker:g} GPU" if self.gpus_per_worker else ""
        return f"{self.cpus_per_worker:g} CPU{gpus}"

    def now(self) -> Size:
        """The nodes that are always up."""
        return self._size(smallest(self.cluster.node_types))

    def grown(self, num_workers: int | None = None) -> Size:
        """The fewest nodes on which `num_workers` workers fit; None: all that the cluster may have."""
        shape = (self.cpus_per_worker, self.gpus_per_worker)
        return self._size(grow(self.cluster.node_types, self.cluster.max_workers, *shape, num_workers))

    def _size(self, counts: Mapping[str, int]) -> Size:
        types = self.cluster.node_types
        nodes = nodes_of(types, counts)
        usd_per_hour = {name: price.usd_per_hour for name, price in self.prices.items()} | dict(self.given_usd_per_hour)
        spot = {name: price.spot_usd_per_hour for name, price in self.prices.items()} | dict(self.given_usd_per_hour)
        known_spot = {name: usd for name, usd in spot.items() if usd is not None}
        num_workers = worker_slots(nodes, self.cpus_per_worker, self.gpus_per_worker)
        return Size(counts, nodes, num_workers, cost(types, counts, usd_per_hour, known_spot))

    def require(self, num_workers: int, field: str, value: object, source: str) -> None:
        """Raise ConfigError, of a `field` and its value in `source`, when `num_workers` workers never fit."""
        most = self.grown().num_workers
        if most < num_workers:
            file = "the file" if source == self.cluster.source else self.cluster.source
            rule = f"never fits: {file} can grow to {most} workers of {self.worker}"
            fix = "ask for fewer or smaller workers, or raise the cluster's max_workers"
            raise ConfigError(field, value, rule, fix, source)

    def remarks(self, size: Size | None = None) -> Iterator[str]:
        """Where each price is from, how old it is, and whether spot nodes cost less; of `size`: of its nodes only."""
        types = [t for t in self.cluster.node_types if size is None or t.is_head or size.counts.get(t.name)]
        today = dt.datetime.now(dt.UTC).date()
        for name in dict.fromkeys(node_type.instance_type for node_type in types):
            if name is None:
                yield "price unknown: the file names no machine, so there is no price to look up"
            elif name in self.given_usd_per_hour:
                yield f"price of {name}: {self.given_usd_per_hour[name]:g} USD/hour (--price)"
            elif price := self.prices.get(name):
                region = "" if price.region == self.cluster.region else f", not of {self.cluster.region}"
                spot = "none" if price.spot_usd_per_hour is None else f"{price.spot_usd_per_hour:g}"
                yield (
                    f"price of {name}: {price.usd_per_hour:g} USD/hour in {price.region}{region}, {spot} on spot; "
                    f"{price.age(today)} ({price.source})"
                )
            else:
                fix = f"`python -m cluster prices update`, or give it with --price {name}=USD"
                yield f"price of {name}: not in the price table; {fix}"
        if any(node_type.spot for node_type in types):
            yield "USD/hour counts spot nodes at the on-demand price, which is the most they cost."

    def show(self, num_workers: int) -> None:
        """Print what fits now, on the nodes of one group of `num_workers` workers, and fully grown."""
        print(f"{self.title}, workers of {self.worker}")
        table = Table(box=None, pad_edge=False)
        for column in ("", "nodes", "CPUs", "GPUs", "workers", f"groups of {num_workers}", "USD/hour", "on spot"):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        sizes = {"now": self.now(), "one group": self.grown(num_workers), "fully grown": self.grown()}
        for label, size in sizes.items():
            figures = (len(size.nodes), total(size.nodes, "CPU"), total(size.nodes, "GPU"), size.num_workers)
            groups = size.num_workers // num_workers
            counted = (f"{figure:g}" for figure in (*figures, groups))
            table.add_row(label, *counted, size.usd_per_hour, size.spot_usd_per_hour)
        Console(highlight=False).print(table)
        print(f"Nodes count the head. Fully grown: {sizes['fully grown'].words}.")
        print(*self.remarks(), sep="\n")


def with_resources(cluster: ClusterFile, per_node: Mapping[str, float] | None = None) -> ClusterFile:
    """The cluster file with the resources of every node type; `per_node`: of nodes of which the file says nothing.

    Raises ConfigError for a type whose processors are not known before the node is up.
    """
    types = tuple(replace(one, resources={**(per_node or {}), **one.resources}) for one in cluster.node_types)
    for node_type in types:
        if "CPU" not in node_type.resources:
            name = f"available_node_types.{node_type.name}.resources"
            fix = "write `resources: {CPU: n, GPU: n}`, or ask the running cluster with `ray status`"
            if cluster.provider == "local" and per_node is not None:
                name, fix = f"resources of a {node_type.name}", "give --cpus-per-node and --gpus-per-node"
            raise ConfigError(name, MISSING, "is not known before the node is up", fix, cluster.source)
    return replace(cluster, node_types=types)


def has_gpus(cluster: ClusterFile) -> bool:
    """Whether some node has a GPU."""
    return any(node_type.resources.get("GPU") for node_type in cluster.node_types)
