"""Pure: what a check has found, as a table, as JSON, or as the label selector that leaves bad nodes out."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from cluster.health.verdicts import ClusterFacts, NodeFacts, NodeFinding, Verdict, label_selector, verdicts

_COLUMNS = ("node", "address", "device", "clock", "matmul", "network", "disk", "storage", "verdict")


def print_report(
    cluster: ClusterFacts,
    found: Sequence[NodeFinding],
    uri: str | None,
    seconds: float,
    as_json: bool,
    exclude_bad: bool,
) -> int:
    """Print it, and return the exit code.

    With `exclude_bad` standard output holds the selector alone, for `--scaling.label_selector`.
    """
    verdict = verdicts(cluster, found)
    selector = label_selector(sorted(node_id for node_id, is_ in verdict.items() if is_ == "bad"))
    out: TextIO = sys.stderr if exclude_bad else sys.stdout
    if as_json:
        print(json.dumps(as_tree(cluster, found, verdict, seconds), indent=2), file=out)
    else:
        for line in lines(cluster, found, uri, seconds):
            print(line, file=out)
    if exclude_bad:
        print(json.dumps(selector))
        good = sum(node.trains and verdict[node.node_id] != "bad" for node in cluster.nodes)
        return int(good < (cluster.workers_wanted or 1))
    return int(any(each.finding.level == "error" for each in found))


def as_tree(
    cluster: ClusterFacts, found: Sequence[NodeFinding], verdict: dict[str, Verdict], seconds: float
) -> dict[str, Any]:
    """All of it as plain data."""
    nodes = [dataclasses.asdict(node) | {"verdict": verdict[node.node_id]} for node in cluster.nodes]
    return {
        "nodes": nodes,
        "lost": [dataclasses.asdict(lost) for lost in cluster.lost],
        "all_reduce": [dataclasses.asdict(each) for each in cluster.collectives],
        "findings": [{"node_id": each.node_id, "host": each.host} | dataclasses.asdict(each.finding) for each in found],
        "label_selector": label_selector(sorted(node for node, is_ in verdict.items() if is_ == "bad")),
        "seconds": round(seconds, 1),
    }


def lines(cluster: ClusterFacts, found: Sequence[NodeFinding], uri: str | None, seconds: float) -> list[str]:
    """The table, a row for each node, and the findings below it."""
    verdict = verdicts(cluster, found)
    rows = [_COLUMNS, *(_row(node, verdict[node.node_id], uri) for node in cluster.nodes)]
    rows += [(lost.host, lost.address, "", "", "", "", "", "", "bad: lost") for lost in cluster.lost]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for each in cluster.collectives:
        if each.mb_per_s is not None:
            how = "wrong" if each.wrong_on else "right"
            table.append(f"all-reduce {each.between}: {each.num_ranks} ranks, {how}, {each.mb_per_s:,.0f} MB/s")
    table += [f"{each.finding.level}: {each}" for each in found]
    if uri is None and len(cluster.nodes) > 1:
        table.append("note: storage was not looked at; give --storage_path or set PACELINE_STORAGE")
    bad = sum(is_ == "bad" for is_ in verdict.values())
    table.append(f"{len(verdict) - bad} of {len(verdict)} nodes in order, in {seconds:.1f} s")
    return table


def _row(node: NodeFacts, verdict: Verdict, uri: str | None) -> tuple[str, ...]:
    verdict_words = "bad: silent" if node.silent_in is not None else verdict
    clock = f"{node.clock_offset_s * 1e3:+.0f} ms" if node.clock_offset_s is not None else "-"
    shared = (
        "-" if uri is None or node.silent_in else "not shared" if node.storage else _rate(node, "storage", "shared")
    )
    device = f"{node.num_gpus} x {node.device}" if node.num_gpus and node.device else node.device
    figures = [_rate(node, kind, "-") for kind in ("matmul", "network", "local disk")]
    return (node.host, node.address, device[:32] or "-", clock, *figures, shared, verdict_words)


def _rate(node: NodeFacts, kind: str, otherwise: str) -> str:
    """The lowest figure of a kind: with several GPUs the one that the others wait for."""
    rates = [rate for rate in node.rates if rate.kind == kind]
    worst = min(rates, key=lambda rate: rate.value, default=None)
    return f"{worst.value:,.0f} {worst.unit}" if worst else otherwise
