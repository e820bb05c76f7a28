"""The rooms of the three packages, from their imports, and what breaks their order.

Run as:
    python -m tests.rooms       (the drawing in docs/architecture.md)

A room is a folder of a package, or a file directly in it. Imports inside functions and under TYPE_CHECKING count like
all others.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("trainers", "cluster", "tune")
"""Lowest first: each may import itself and those before it."""

_ORDER = """
trainers: redaction output errors terminal causes json_data storage lease versions context config command_line
trainers: devices data
trainers: model task
trainers: arrow measure step
trainers: checkpoint loop launch explain tracking on_ray inference start __main__
cluster: finding spot files rules health __main__
tune: objective config trials search ray_internals forks lanes ray report sweeps watch __main__
"""
ORDER = {
    package: [
        room for line in _ORDER.split("\n") if line.startswith(f"{package}:") for room in line.partition(":")[2].split()
    ]
    for package in PACKAGES
}
"""The rooms of each package, lowest first, as docs/architecture.md draws them."""
WITH_RAY = (
    "trainers/on_ray/",
    "cluster/health/",
    "tune/forks/function.py",
    "tune/lanes/",
    "tune/ray/",
    "tune/ray_internals.py",
    "tune/search/ray_search.py",
    "tune/sweeps/",
)
"""Where Ray may be imported: the folder is the mark."""
MOST_WITH_INTERNALS = 2
"""How many files may use what Ray does not promise."""
_INTERNAL = re.compile(r"ray\.([\w.]*\.)?_|ray\.(autoscaler|core|train\.v2)\.|ray\.experimental\.internal_kv")

Arrows = Mapping[str, set[str]]
"""For each name the names that it imports."""


def source_files(root: Path = REPOSITORY) -> list[Path]:
    """Every Python file of the three packages."""
    return sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Dotted names of all imports of a file, at any level of it; `from a import b` gives `a` and `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def file_arrows(root: Path = REPOSITORY) -> dict[str, set[str]]:
    """Which files (as dotted modules) import which; a package's own `__init__` is no module of its own."""
    modules = {".".join(path.relative_to(root).with_suffix("").parts): path for path in source_files(root)}
    arrows = {}
    for module, path in modules.items():
        if not module.endswith("__init__"):
            arrows[module] = (imported_modules(path) & modules.keys()) - {module}
    return arrows


def room_of(module: str) -> str:
    """`trainers.data.feed` lies in `trainers.data`."""
    return ".".join(module.split(".")[:2])


def room_arrows(files: Arrows) -> dict[str, set[str]]:
    """Which rooms import which."""
    arrows = defaultdict(set)
    for module, targets in files.items():
        arrows[room_of(module)] |= {room_of(target) for target in targets} - {room_of(module)}
    return dict(arrows)


def upward(files: Arrows) -> list[str]:
    """Imports against ORDER, and rooms that are not in it."""
    place = {
        f"{package}.{room}": (number, ORDER[package].index(room))
        for number, package in enumerate(PACKAGES)
        for room in ORDER[package]
    }
    found = [f"{module} lies in no known room" for module in files if room_of(module) not in place]
    for module, targets in files.items():
        for target in targets:
            lower, upper = place.get(room_of(target)), place.get(room_of(module))
            if lower is not None and upper is not None and lower > upper:
                found.append(f"{module} imports {target}, which lies above it")
    return sorted(found)


def ray_elsewhere(root: Path = REPOSITORY) -> list[str]:
    """Files with an import of Ray that lie in no place of WITH_RAY."""
    names = {str(path.relative_to(root)): path for path in source_files(root)}
    return [
        f"{name} imports Ray, which belongs to {', '.join(WITH_RAY)}"
        for name, path in names.items()
        if not name.startswith(WITH_RAY) and any(one.split(".")[0] == "ray" for one in imported_modules(path))
    ]


def ray_internals_in(path: Path) -> set[str]:
    """What a file imports or reads of Ray without being promised it, as dotted names."""
    reads = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    return {name for name in imported_modules(path) | reads if _INTERNAL.match(name)}


def mermaid(files: Arrows) -> str:
    """All rooms as a Mermaid flowchart, without the arrows that follow from others."""
    rooms = room_arrows(files)
    below = {}
    for room in TopologicalSorter(rooms).static_order():
        below[room] = rooms[room].union(*(below[target] for target in rooms[room]))
    lines = ["flowchart TD"]
    for package in reversed(PACKAGES):
        lines.append(f"    subgraph {package}")
        own = [room for room in reversed(ORDER[package]) if f"{package}.{room}" in rooms and room != "__main__"]
        lines += [f"        {package}.{room}[{room}]" for room in own]
        for room in own:
            targets = rooms[f"{package}.{room}"]
            shown = {target for target in targets if not any(target in below[other] for other in targets)}
            inside = [one for one in reversed(ORDER[package]) if f"{package}.{one}" in shown]
            lines += [f"        {package}.{room} --> {package}.{one}" for one in inside]
        lines.append("    end")
    lines += [f"    {upper} --> {lower}" for lower, upper in itertools.pairwise(PACKAGES)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(mermaid(file_arrows()))
