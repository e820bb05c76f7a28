"""The rooms of the three packages, from their imports, and what breaks their order.

Run as:
    python -m tests.rooms       (the drawing in docs/architecture.md)

A room is a folder of a package, or a file directly in it; a floor is a few rooms with
one purpose. Imports inside functions and under TYPE_CHECKING count like all others.
"""

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
trainers base: errors output terminal causes storage lease versions context config command_line
trainers data: devices data
trainers model: model task
trainers step: measure step
trainers checkpoint: checkpoint
trainers loop: loop
trainers launch: launch on_ray
trainers commands: explain tracking inference start __main__
cluster files: finding notices spot files
cluster health: health __main__
tune search: config trials search
tune lanes: ray_internals forks lanes ray
tune report: report
tune sweeps: sweeps watch mcp __main__
"""
FLOORS = {
    line.partition(": ")[0].replace(" ", "."): line.partition(": ")[2].split()
    for line in _ORDER.strip().splitlines()
}
"""The rooms of each floor, both lowest first; docs/architecture.md draws the
floors and names their rooms.
"""
ORDER = {
    package: [
        room
        for floor, rooms in FLOORS.items()
        if floor.startswith(f"{package}.")
        for room in rooms
    ]
    for package in PACKAGES
}
"""The rooms of each package, lowest first."""
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
_INTERNAL = re.compile(
    r"ray\.([\w.]*\.)?_|ray\.(autoscaler|core|train\.v2)\.|ray\.experimental\.internal_kv"
)

Arrows = Mapping[str, set[str]]
"""For each name the names that it imports."""


def source_files(root: Path = REPOSITORY) -> list[Path]:
    """Every Python file of the three packages."""
    return sorted(
        path for package in PACKAGES for path in (root / package).rglob("*.py")
    )


def imported_modules(path: Path) -> set[str]:
    """Dotted names of all imports of a file, at any level of it; `from a
    import b` gives `a` and `a.b`.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            found |= {node.module} | {
                f"{node.module}.{alias.name}" for alias in node.names
            }
    return found


def file_arrows(root: Path = REPOSITORY) -> dict[str, set[str]]:
    """Which files (as dotted modules) import which; a package's own `__init__`
    is no module of its own.
    """
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for path in source_files(root)
    }
    arrows = {}
    for module, path in modules.items():
        if not module.endswith("__init__"):
            arrows[module] = (imported_modules(path) & modules.keys()) - {
                module
            }
    return arrows


def room_of(module: str):
    """`trainers.data.feed` lies in `trainers.data`."""
    return ".".join(module.split(".")[:2])


def room_arrows(files: Arrows) -> dict[str, set[str]]:
    """Which rooms import which."""
    arrows = defaultdict(set)
    for module, targets in files.items():
        arrows[room_of(module)] |= {room_of(target) for target in targets} - {
            room_of(module)
        }
    return dict(arrows)


def upward(files: Arrows):
    """Imports against ORDER, and rooms that are not in it."""
    place = {
        f"{package}.{room}": (number, ORDER[package].index(room))
        for number, package in enumerate(PACKAGES)
        for room in ORDER[package]
    }
    found = [
        f"{module} lies in no known room"
        for module in files
        if room_of(module) not in place
    ]
    for module, targets in files.items():
        for target in targets:
            lower = place.get(room_of(target))
            upper = place.get(room_of(module))
            if lower is not None and upper is not None and lower > upper:
                found.append(f"{module} imports {target}, which lies above it")
    return sorted(found)


def misnamed(files: Arrows):
    """Files whose name does not say whether a reader elsewhere meets them:
    what only its own folder imports begins with an underscore, and nothing
    else does.
    """
    found = []
    for module in files:
        folder, _, name = module.rpartition(".")
        users = [user for user, targets in files.items() if module in targets]
        stays = bool(users) and all(
            user.startswith(f"{folder}.") for user in users
        )
        is_door = folder in PACKAGES or name == "__main__"
        if not is_door and stays != name.startswith("_"):
            found.append(f"{module} is imported by {', '.join(sorted(users))}")
    return found


def ray_elsewhere(root: Path = REPOSITORY):
    """Files with an import of Ray that lie in no place of WITH_RAY."""
    names = {str(path.relative_to(root)): path for path in source_files(root)}
    return [
        f"{name} imports Ray, which belongs to {', '.join(WITH_RAY)}"
        for name, path in names.items()
        if not name.startswith(WITH_RAY)
        and any(one.split(".")[0] == "ray" for one in imported_modules(path))
    ]


def ray_internals_in(path: Path) -> set[str]:
    """What a file imports or reads of Ray without being promised it, as dotted names."""
    reads = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    return {
        name
        for name in imported_modules(path) | reads
        if _INTERNAL.match(name)
    }


def floor_arrows(files: Arrows) -> dict[str, set[str]]:
    """Which floors import which."""
    floor_of = {
        f"{floor.partition('.')[0]}.{room}": floor
        for floor, rooms in FLOORS.items()
        for room in rooms
    }
    arrows = {floor: set() for floor in FLOORS}
    for room, targets in room_arrows(files).items():
        floor = floor_of[room]
        arrows[floor] |= {floor_of[target] for target in targets} - {floor}
    return arrows


def mermaid(files: Arrows):
    """All floors as a Mermaid flowchart, without the arrows that follow from others."""
    arrows = floor_arrows(files)
    below = {}
    for floor in TopologicalSorter(arrows).static_order():
        below[floor] = arrows[floor].union(
            *(below[target] for target in arrows[floor])
        )
    lines = ["flowchart TD"]
    for package in reversed(PACKAGES):
        own = [
            floor
            for floor in reversed(FLOORS)
            if floor.startswith(f"{package}.")
        ]
        lines.append(f"    subgraph {package}")
        lines += [
            f"        {floor}[{floor.partition('.')[2]}]" for floor in own
        ]
        for floor in own:
            followed = set().union(
                *(below[target] for target in arrows[floor])
            )
            shown = [
                target for target in own if target in arrows[floor] - followed
            ]
            lines += [f"        {floor} --> {target}" for target in shown]
        lines.append("    end")
    lines += [
        f"    {upper} --> {lower}"
        for lower, upper in itertools.pairwise(PACKAGES)
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(mermaid(file_arrows()))
