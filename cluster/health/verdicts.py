"""Judge what nodes have measured, and show it: far below the others' median is slow."""

import dataclasses
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.finding import Finding, error

NETWORK = "network"
_LEAST = {True: 0.3, False: 0.65}
"""What share of the others' median a node must reach, for a link and for a product:
products repeat well, shared links do not.
"""
_SLOW_FIX = {
    True: "look at its cable, port and MTU",
    False: "look for another process, heat or a power limit there",
}
_COLUMNS = ("node", "address", "device", "matmul GFLOP/s", "network MB/s", "verdict")


@dataclass
class Node:
    """What is known of a node."""

    node_id: str
    host: str
    address: str
    trains: bool = False
    """Whether it has CPUs or GPUs for workers; a head often has none."""
    answers: bool = True
    """Whether it has answered everything so far."""
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    """Model of its CPU or GPUs; products are compared between equal ones."""
    num_gpus: int = 0
    """As Ray counts them."""
    rates: dict[str, float] = field(default_factory=dict)
    """GFLOP/s of each product (`matmul of cuda:3`), MB/s of the network; the best of
    all measurements, since what slows one for a moment says nothing of the node.
    """

    def better(self, rates: Mapping[str, float]) -> None:
        """Keep the higher one of each rate."""
        for name, rate in rates.items():
            self.rates[name] = max(rate, self.rates.get(name, 0.0))


@dataclass(frozen=True)
class NodeFinding(Finding):
    """What is wrong with one node, or with the cluster where `node_id` is empty."""

    node_id: str
    host: str

    def __str__(self) -> str:
        return f"{self.host}: {super().__str__()}"


def on(node: Node, found: Iterable[Finding]) -> list[NodeFinding]:
    """Return findings with their node."""
    return [
        NodeFinding(**vars(each), node_id=node.node_id, host=node.host)
        for each in found
    ]


def label_selector(found: Sequence[NodeFinding]) -> dict[str, str]:
    """Return Ray's label selector for all nodes but the bad ones."""
    bad = sorted({each.node_id for each in found} - {""})
    return {"ray.io/node-id": f"!in({','.join(bad)})"} if bad else {}


def unshared(seen: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the nodes that do not see the storage of more than half of them.

    `seen`: whose markers each could read.
    """
    return [
        node_id
        for node_id, markers in seen.items()
        if 2 * len(markers) <= len(seen) > 1
    ]


def different(nodes: Sequence[Node]) -> list[NodeFinding]:
    """Find versions other than those of most nodes; of equally many, the first's."""
    found: list[NodeFinding] = []
    for name in dict.fromkeys(name for node in nodes for name in node.versions):
        own = [node.versions.get(name, "absent") for node in nodes]
        [(right, _)] = Counter(own).most_common(1)
        rule = f"must be {right} as on the other nodes"
        for node, version in zip(nodes, own, strict=True):
            if version != right:
                wrong = error(name, version, rule, "install the same everywhere")
                found += on(node, [wrong])
    return found


def slow(nodes: Sequence[Node]) -> list[NodeFinding]:
    """Find nodes far behind the others' median: products of one device, and links."""
    groups: dict[str, list[tuple[Node, str]]] = {}
    for node in nodes:
        for name in node.rates:
            kind = name if name == NETWORK else node.device
            groups.setdefault(kind, []).append((node, name))
    found: list[NodeFinding] = []
    for group in groups.values():
        rates = [node.rates[name] for node, name in group]
        for index, (node, name) in enumerate(group):
            is_link = name == NETWORK
            others = rates[:index] + rates[index + 1 :]
            usual = statistics.median(others) if others else 0.0
            if rates[index] < _LEAST[is_link] * usual:
                rule = f"must not fall so far behind the {usual:,.3g} of the others"
                value = f"{rates[index]:,.3g} {_unit(name)}"
                found += on(node, [error(name, value, rule, _SLOW_FIX[is_link])])
    return found


def print_report(
    nodes: Sequence[Node],
    found: Sequence[NodeFinding],
    as_json: bool = False,
    exclude_bad: bool = False,
    wanted: int | None = None,
) -> int:
    """Print what was found, and return the exit code.

    With `exclude_bad` standard output holds the selector alone, for
    `--scaling.label_selector`; the code is 1 when fewer good nodes than `wanted` train.
    """
    out = sys.stderr if exclude_bad else sys.stdout
    bad = {each.node_id for each in found}
    rows: list[dict[str, Any]] = [
        dataclasses.asdict(node) | {"verdict": "bad" if node.node_id in bad else "ok"}
        for node in nodes
    ]
    tree = {
        "nodes": rows,
        "findings": [dataclasses.asdict(each) for each in found],
        "label_selector": label_selector(found),
    }
    if as_json:
        print(json.dumps(tree, indent=2), file=out)
    else:
        table = Table(*_COLUMNS, box=None, pad_edge=False)
        for node, row in zip(nodes, rows, strict=True):
            table.add_row(
                node.host,
                node.address or "-",
                node.device or "-",
                _lowest(node, is_link=False),
                _lowest(node, is_link=True),
                row["verdict"],
            )
        console = Console(
            file=out, width=1000, markup=False, emoji=False, highlight=False
        )
        console.print(table)
        print(
            *(" ".join(pair) for pair in nodes[0].versions.items()), sep=", ", file=out
        )
        for each in found:
            print(f"{each.level}: {each}", file=out)
        good = len(nodes) - len(bad - {""})
        print(f"{good} of {len(nodes)} nodes in order", file=out)
    if not exclude_bad:
        return int(bool(found))
    print(json.dumps(label_selector(found)))
    return int(
        sum(node.trains and node.node_id not in bad for node in nodes) < (wanted or 1)
    )


def _lowest(node: Node, is_link: bool) -> str:
    """Of several GPUs that for which others wait."""
    rates = [rate for name, rate in node.rates.items() if (name == NETWORK) == is_link]
    return f"{min(rates):,.0f}" if rates else "-"


def _unit(name: str) -> str:
    return "MB/s" if name == NETWORK else "GFLOP/s"
