"""Check cluster files, say what fits on them for how many dollars an hour, and examine live clusters.

`validate` and `plan` start nothing; `check` joins the cluster that RAY_ADDRESS names (as a Ray job: its own), and
runs a few seconds on each node.

Exit codes: 0 in order; 1 warnings, with --strict, a node that is not in order or that Ray did not drain, torch sees
no GPU where the driver has one, or a catalog of prices cannot be read; 2 errors in a file or on the command line, or N
workers never fit.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from cluster.finding import Finding
from cluster.spot.notices import ADDRESS
from trainers import residents
from trainers.command_line import complain, run
from trainers.errors import MISSING, ConfigError

_Host = Annotated[float | None, Field(ge=0, le=1e6, title="C", description="of hosts that the file says nothing of")]
_Gpus = Annotated[float | None, Field(ge=0, le=1e6, title="G", description="default: 1 where a node has GPUs, else 0")]
_Price = Annotated[str, Field(pattern=r"^[^=]+=[0-9]{0,9}\.?[0-9]{1,9}$")]
_Prices = Annotated[
    tuple[_Price, ...],
    Field(title="TYPE=USD", description="dollars an hour of a machine", json_schema_extra={"rule": "must be TYPE=USD"}),
]
_Nodes = Annotated[
    int | None, Field(ge=1, le=10**6, title="N", description="wait for N nodes that train; an error with fewer")
]
_Providers = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], ...],
    Field(title="NAME", description="of these; default: aws, gcp, azure; the catalog has GPU clouds as well"),
]
_REGIONS = "of these regions only; may be repeated"
_TYPES = "only of these instance types, or patterns such as g5.*; may be repeated"
_CATALOG = "where NAME/vms.csv lies; default: SkyPilot's on GitHub"
_Uri = Annotated[str | None, Field(title="URI", description="what all nodes must share; default: $PACELINE_STORAGE")]


def validate(
    files: Annotated[
        tuple[str, ...], Field(title="FILE...", description="`ray up` files, ones with RayClusters, Slurm scripts")
    ],
    *,
    strict: Annotated[bool, Field(description="exit with 1 on warnings")] = False,
) -> int:
    """Check `ray up` files, KubeRay's and Slurm's, offline: every error and warning of every file is printed."""
    levels = Counter[str]()
    for file in files:
        try:
            examined = list(_examined(file))
        except ConfigError as error:
            complain(str(error))
            levels["error"] += 1
            continue
        for source, kind, found in examined:
            for finding in found:
                complain(f"{source}: {finding}", finding.level)
            levels.update(finding.level for finding in found)
            if not found:
                print(f"{source}: in order ({kind})")
    return 2 if levels["error"] else int(strict and levels["warning"] > 0)


def _examined(file: str) -> Iterator[tuple[str, str, list[Finding]]]:
    """The findings on each cluster of a file, with its name and what it is."""
    from cluster.rules.slurm import is_slurm, load_slurm, slurm_findings

    if is_slurm(file):
        script = load_slurm(file)
        yield file, f"slurm, {script.options.get('nodes') or 1} nodes", slurm_findings(script)
        return
    from cluster.files.ray_up import load_clusters
    from cluster.rules.clusters import findings

    for cluster in load_clusters(file):
        at_most = min(cluster.max_workers, cluster.sum_max_workers)
        yield cluster.source, f"{cluster.provider}, up to {at_most} worker nodes", findings(cluster)


def plan(
    file: Annotated[str, Field(description="a `ray up` file, or one with a RayCluster")],
    *,
    workers: Annotated[int, Field(ge=1, le=10**9, title="N", description="workers of one group")],
    cpus_per_worker: Annotated[float, Field(ge=0, le=1e6, title="C", description="CPUs of a worker")] = 1,
    gpus_per_worker: _Gpus = None,
    price: _Prices = (),
    cpus_per_node: _Host = None,
    gpus_per_node: _Host = None,
) -> int:
    """Say what fits on a cluster, for how many dollars an hour."""
    from cluster.files.ray_up import load_cluster
    from cluster.plan import ClusterPlan, has_gpus, with_resources
    from cluster.rules.slurm import is_slurm

    if is_slurm(file):
        rule = "is a Slurm script, and Slurm knows what its nodes have"
        raise ConfigError("the file", MISSING, rule, "ask `sinfo --format='%N %c %G'`", file)
    told = {name: amount for name, amount in {"CPU": cpus_per_node, "GPU": gpus_per_node}.items() if amount is not None}
    cluster = with_resources(load_cluster(file), told)
    gpus = float(has_gpus(cluster)) if gpus_per_worker is None else gpus_per_worker
    if cpus_per_worker == gpus == 0:
        rule = "and --gpus-per-worker cannot both be 0"
        raise ConfigError("--cpus-per-worker", MISSING, rule, "give a worker a CPU or a GPU")
    for option, asked in (("--cpus-per-worker", cpus_per_worker), ("--gpus-per-worker", gpus)):
        if 0 < asked < 1e-4:
            raise ConfigError(option, asked, "must be 0, or at least 0.0001, of which Ray counts", "give a worker more")
    usd_per_hour = {name: float(usd) for name, _, usd in (given.rpartition("=") for given in price)}
    planned = ClusterPlan(cluster, cpus_per_worker, gpus, usd_per_hour)
    planned.require(workers, "--workers", workers, cluster.source)
    planned.show(workers)
    return 0


def prices(
    action: Annotated[Literal["update"], Field(title="update", description="take prices from a kept catalog")],
    *,
    to: Annotated[
        str | None, Field(title="FILE", description="default: the table in your cache, which is read")
    ] = None,
    provider: _Providers = (),
    region: Annotated[tuple[str, ...], Field(title="REGION", description=_REGIONS)] = (),
    instance_type: Annotated[tuple[str, ...], Field(title="TYPE", description=_TYPES)] = (),
    catalog: Annotated[str | None, Field(title="URL", description=_CATALOG)] = None,
) -> int:
    """Bring the price table up to date, on demand and spot; one in a file is read where PACELINE_PRICES names it."""
    from cluster.catalog.update import CATALOG, PROVIDERS, update
    from cluster.files.prices import user_table

    file = user_table() if to is None else Path(to)
    for line in update(file, provider or PROVIDERS, region, instance_type, catalog or CATALOG):
        print(line)
    if file.absolute() != user_table().absolute():
        print(f"it is read with PACELINE_PRICES={file}")
    return 0


def check(
    *,
    local: Annotated[bool, Field(description="this machine alone: what it has, how fast it multiplies")] = False,
    workers: _Nodes = None,
    wait_s: Annotated[float, Field(ge=0, le=1e9, title="S", description="how long, in seconds")] = 120,
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


def start(
    *, cpus: Annotated[int | None, Field(ge=1, le=10**6, title="C", description="CPUs to share; default: all")] = None
) -> int:
    """Keep a cluster on this machine, which sweeps and runs find by themselves."""
    from cluster.local_cluster import start

    print(f"a cluster is up at {start(cpus)}; `python -m cluster stop` ends it")
    return 0


def stop() -> int:
    """End the cluster that `start` keeps on this machine, and what runs on it."""
    from cluster.local_cluster import stop

    print("it has ended" if stop() else "there was none")
    return 0


def status() -> int:
    """Say which cluster `start` keeps on this machine, and which lanes are kept for the next sweep."""
    known = residents.cluster()
    print("no cluster is kept on this machine" if known is None else f"cluster {known['address']}, pid {known['pid']}")
    for found in residents.drivers().values():
        lanes = f"{found['lanes']:g} lane{'s' * (found['lanes'] != 1)}"
        doing = "runs a sweep" if found["busy"] else f"keeps {lanes} for {found['for_s']:.0f} s"
        print(f"driver on {found['address']}, pid {found['pid']}: {doing}")
    return 0


def watch(
    cloud: Annotated[Literal["aws", "gcp", "azure"], Field(description="whose machine this is")],
    *,
    address: Annotated[str, Field(title="HOST:PORT", description="of the metadata service")] = ADDRESS,
    node: Annotated[str | None, Field(title="ID", description="of the Ray node, where several run here")] = None,
) -> int:
    """Wait on a spot machine for the notice that it is taken back, and drain its Ray node; cluster files start it."""
    from cluster.spot.watch import watch

    return watch(cloud, address, node)


def autoscale(
    config: Annotated[str, Field(description="what `ray up` has put on the head: ~/ray_bootstrap_config.yaml")],
    *,
    node: Annotated[str | None, Field(title="ID", description="of the head's Ray node, where several run here")] = None,
) -> int:
    """Run Ray's autoscaler on a head that has none, and go over to on-demand where spot is refused; files start it."""
    from cluster.spot.autoscaler import autoscale

    return autoscale(config, node)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    functions: dict[str, Callable[..., int]] = {"validate": validate, "plan": plan, "prices": prices, "check": check}
    functions |= {"start": start, "stop": stop, "status": status, "watch": watch, "autoscale": autoscale}
    residents.join_cluster()
    return run("python -m cluster", __doc__, functions, argv)


if __name__ == "__main__":
    raise SystemExit(main())
