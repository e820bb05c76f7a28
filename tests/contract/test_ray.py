"""What we use of Ray, with the Ray that is installed: `make ray-contract RAY=2.55.0`.

What runs there, tests/on_ray and tests/commands show of the Ray that is
pinned.
"""

import ast
import contextlib
import functools
import importlib
import inspect

import pyarrow.parquet as pq
import pytest

from tests.rooms import source_files
from tests.specs import read_json


def found_in_ray(dotted):
    """What a dotted name is in this Ray; raises ImportError or AttributeError."""
    module = dotted
    rest = []
    while True:  # a module before a function of the same name
        try:
            return functools.reduce(
                getattr, rest, importlib.import_module(module)
            )
        except ModuleNotFoundError as error:
            if (
                error.name is None
                or not dotted.startswith(error.name)
                or "." not in module
            ):
                raise
            module, _, last = module.rpartition(".")
            rest.insert(0, last)


def required(tree):
    """All nodes but those of a `try` that does without what it tries to import."""
    yield tree
    is_optional = isinstance(tree, ast.Try) and any(
        "ImportError" in ast.unparse(one) for one in tree.handlers
    )
    for child in ast.iter_child_nodes(tree):
        if not (is_optional and child in tree.body):
            yield from required(child)


def names_of_ray(tree):
    """The names that a file's imports give to something of Ray's, and what
    that is called in Ray.
    """
    names = {}
    for node in required(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "ray":
                    names[alias.asname or "ray"] = (
                        alias.name if alias.asname else "ray"
                    )
                    found_in_ray(alias.name)
        elif (
            isinstance(node, ast.ImportFrom)
            and str(node.module).split(".")[0] == "ray"
        ):
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}"
                for alias in node.names
            }
    return names


def breaches(path):
    """What a file imports, reads or calls of Ray that this Ray does not have,
    or not with these arguments.
    """
    tree = ast.parse(path.read_text())
    names = names_of_ray(tree)
    missing = []

    def of_ray(node):
        first, *rest = ast.unparse(node).split(".")
        is_path = isinstance(node, ast.Name | ast.Attribute) and all(
            map(str.isidentifier, rest)
        )
        return (
            ".".join([names[first], *rest])
            if is_path and first in names
            else None
        )

    for node in required(tree):
        called = of_ray(node.func) if isinstance(node, ast.Call) else None
        try:
            if (dotted := called or of_ray(node)) is None:
                continue
            found = found_in_ray(dotted)
            if called is not None and not any(
                isinstance(one, ast.Starred) for one in node.args
            ):
                assert isinstance(node, ast.Call)
                given = {
                    keyword.arg: None
                    for keyword in node.keywords
                    if keyword.arg is not None
                }
                with contextlib.suppress(
                    ValueError
                ):  # compiled: it has no signature
                    inspect.signature(found).bind_partial(*node.args, **given)
        except (ImportError, AttributeError, TypeError) as error:
            missing.append(f"{path.name}: {dotted}: {error}")
    return missing


def test_all_that_the_code_names_of_ray_is_there_and_takes_what_it_is_given(
    tmp_path,
):
    assert [
        breach for path in source_files() for breach in breaches(path)
    ] == []
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import ray.train\nray.train.RunConfig(name='a', colour='red')\nray.no_such_thing\n"
    )
    assert len(breaches(probe)) == 2


@pytest.mark.campaign
def test_a_sweep(tmp_path, command):
    options = [
        "--search",
        "random",
        "--budget.trials",
        "2",
        "--finalists",
        "0",
        "--storage_path",
        str(tmp_path),
    ]
    done = command("-m tune examples/digits/sweep.yaml", *options)
    assert done.code == 0, done.err[-3000:]
    rows = pq.read_table(
        tmp_path / "digits-sweep" / "results.parquet"
    ).to_pylist()
    trials = [row for row in rows if row["purpose"] == "trial"]
    assert len(trials) == 2, rows
    assert {trial["status"] for trial in trials} <= {"done", "stopped"}, rows


@pytest.mark.campaign
def test_a_training_on_ray(tmp_path, command):
    options = [
        "--launcher",
        "ray",
        "--scaling.num_workers",
        "[1, 2]",
        "--epochs",
        "2",
        "--storage_path",
        str(tmp_path),
    ]
    done = command("-m trainers examples/digits/train.yaml", *options)
    assert done.code == 0, done.err[-3000:]
    assert read_json(tmp_path / "digits" / "result.json")["status"] == "done"


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["ours-first", "no-init"])
def test_a_sweep_by_the_drop_in(how, command):
    done = command("-m tests.commands.first_script", how)
    assert "DOUBLES [2, 4] []" in done.out, done.err[-3000:]
