"""How many planted faults do the unit tests notice? One at a time, in a copy of the tree.

Run as: python -m tests.mutations [--seed 1] [--count 60] [--root DIR] [--beside DIR] [--list]

A fault is a flipped comparison, `and` for `or`, another constant, or a statement left out, in the code of AREAS. Which
are drawn depends on the source of their function alone: a function that is the same in two versions of the tree has the
same faults in both (`--root` names another checkout, and with `--beside` only what both have is drawn). The tests are
those of tests/unit that import the changed module or are named after it, else those of the modules that import it. A
fault that no test notices has survived; one that makes a test hang is noticed. Prints a line a fault, and the totals as
JSON.
"""

import argparse
import ast
import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
AREAS = {
    "loop": ("trainers/loop/*.py",),
    "sampler": ("trainers/data/sampler.py", "trainers/data/order.py", "trainers/data/batch_schedule.py"),
    "step": ("trainers/step/*.py",),
    "checkpoint": ("trainers/checkpoint/*.py",),
    "lanes": ("tune/lanes/*.py",),
    "cluster rules": ("cluster/rules/*.py",),
}
MOST_FILES = 4
LIMIT_S = 600.0
"""Of one run of the tests."""
_PAIRS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
_OPPOSITES: dict[Any, Any] = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Fault:
    """A change of one node of a function."""

    area: str
    file: str
    function: str
    kind: str
    node: int
    """Its number in the function's body, in the order of `ast.walk`."""
    line: int
    key: str
    """By which faults are drawn."""


def functions(tree: ast.Module) -> Iterator[tuple[str, _Function]]:
    """The functions of a module and the methods of its classes, by name."""
    for node in tree.body:
        if isinstance(node, _Function):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{method.name}", method) for method in node.body if isinstance(method, _Function))


def nodes(function: _Function) -> list[ast.AST]:
    """What a function does, part by part."""
    return list(ast.walk(ast.Module(function.body, [])))


def kind_of(node: ast.AST) -> str | None:
    """What can be done to a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPPOSITES:
        return "comparison"
    if isinstance(node, ast.BoolOp):
        return "and or"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        return "constant"
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "log" not in ast.unparse(node)[:12]
    return "left out" if is_call or isinstance(node, ast.AugAssign | ast.Raise) else None


def changed(function: _Function, number: int) -> _Function:
    """The function with the fault in one of its nodes."""
    made = copy.deepcopy(function)
    node: Any = nodes(made)[number]
    if isinstance(node, ast.Compare):
        node.ops[0] = _OPPOSITES[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    else:
        for parent in ast.walk(made):
            for body in vars(parent).values():
                if isinstance(body, list) and node in body:
                    body[body.index(node)] = ast.copy_location(ast.Pass(), node)
    return made


def faults(root: Path, seed: int) -> Iterator[Fault]:
    """Every fault that could be planted."""
    for area, patterns in AREAS.items():
        for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
            for name, function in functions(ast.parse(path.read_text())):
                text = ast.unparse(function)
                for number, node in enumerate(nodes(function)):
                    if (kind := kind_of(node)) is not None:
                        key = hashlib.sha256(f"{seed} {text} {kind} {number}".encode()).hexdigest()
                        line = getattr(node, "lineno", function.lineno)
                        yield Fault(area, str(path.relative_to(root)), name, kind, number, line, key)


def drawn(root: Path, beside: Path, seed: int, count: int) -> list[Fault]:
    """So many faults that both trees have, as many of each area as of any other, one a function at most."""
    found: list[Fault] = []
    shared = {fault.key for fault in faults(beside, seed)}
    for index, area in enumerate(AREAS):
        share = count // len(AREAS) + (index < count % len(AREAS))
        first: dict[tuple[str, str], Fault] = {}
        for fault in sorted(faults(root, seed), key=lambda fault: fault.key):
            if fault.area == area and fault.key in shared:
                first.setdefault((fault.file, fault.function), fault)
        found += list(first.values())[:share]
    return found


def imports(path: Path, root: Path) -> set[str]:
    """The files of the tree that a file imports itself."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = {f"{name.replace('.', '/')}.py" for name in names}
    return {file for file in files if (root / file).is_file()}


def _alike(test: str, file: str) -> bool:
    """Whether a test's name and a file's have a word in common, but for its ending."""
    words = [{word[:5] for word in Path(path).stem.split("_") if len(word) > 3} for path in (test, file)]
    return bool((words[0] - {"test"}) & words[1])


class Tests:
    """Which tests are run for a file, and whether they notice what was done to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._sound: dict[str, bool] = {}
        paths = [*root.glob("tests/unit/test_*.py"), *root.glob("tests/*.py")]
        read = {str(path.relative_to(root)): imports(path, root) for path in paths}
        # With what their helpers import: a test of a whole run imports little else.
        self._of_tests = {
            test: files.union(*(read.get(file, set()) for file in files))
            for test, files in read.items()
            if test.startswith("tests/unit/")
        }
        sources = [path for package in ("trainers", "tune", "cluster") for path in root.glob(f"{package}/**/*.py")]
        self._of_sources = {str(path.relative_to(root)): imports(path, root) for path in sources}

    def of(self, file: str) -> list[str]:
        """The test files for a module: named after it, then those that import it, then its importers, and so on."""
        names = (file, Path(file).parent.name)
        found = list(dict.fromkeys(test for name in names for test in sorted(self._of_tests) if _alike(test, name)))
        near, seen = {file}, {file}
        while near and len(found) < 2 * MOST_FILES:
            found += [test for test, read in sorted(self._of_tests.items()) if read & near and test not in found]
            near = {source for source, read in self._of_sources.items() if read & near} - seen
            seen |= near
        return [test for test in found[: 2 * MOST_FILES] if self._is_sound(test)][:MOST_FILES]

    def _is_sound(self, test: str) -> bool:
        if test not in self._sound:
            self._sound[test] = self.run([test]) == "passed"
        return self._sound[test]

    def run(self, files: list[str]) -> str:
        """Whether they have passed, failed or hung."""
        options = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not full and not campaign", "--durations=0")
        environment = os.environ | {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", *options, *files]
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                return "passed" if process.wait(LIMIT_S) == 0 else "failed"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                return "hung"


def plant(fault: Fault, root: Path) -> str:
    """Write the file with the fault; returns the line of the function that it has changed."""
    path = root / fault.file
    tree = ast.parse(path.read_text())
    function = dict(functions(tree))[fault.function]
    before = ast.unparse(function).splitlines()
    made = changed(function, fault.node)
    function.body = made.body
    path.write_text(ast.unparse(tree))
    return next(
        (line.strip() for line, old in zip(ast.unparse(made).splitlines(), before, strict=False) if line != old), ""
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="the checkout whose code and tests these are")
    parser.add_argument("--beside", type=Path, help="another checkout: only faults that both have are planted")
    parser.add_argument("--list", action="store_true", help="only say which faults would be planted")
    given = parser.parse_args()
    chosen = drawn(given.root, given.beside or given.root, given.seed, given.count)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch:
        copied = Path(scratch, "tree")
        shutil.copytree(given.root, copied, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "build"))
        tests = Tests(copied)
        for fault in chosen:
            sound = (copied / fault.file).read_text()
            files = [] if given.list else tests.of(fault.file)
            line = plant(fault, copied)
            ended = tests.run(files) if files else "passed"
            (copied / fault.file).write_text(sound)
            verdict = "-" if given.list else "survived" if ended == "passed" else "caught"
            rows.append({**vars(fault), "now": line, "tests": files, "verdict": verdict})
            place = f"{fault.file}:{fault.line} {fault.function}"
            print(f"{verdict:8} {fault.kind:10} {place}: {line}  ({', '.join(files)})", file=sys.stderr, flush=True)
    caught = sum(row["verdict"] == "caught" for row in rows)
    print(json.dumps({"seed": given.seed, "faults": len(rows), "caught": caught, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
