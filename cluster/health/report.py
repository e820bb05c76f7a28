"""Show what a check has found: a table, JSON, or a selector without bad nodes. Pure."""

import dataclasses
import io
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from cluster.health.verdicts import (
    ClusterFacts,
    Kind,
    NodeFacts,
    NodeFinding,
    bad_nodes,
    label_selector,
)

_COLUMNS = (
    "node",
    "address",
    "device",
    "clock",
    "matmul",
    "network",
    "storage",
    "verdict",
)


def print_report(
    cluster: ClusterFacts,
    found: list[NodeFinding],
    uri: str | None,
    seconds: float,
    as_json: bool,
    exclude_bad: bool,
) -> int:
    """Print what was found, and return the exit code.

    With `exclude_bad` standard output holds the selector alone, for
    `--scaling.label_selector`.
    """
    out: TextIO = sys.stderr if exclude_bad else sys.stdout
    if as_json:
        print(json.dumps(_as_tree(cluster, found, seconds), indent=2), file=out)
    else:
        print("\n".join(_lines(cluster, found, uri, seconds)), file=out)
    if exclude_bad:
        print(json.dumps(label_selector(found)))
        bad = bad_nodes(found)
        good = sum(node.trains and node.node_id not in bad for node in cluster.nodes)
        return int(good < (cluster.workers_wanted or 1))
    return int(bool(found))


def _as_tree(
    cluster: ClusterFacts, found: Sequence[NodeFinding], seconds: float
) -> dict[str, Any]:
    bad = bad_nodes(found)
    nodes = [
        dataclasses.asdict(node) | {"verdict": "bad" if node.node_id in bad else "ok"}
        for node in cluster.nodes
    ]
    return {
        "nodes": nodes,
        "all_reduce": dataclasses.asdict(cluster.all_reduce)
        if cluster.all_reduce
        else None,
        "findings": [
            {"node_id": each.node_id, "host": each.host}
            | dataclasses.asdict(each.finding)
            for each in found
        ],
        "label_selector": label_selector(found),
        "seconds": round(seconds, 1),
    }


def _lines(
    cluster: ClusterFacts, found: Sequence[NodeFinding], uri: str | None, seconds: float
) -> list[str]:
    """Return the table, a row for each node, and the findings below it."""
    bad = bad_nodes(found)
    rows = [_row(node, node.node_id in bad, uri) for node in cluster.nodes]
    result = table_lines(_COLUMNS, rows)
    total = cluster.all_reduce
    if total is not None and total.mb_per_s is not None:
        how = "wrong" if any(node.wrong_sum for node in cluster.nodes) else "right"
        result.append(
            f"all-reduce between nodes: {total.num_ranks} ranks, {how}, {total.mb_per_s:,.0f} MB/s"
        )
    result += [f"{each.finding.level}: {each}" for each in found]
    if uri is None and len(cluster.nodes) > 1:
        result.append(
            "note: storage was not looked at; give --storage_path or set PACELINE_STORAGE"
        )
    whole = ""
    if not all(each.node_id for each in found):
        whole = ", but not the cluster as a whole"
    result.append(
        f"{len(rows) - len(bad)} of {len(rows)} nodes in order{whole}, in {seconds:.1f} s"
    )
    return result


def table_lines(
    columns: Sequence[str], rows: Iterable[Sequence[str]], num_left: int | None = None
) -> list[str]:
    """Render a table as plain text.

    The columns after the first `num_left` hold figures, which end flush.
    """
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        is_figure = num_left is not None and index >= num_left
        table.add_column(column, no_wrap=True, justify="right" if is_figure else "left")
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(
        file=text,
        width=1000,
        markup=False,
        emoji=False,
        highlight=False,
        color_system=None,
    ).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def _row(node: NodeFacts, is_bad: bool, uri: str | None) -> tuple[str, ...]:
    clock = (
        "-" if node.clock_offset_s is None else f"{node.clock_offset_s * 1e3:+.0f} ms"
    )
    storage = "not shared" if node.storage else "shared"
    device = node.device
    if node.num_gpus and node.device:
        device = f"{node.num_gpus} x {device}"
    verdict = "bad" if is_bad else "ok"
    if node.lost:
        verdict = "bad: lost"
    elif node.silent_in:
        verdict = "bad: silent"
    return (
        node.host,
        node.address,
        device[:32] or "-",
        clock,
        _rate(node, "matmul"),
        _rate(node, "network"),
        "-" if uri is None or node.lost or node.silent_in else storage,
        verdict,
    )


def _rate(node: NodeFacts, kind: Kind) -> str:
    """Return a kind's lowest figure: of several GPUs the one that others wait for."""
    worst = min(
        (rate for rate in node.rates if rate.kind == kind),
        key=lambda rate: rate.value,
        default=None,
    )
    return f"{worst.value:,.0f} {worst.unit}" if worst else "-"
