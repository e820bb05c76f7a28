"""Checks cluster files, says what fits on them for how many dollars an hour, and examines live clusters.

run as:
    python -m cluster validate FILE... [--strict]
    python -m cluster plan FILE --workers N [--cpus-per-worker C] [--gpus-per-worker G] [--price TYPE=USD]...
                           [--cpus-per-node C --gpus-per-node G]
    python -m cluster check [--workers N] [--quick] [--storage_path URI] [--exclude-bad] [--json]
    python -m cluster check --local [--json]

`validate` and `plan` start nothing; `check` joins the cluster that RAY_ADDRESS names (as a Ray job: its own), and
runs a few seconds on each node. Exit codes: 0 in order; 1 warnings, with --strict, a node that is not in order, or
torch sees no GPU where the driver has one; 2 errors in a file, or N workers never fit.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainers.errors import MISSING, ConfigError

if TYPE_CHECKING:
    from cluster.files.cluster_file import ClusterFile


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        if options.command == "validate":
            return validate(options.files, options.strict)
        if options.command == "check":
            return _check(options)
        worker = (options.cpus_per_worker, options.gpus_per_worker)
        per_node = {"CPU": options.cpus_per_node, "GPU": options.gpus_per_node}
        return plan(options.file, options.workers, *worker, dict(options.price), per_node)
    except ConfigError as error:
        _say("error", str(error))
        return error.exit_code


def _check(options: argparse.Namespace) -> int:
    if options.local:
        from cluster.health.local import check_local

        return check_local(options.json)
    from cluster.health.check import check

    where = (options.storage_path, options.workers, options.wait_s)
    return check(*where, options.json, options.exclude_bad, options.quick)


def validate(files: Sequence[str], strict: bool) -> int:
    """Print every error and warning of every file on stderr; return the exit code."""
    from cluster.files.ray_up import load_clusters
    from cluster.rules.ray_up import findings

    num_errors = num_warnings = 0
    for file in files:
        try:
            clusters = load_clusters(file)
        except ConfigError as error:
            _say("error", str(error))
            num_errors += 1
            continue
        for cluster in clusters:
            found = findings(cluster)
            for finding in found:
                _say(finding.level, f"{cluster.source}: {finding}")
            num_errors += sum(finding.level == "error" for finding in found)
            num_warnings += sum(finding.level == "warning" for finding in found)
            if not found:
                at_most = _workers_at_most(cluster)
                print(f"{cluster.source}: in order ({cluster.provider}, up to {at_most} worker nodes)")
    if num_errors:
        return 2
    return 1 if strict and num_warnings else 0


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
    from cluster.plan import ClusterPlan, has_gpus, with_resources

    told = {name: amount for name, amount in (per_node or {}).items() if amount is not None}
    cluster = with_resources(load_cluster(file), told)
    gpus = float(has_gpus(cluster)) if gpus_per_worker is None else gpus_per_worker
    if cpus_per_worker == gpus == 0:
        rule = "and --gpus-per-worker cannot both be 0"
        raise ConfigError("--cpus-per-worker", MISSING, rule, "give a worker a CPU or a GPU")
    planned = ClusterPlan(cluster, cpus_per_worker, gpus, given_usd_per_hour)
    planned.require(num_workers, "--workers", num_workers, cluster.source)
    planned.show(num_workers)
    return 0


def _workers_at_most(cluster: ClusterFile) -> int:
    return min(cluster.max_workers, cluster.sum_max_workers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster", description="Check and plan cluster files.")
    commands = parser.add_subparsers(dest="command", required=True)
    files = commands.add_parser("validate", help="check `ray up` and KubeRay files, offline")
    files.add_argument("files", nargs="+", metavar="FILE")
    files.add_argument("--strict", action="store_true", help="exit with 1 on warnings")
    sized = commands.add_parser("plan", help="what fits, for how many dollars an hour")
    sized.add_argument("file", metavar="FILE")
    sized.add_argument("--workers", type=_count, required=True, metavar="N", help="workers of one group")
    sized.add_argument("--cpus-per-worker", type=_amount, default=1.0, metavar="C", help="default: 1")
    sized.add_argument("--gpus-per-worker", type=_amount, metavar="G", help="default: 1 where a node has GPUs, else 0")
    sized.add_argument("--price", type=_price, action="append", default=[], metavar="TYPE=USD", help="dollars an hour")
    sized.add_argument("--cpus-per-node", type=_amount, metavar="C", help="of hosts that the file says nothing of")
    sized.add_argument("--gpus-per-node", type=_amount, metavar="G", help="of hosts that the file says nothing of")
    check = commands.add_parser("check", help="the nodes of the cluster that RAY_ADDRESS names, or of this machine")
    check.add_argument("--local", action="store_true", help="this machine alone: what it has, how fast it multiplies")
    check.add_argument("--workers", type=_count, metavar="N", help="wait for N nodes that train; an error with fewer")
    check.add_argument("--wait-s", type=_amount, default=120.0, metavar="S", help="how long, in seconds; default: 120")
    check.add_argument("--storage_path", metavar="URI", help="what all nodes must share; default: $PACELINE_STORAGE")
    check.add_argument("--quick", action="store_true", help="versions, clocks and storage alone")
    check.add_argument("--exclude-bad", action="store_true", help="print the label selector of the nodes in order")
    check.add_argument("--json", action="store_true", help="all of it as JSON")
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
