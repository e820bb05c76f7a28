"""Checks cluster files, and says what fits on them for how many dollars an hour; nothing is started.

run as:
    python -m cluster validate FILE... [--strict]
    python -m cluster plan FILE --workers N [--cpus-per-worker C] [--gpus-per-worker G] [--price TYPE=USD]...

Exit codes: 0 in order; 1 warnings, with --strict; 2 errors, or N workers never fit.
"""

from __future__ import annotations

import argparse
import datetime as dt
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cluster.capacity import NodeType, cost, grow, nodes_of, smallest, total, worker_slots
from cluster.prices import STALE_AFTER_DAYS, Price, load_prices
from trainers.errors import MISSING, ConfigError

if TYPE_CHECKING:
    from cluster.config import ClusterFile


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        if options.command == "validate":
            return validate(options.files, options.strict)
        worker = (options.cpus_per_worker, options.gpus_per_worker)
        return plan(options.file, options.workers, *worker, dict(options.price))
    except ConfigError as error:
        _say("error", str(error))
        return error.exit_code


def validate(files: Sequence[str], strict: bool) -> int:
    """Print every error and warning of every file on stderr; return the exit code."""
    from cluster.config import load_cluster
    from cluster.findings import findings

    num_errors = num_warnings = 0
    for file in files:
        try:
            cluster = load_cluster(file)
        except ConfigError as error:
            _say("error", str(error))
            num_errors += 1
            continue
        found = findings(cluster)
        for finding in found:
            _say(finding.level, f"{file}: {finding}")
        num_errors += sum(finding.level == "error" for finding in found)
        num_warnings += sum(finding.level == "warning" for finding in found)
        if not found:
            print(f"{file}: in order ({cluster.provider}, up to {_workers_at_most(cluster)} worker nodes)")
    if num_errors:
        return 2
    return 1 if strict and num_warnings else 0


def plan(
    file: str,
    num_workers: int,
    cpus_per_worker: float,
    gpus_per_worker: float | None,
    given_usd_per_hour: dict[str, float],
) -> int:
    """Print what fits now, for one group and when fully grown; ConfigError when one group never fits.

    `gpus_per_worker` None: 1 where a worker node has GPUs, else 0.
    """
    from cluster.config import load_cluster

    cluster = load_cluster(file)
    types = cluster.node_types
    if gpus_per_worker is None:
        gpus_per_worker = float(any(node_type.resources.get("GPU") for node_type in types))
    if cpus_per_worker == gpus_per_worker == 0:
        rule = "and --gpus-per-worker cannot both be 0"
        raise ConfigError("--cpus-per-worker", MISSING, rule, "give a worker a CPU or a GPU")
    _resources_known(cluster)
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
        shown = f"at least {bill.usd_per_hour:.2f}" if bill.missing else f"{bill.usd_per_hour:.2f}"
        cells = f"{len(nodes):>7}{total(nodes, 'CPU'):>7g}{total(nodes, 'GPU'):>6g}{slots:>9}"
        print(f"{label:14}{cells}{slots // num_workers:>14}  {shown}")
    print("Nodes count the head. " + " ".join(_remarks(types, most)))
    for line in _price_lines(cluster, prices, given_usd_per_hour, dt.datetime.now(dt.UTC).date()):
        print(line)
    return 0


def _workers_at_most(cluster: ClusterFile) -> int:
    return min(cluster.max_workers, cluster.sum_max_workers)


def _resources_known(cluster: ClusterFile) -> None:
    for node_type in cluster.node_types:
        if "CPU" not in node_type.resources:
            field = f"available_node_types.{node_type.name}.resources"
            fix = "write `resources: {CPU: n, GPU: n}`"
            if cluster.provider == "local":
                fix = "ask the running cluster with `ray status`"
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster", description="Check and plan cluster files.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("validate", help="check `ray up` files, offline")
    check.add_argument("files", nargs="+", metavar="FILE")
    check.add_argument("--strict", action="store_true", help="exit with 1 on warnings")
    sized = commands.add_parser("plan", help="what fits, for how many dollars an hour")
    sized.add_argument("file", metavar="FILE")
    sized.add_argument("--workers", type=_count, required=True, metavar="N", help="workers of one group")
    sized.add_argument("--cpus-per-worker", type=_amount, default=1.0, metavar="C", help="default: 1")
    sized.add_argument("--gpus-per-worker", type=_amount, metavar="G", help="default: 1 where a node has GPUs, else 0")
    sized.add_argument("--price", type=_price, action="append", default=[], metavar="TYPE=USD", help="dollars an hour")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {text}, but must be at least 1")
    return number


def _amount(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"is {text}, but must be at least 0")
    return number


def _price(text: str) -> tuple[str, float]:
    name, equals, usd_per_hour = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f'is "{text}", but must be TYPE=USD, such as g5.xlarge=1.01')
    return name, _amount(usd_per_hour)


def _say(level: str, text: str) -> None:
    for line in text.splitlines():
        print(f"{level}: {line}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
