"""Check cluster files, say what fits on them for how many dollars an hour, and examine live clusters.

`validate` and `plan` start nothing; `check` joins the cluster that RAY_ADDRESS names (as a Ray job: its own), and
runs a few seconds on each node.

Exit codes: 0 in order; 1 warnings, with --strict, a node that is not in order, or torch sees no GPU where the driver
has one; 2 errors in a file or on the command line, or N workers never fit.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from cluster.files.capacity import NodeType, cost, grow, nodes_of, smallest, total, worker_slots
from cluster.files.prices import STALE_AFTER_DAYS, Price, load_prices
from trainers.command_line import complain, run
from trainers.errors import MISSING, ConfigError

if TYPE_CHECKING:
    from cluster.files.cluster_file import ClusterFile

_Host = Annotated[float | None, Field(ge=0, title="C", description="of hosts that the file says nothing of")]
_Gpus = Annotated[float | None, Field(ge=0, title="G", description="default: 1 where a node has GPUs, else 0")]
_Price = Annotated[str, Field(pattern=r"^[^=]+=[0-9]*\.?[0-9]+$")]
_Prices = Annotated[
    tuple[_Price, ...],
    Field(title="TYPE=USD", description="dollars an hour of a machine", json_schema_extra={"rule": "must be TYPE=USD"}),
]
_Nodes = Annotated[int | None, Field(ge=1, title="N", description="wait for N nodes that train; an error with fewer")]
_Uri = Annotated[str | None, Field(title="URI", description="what all nodes must share; default: $PACELINE_STORAGE")]


def validate(
    files: Annotated[tuple[str, ...], Field(title="FILE...", description="a `ray up` file, or one with RayClusters")],
    *,
    strict: Annotated[bool, Field(description="exit with 1 on warnings")] = False,
) -> int:
    """Check `ray up` and KubeRay files, offline: every error and warning of every file is printed."""
    from cluster.files.ray_up import load_clusters
    from cluster.rules.ray_up import findings

    num_errors = num_warnings = 0
    for file in files:
        try:
            clusters = load_clusters(file)
        except ConfigError as error:
            complain(str(error))
            num_errors += 1
            continue
        for cluster in clusters:
            found = findings(cluster)
            for finding in found:
                complain(f"{cluster.source}: {finding}", finding.level)
            num_errors += sum(finding.level == "error" for finding in found)
            num_warnings += sum(finding.level == "warning" for finding in found)
            if not found:
                at_most = min(cluster.max_workers, cluster.sum_max_workers)
                print(f"{cluster.source}: in order ({cluster.provider}, up to {at_most} worker nodes)")
    if num_errors:
        return 2
    return 1 if strict and num_warnings else 0


def plan_workers(
    file: Annotated[str, Field(description="a `ray up` file, or one with a RayCluster")],
    *,
    workers: Annotated[int, Field(ge=1, title="N", description="workers of one group")],
    cpus_per_worker: Annotated[float, Field(ge=0, title="C", description="CPUs of a worker")] = 1,
    gpus_per_worker: _Gpus = None,
    price: _Prices = (),
    cpus_per_node: _Host = None,
    gpus_per_node: _Host = None,
) -> int:
    """Say what fits on a cluster, for how many dollars an hour."""
    usd_per_hour = {name: float(usd) for name, _, usd in (given.rpartition("=") for given in price)}
    per_node = {"CPU": cpus_per_node, "GPU": gpus_per_node}
    return plan(file, workers, cpus_per_worker, gpus_per_worker, usd_per_hour, per_node)


def check(
    *,
    local: Annotated[bool, Field(description="this machine alone: what it has, how fast it multiplies")] = False,
    workers: _Nodes = None,
    wait_s: Annotated[float, Field(ge=0, title="S", description="how long, in seconds")] = 120,
    storage_path: _Uri = None,
    quick: Annotated[bool, Field(description="versions, clocks and storage alone")] = False,
    exclude_bad: Annotated[bool, Field(description="print the label selector of the nodes in order")] = False,
    as_json: Annotated[bool, Field(alias="json", description="all of it as JSON")] = False,
) -> int:
    """Examine the nodes of the cluster that RAY_ADDRESS names, or this machine."""
    if local:
        from cluster.health.local import check_local

        return check_local(as_json)
    from cluster.health.check import check

    return check(storage_path, workers, wait_s, as_json, exclude_bad, quick)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return run("python -m cluster", __doc__, {"validate": validate, "plan": plan_workers, "check": check}, argv)


def plan(
    file: str,
    num_workers: int,
    cpus_per_worker: float,
    gpus_per_worker: float | None,
    given_usd_per_hour: dict[str, float],
    per_node: dict[str, float | None] | None = None,
) -> int:
    """Print what fits now, for one group and when fully grown; ConfigError when one group never fits.

    `gpus_per_worker` None: 1 where a worker node has GPUs, else 0. `per_node` holds the CPU and GPU of nodes whose
    resources the file does not say.
    """
    from cluster.files.ray_up import load_cluster

    cluster = load_cluster(file)
    told = {name: amount for name, amount in (per_node or {}).items() if amount is not None}
    types = tuple(replace(node_type, resources=told | dict(node_type.resources)) for node_type in cluster.node_types)
    if gpus_per_worker is None:
        gpus_per_worker = float(any(node_type.resources.get("GPU") for node_type in types))
    if cpus_per_worker == gpus_per_worker == 0:
        rule = "and --gpus-per-worker cannot both be 0"
        raise ConfigError("--cpus-per-worker", MISSING, rule, "give a worker a CPU or a GPU")
    _resources_known(cluster, types)
    prices = load_prices()
    usd_per_hour = {name: price.usd_per_hour for name, price in prices.items()} | given_usd_per_hour

    most = grow(types, cluster.max_workers, cpus_per_worker, gpus_per_worker)
    max_slots = worker_slots(nodes_of(types, most), cpus_per_worker, gpus_per_worker)
    worker = f"{cpus_per_worker:g} CPU and {gpus_per_worker:g} GPU"
    if max_slots < num_workers:
        rule = f"never fits: the file can grow to {max_slots} workers of {worker}"
        fix = "ask for fewer or smaller workers, or raise max_workers"
        raise ConfigError("--workers", num_workers, rule, fix, file)

    one = grow(types, cluster.max_workers, cpus_per_worker, gpus_per_worker, num_workers)
    print(f"{cluster.name} ({cluster.provider}, {cluster.region or 'no region'}), workers of {worker}")
    groups = f"groups of {num_workers}"
    print(f"{'':14}{'nodes':>7}{'CPUs':>7}{'GPUs':>6}{'workers':>9}{groups:>14}  USD/hour")
    for label, counts in (("now", smallest(types)), ("one group", one), ("fully grown", most)):
        nodes = nodes_of(types, counts)
        slots = worker_slots(nodes, cpus_per_worker, gpus_per_worker)
        bill = cost(types, counts, usd_per_hour)
        known = f"{'at least ' if bill.missing else ''}{bill.usd_per_hour:.2f}"
        shown = "unknown" if bill.missing and not bill.usd_per_hour else known
        cells = f"{len(nodes):>7}{total(nodes, 'CPU'):>7g}{total(nodes, 'GPU'):>6g}{slots:>9}"
        print(f"{label:14}{cells}{slots // num_workers:>14}  {shown}")
    print("Nodes count the head. " + " ".join(_remarks(types, most)))
    for line in _price_lines(cluster, prices, given_usd_per_hour, dt.datetime.now(dt.UTC).date()):
        print(line)
    return 0


def _resources_known(cluster: ClusterFile, types: Iterable[NodeType]) -> None:
    for node_type in types:
        if "CPU" not in node_type.resources:
            field = f"available_node_types.{node_type.name}.resources"
            fix = "write `resources: {CPU: n, GPU: n}`"
            if cluster.provider == "local":
                field = f"resources of a {node_type.name}"
                fix = "give --cpus-per-node and --gpus-per-node"
            raise ConfigError(field, MISSING, "is not known before the node is up", fix, cluster.source)


def _remarks(types: Iterable[NodeType], most: dict[str, int]) -> Iterable[str]:
    grown = ", ".join(f"{num_nodes} {name}" for name, num_nodes in most.items() if num_nodes)
    yield f"Fully grown: {grown or 'no worker node'}."
    if any(node_type.spot for node_type in types):
        yield "Spot nodes are counted at the on-demand price, which is the most they cost."


def _price_lines(
    cluster: ClusterFile, prices: dict[str, Price], given_usd_per_hour: dict[str, float], today: dt.date
) -> Iterable[str]:
    """Where each price is from and how old it is."""
    for name in dict.fromkeys(node_type.instance_type for node_type in cluster.node_types):
        if name is None:
            yield "price unknown: the file names no machine, so there is no price to look up"
        elif name in given_usd_per_hour:
            yield f"price of {name}: {given_usd_per_hour[name]:g} USD/hour (--price)"
        elif price := prices.get(name):
            region = "" if price.region == cluster.region else f", not of {cluster.region}"
            stale = f", STALE: over {STALE_AFTER_DAYS} days, look it up" if price.is_stale(today) else ""
            yield (
                f"price of {name}: {price.usd_per_hour:g} USD/hour in {price.region}{region}, "
                f"{price.age_days(today)} days old{stale} ({price.source})"
            )
        else:
            yield f"price of {name}: not in prices.csv; give it with --price {name}=USD"


if __name__ == "__main__":
    raise SystemExit(main())
