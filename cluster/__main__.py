"""Check cluster files, and examine live clusters.

`validate` starts nothing. `check` joins the cluster that RAY_ADDRESS names
(inside a Ray job: the job's own cluster), and takes a few seconds on each
node.

Exit codes: 0 everything is in order; 1 a warning (with --strict), a faulty
node, or a node that Ray did not drain; 2 an error in a file or on the command
line.
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
        title="URI",
        description="storage that all nodes must share; default: $PACELINE_STORAGE",
    ),
]


def validate(
    files: Annotated[
        tuple[str, ...],
        Field(title="FILE...", description="cluster files of `ray up`"),
    ],
    *,
    strict: Annotated[
        bool, Field(description="exit with 1 on warnings")
    ] = False,
) -> int:
    """Check cluster files of `ray up` offline, and print errors and warnings."""
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
        Field(description="examine only this machine"),
    ] = False,
    storage_path: _Uri = None,
    quick: Annotated[
        bool, Field(description="check only versions and storage")
    ] = False,
    as_json: Annotated[
        bool, Field(alias="json", description="print everything as JSON")
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
        Literal["aws", "gcp", "azure"],
        Field(description="the cloud that owns this machine"),
    ],
    *,
    address: Annotated[
        str,
        Field(
            title="HOST:PORT", description="address of the metadata service"
        ),
    ] = ADDRESS,
    node: Annotated[
        str | None,
        Field(
            title="ID",
            description="the Ray node, if this machine runs several",
        ),
    ] = None,
) -> int:
    """Drain this machine's Ray node when its spot notice comes; cluster files run this."""
    from cluster.spot import watch

    return watch(cloud, address, node)


def autoscale(
    config: Annotated[
        str,
        Field(
            description="the file that `ray up` puts on the head: ~/ray_bootstrap_config.yaml"
        ),
    ],
    *,
    node: Annotated[
        str | None,
        Field(
            title="ID",
            description="the head's Ray node, if this machine runs several",
        ),
    ] = None,
) -> int:
    """Run Ray's autoscaler on a head, and take on-demand machines if spot is refused.

    Cluster files run this.
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
