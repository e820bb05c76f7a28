"""Check cluster files, and examine live clusters.

`validate` starts nothing; `check` joins the cluster that RAY_ADDRESS names (as a Ray
job: its own), and runs a few seconds on each node.

Exit codes: 0 in order; 1 warnings, with --strict, or a node that is not in order or that
Ray did not drain; 2 errors in a file or on the command line.
"""

from collections import Counter
from collections.abc import Callable
from typing import Annotated, Literal, NoReturn

from pydantic import Field

from cluster.notices import ADDRESS
from trainers.command_line import complain, leave, run
from trainers.errors import ConfigError

_Uri = Annotated[
    str | None,
    Field(
        title="URI", description="what all nodes must share; default: $PACELINE_STORAGE"
    ),
]


def validate(
    files: Annotated[
        tuple[str, ...],
        Field(title="FILE...", description="of `ray up`"),
    ],
    *,
    strict: Annotated[bool, Field(description="exit with 1 on warnings")] = False,
) -> int:
    """Check `ray up` files, offline: print errors and warnings."""
    from cluster.files.ray_up import load_cluster
    from cluster.files.rules import findings

    levels = Counter[str]()
    for file in files:
        try:
            cluster = load_cluster(file)
            found = findings(cluster)
        except ConfigError as error:
            complain(str(error))
            levels["error"] += 1
            continue
        for finding in found:
            complain(f"{file}: {finding}", finding.level)
        levels.update(finding.level for finding in found)
        if not found:
            at_most = min(cluster.max_workers, cluster.sum_max_workers)
            print(
                f"{file}: in order ({cluster.provider}, up to {at_most} worker nodes)"
            )
    return 2 if levels["error"] else int(strict and levels["warning"] > 0)


def check(
    *,
    local: Annotated[
        bool,
        Field(description="this machine alone: what it has"),
    ] = False,
    storage_path: _Uri = None,
    quick: Annotated[bool, Field(description="versions and storage alone")] = False,
    as_json: Annotated[
        bool, Field(alias="json", description="all of it as JSON")
    ] = False,
) -> int:
    """Examine the nodes of the cluster that RAY_ADDRESS names, or this machine."""
    if local:
        from cluster.health.probes import check_local

        return check_local(as_json)
    from cluster.health.check import check

    return check(storage_path, as_json, quick)


def watch(
    cloud: Annotated[
        Literal["aws", "gcp", "azure"], Field(description="whose machine this is")
    ],
    *,
    address: Annotated[
        str, Field(title="HOST:PORT", description="of the metadata service")
    ] = ADDRESS,
    node: Annotated[
        str | None,
        Field(title="ID", description="of the Ray node, where several run here"),
    ] = None,
) -> int:
    """Wait for a spot machine's notice, and drain its Ray node; cluster files start it."""
    from cluster.spot import watch

    return watch(cloud, address, node)


def autoscale(
    config: Annotated[
        str,
        Field(
            description="what `ray up` has put on the head: ~/ray_bootstrap_config.yaml"
        ),
    ],
    *,
    node: Annotated[
        str | None,
        Field(title="ID", description="of the head's Ray node, where several run here"),
    ] = None,
) -> int:
    """Run Ray's autoscaler on a head, and take on-demand where spot is refused.

    Cluster files start it.
    """
    from cluster.files.ray_up import read_file
    from cluster.spot import autoscale

    read_file(config)  # Ray's own error is a traceback
    return autoscale(config, node)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    functions: dict[str, Callable[..., int]] = {
        "validate": validate,
        "check": check,
        "watch": watch,
        "autoscale": autoscale,
    }
    return run("python -m cluster", __doc__, functions, argv)


def script() -> NoReturn:
    """Run the command, and end the process."""
    leave(main())


if __name__ == "__main__":
    script()
