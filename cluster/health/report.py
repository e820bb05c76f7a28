"""Pure: what a check has found, as a table, as JSON, or as the label selector that leaves bad nodes out."""

import dataclasses
import io
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from cluster.health.facts import ClusterFacts, Kind, NodeFacts, NodeFinding
from cluster.health.verdicts import Verdict, label_selector, verdicts

_COLUMNS = ("node", "address", "device", "clock", "matmul", "network", "disk", "storage", "verdict")


def print_report(
    cluster: ClusterFacts, found: list[NodeFinding], uri: str | None, seconds: float, as_json: bool, exclude_bad: bool
) -> int:
    """Print what was found, and return the exit code.

    With `exclude_bad` standard output holds the selector alone, for `--scaling.label_selector`.
    """
    verdict = verdicts(cluster, found)
    out: TextIO = sys.stderr if exclude_bad else sys.stdout
    if as_json:
        print(json.dumps(as_tree(cluster, found, verdict, seconds), indent=2), file=out)
    else:
        print("\n".join(lines(cluster, found, uri, seconds)), file=out)
    if exclude_bad:
        print(json.dumps(label_selector(verdict)))
        good = sum(node.trains and verdict[node.node_id] != "bad" for node in cluster.nodes)
        return int(good < (cluster.workers_wanted or 1))
    return int(any(each.finding.level == "error" for each in found))


def as_tree(
    cluster: ClusterFacts, found: Sequence[NodeFinding], verdict: dict[str, Verdict], seconds: float
) -> dict[str, Any]:
    """Return all of it as plain data."""
    return {
        "nodes": [dataclasses.asdict(node) | {"verdict": verdict[node.node_id]} for node in cluster.nodes],
        "lost": [dataclasses.asdict(lost) for lost in cluster.lost],
        "all_reduce": [dataclasses.asdict(each) for each in cluster.collectives],
        "findings": [{"node_id": each.node_id, "host": each.host} | dataclasses.asdict(each.finding) for each in found],
        "label_selector": label_selector(verdict),
        "seconds": round(seconds, 1),
    }


def lines(cluster: ClusterFacts, found: Sequence[NodeFinding], uri: str | None, seconds: float) -> list[str]:
    """Return the table, a row for each node, and the findings below it."""
    verdict = verdicts(cluster, found)
    rows = [_row(node, verdict[node.node_id], uri) for node in cluster.nodes]
    rows += [(lost.host, lost.address, "", "", "", "", "", "", "bad: lost") for lost in cluster.lost]
    result = table_lines(_COLUMNS, rows)
    for each in cluster.collectives:
        if each.mb_per_s is not None:
            how = "wrong" if each.wrong_on else "right"
            result.append(f"all-reduce {each.between}: {each.num_ranks} ranks, {how}, {each.mb_per_s:,.0f} MB/s")
    result += [f"{each.finding.level}: {each}" for each in found]
    if uri is None and len(cluster.nodes) > 1:
        result.append("note: storage was not looked at; give --storage_path or set PACELINE_STORAGE")
    bad = sum(is_ == "bad" for is_ in verdict.values())
    result.append(f"{len(verdict) - bad} of {len(verdict)} nodes in order, in {seconds:.1f} s")
    return result


def table_lines(columns: Sequence[str], rows: Iterable[Sequence[str]], num_left: int | None = None) -> list[str]:
    """Render a table as plain text; the columns after the first `num_left` hold figures, which end flush."""
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        is_figure = num_left is not None and index >= num_left
        table.add_column(column, no_wrap=True, justify="right" if is_figure else "left")
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=1000, markup=False, emoji=False, highlight=False, color_system=None).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def _row(node: NodeFacts, verdict: Verdict, uri: str | None) -> tuple[str, ...]:
    clock = f"{node.clock_offset_s * 1e3:+.0f} ms" if node.clock_offset_s is not None else "-"
    storage = "not shared" if node.storage else _rate(node, "storage", "shared")
    shared = "-" if uri is None or node.silent_in else storage
    device = f"{node.num_gpus} x {node.device}" if node.num_gpus and node.device else node.device
    figures = [_rate(node, "matmul"), _rate(node, "network"), _rate(node, "local disk")]
    words = "bad: silent" if node.silent_in is not None else verdict
    return (node.host, node.address, device[:32] or "-", clock, *figures, shared, words)


def _rate(node: NodeFacts, kind: Kind, otherwise: str = "-") -> str:
    """The lowest figure of a kind: with several GPUs the one that the others wait for."""
    worst = min((rate for rate in node.rates if rate.kind == kind), key=lambda rate: rate.value, default=None)
    return f"{worst.value:,.0f} {worst.unit}" if worst else otherwise
