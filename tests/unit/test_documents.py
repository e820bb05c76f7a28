"""Every code block of every page is run, read by what it is for, or says why
not (tests/documents.py).
"""

import ast
import importlib
import importlib.util
import inspect
import re
import runpy
import shlex

import pytest

from tests.documents import LANGUAGES, RUN, blocks, pages
from tests.specs import REPOSITORY
from trainers.config import TrainConfig
from trainers.config.function import FunctionConfig
from trainers.config.model import build, keys_of, override
from trainers.config.yaml import parse_mapping
from trainers.task import Task
from tune.config import SweepConfig

BLOCKS = [block for page in pages() for block in blocks(page)]
MAKE = runpy.run_path(str(REPOSITORY / "docs/make.py"))
DOORS = {
    door: MAKE["door_commands"](door, settings)
    for door, settings in MAKE["DOORS"].items()
}
INSTALLED = {
    "paceline-train": "trainers",
    "paceline-sweep": "tune",
    "paceline-cluster": "cluster",
}
TARGETS = set(
    re.findall(
        r"^([\w -]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE
    )
)

SWEEP = {
    "train": RUN,
    "space": {"seed": [0, 1]},
    "objective": {"metric": "val_loss"},
}


def of(*languages):
    found = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize(
        "block", found, ids=[f"{block.page}:{block.line}" for block in found]
    )


def test_every_fence_says_what_it_is():
    assert [
        f"{block.page}:{block.line}"
        for block in BLOCKS
        if block.language not in LANGUAGES
    ] == []


def test_what_a_page_says_of_its_commands_is_true():
    """A comment is about commands of the next block, gives a reason, and names
    a test that is there.
    """
    wrong = []
    for block in BLOCKS:
        for fate in block.fates:
            place = f"{block.page}:{block.line}: {fate.kind} ({fate.words}): {fate.said}"
            about = [
                command for command in block.commands if fate.words in command
            ]
            if not about and not (
                block.language in ("python", "yaml") and not fate.words
            ):
                wrong.append(
                    f"{place}: it is about no command of the next block"
                )
            if fate.kind == "not run" and len(fate.said.split()) < 3:
                wrong.append(f"{place}: no reason")
            if fate.kind == "run by":
                file, _, test = fate.said.partition("::")
                path = REPOSITORY / file
                if not path.is_file() or (
                    file.startswith("tests/")
                    and f"def {test}(" not in path.read_text()
                ):
                    wrong.append(f"{place}: there is no such test")
    text = {page: (REPOSITORY / page).read_text() for page in pages()}
    comments = sum(
        len(re.findall(r"<!-- (?:not run|run by)", page))
        for page in text.values()
    )
    read = sum(len(block.fates) for block in BLOCKS)
    assert wrong == []
    assert comments == read, "one is not right before its block"


@of("sh", "console")
def test_commands_are_typed_right(block):
    """Also those that are not run: the options are there, and the files and
    targets that they name.
    """
    assert block.commands
    for command in block.commands:
        words = shlex.split(command)
        for word in words:
            if re.match(
                r"(examples|cluster|docs|tests|benchmarks)/[^*]*\.\w+$", word
            ):
                assert (REPOSITORY / word).exists(), command
        if words[0] == "make":
            assert all(
                "=" in word or any(word in names.split() for names in TARGETS)
                for word in words[1:]
            ), command
        _check_call(words)


def _check_call(words):
    if "--" in words:  # ray job submit ... -- COMMAND
        words = words[words.index("--") + 1 :]
    if words[0] in INSTALLED:
        door = INSTALLED[words[0]]
        arguments = words[1:]
    elif "-m" in words:
        door = words[words.index("-m") + 1]
        arguments = words[words.index("-m") + 2 :]
        assert importlib.util.find_spec(door) is not None, door
    else:
        return
    if door in DOORS and arguments[0] != "--schema":
        commands = DOORS[door]
        name = arguments[0] if arguments[0] in commands else ""
        typed = commands[name].parse(arguments[1:] if name else arguments)
        _check_keys(
            SweepConfig if door == "tune" else TrainConfig,
            typed.get("overrides", {}),
        )


def _check_keys(model, overrides):
    needed = SWEEP if model is SweepConfig else RUN
    build(model, override(model, needed, overrides), "the command")


@of("yaml")
def test_yaml_is_read_by_the_configuration(block):
    if block.fates:
        return
    tree = parse_mapping(block.text, f"{block.page}:{block.line}")
    if set(tree) & (set(keys_of(SweepConfig)) - set(keys_of(TrainConfig))):
        sweep = build(SweepConfig, SWEEP | tree, block.page)
        of_function = (
            isinstance(sweep.train, dict) and "train_func" in sweep.train
        )
        known = keys_of(FunctionConfig if of_function else TrainConfig)
        assert {key.partition(".")[0] for key in sweep.space} <= set(known)
        tree = tree["train"] if isinstance(tree.get("train"), dict) else RUN
    if "train_func" in tree:
        build(FunctionConfig, tree, block.page)
    else:
        missing = {key for key in RUN if key not in tree}
        missing -= {"epochs"} if "max_steps" in tree else set()
        missing -= (
            {"global_batch_size"}
            if {"batch_size_per_worker", "batch_schedule"} & set(tree)
            else set()
        )
        build(
            TrainConfig, {key: RUN[key] for key in missing} | tree, block.page
        )


@of("python")
def test_python_compiles_and_its_imports_are_there(block):
    """A task's methods have the parameters that the loop calls them with; what
    a page runs is run elsewhere.
    """
    module = ast.parse(block.text)
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            found = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(found, alias.name) or importlib.util.find_spec(
                    f"{node.module}.{alias.name}"
                )
        elif isinstance(node, ast.Import):
            assert all(
                importlib.util.find_spec(alias.name) for alias in node.names
            )
        elif isinstance(node, ast.ClassDef) and any(
            ast.unparse(base) == "Task" for base in node.bases
        ):
            for method in node.body:
                if (
                    isinstance(method, ast.FunctionDef)
                    and hasattr(Task, method.name)
                    and method.name != "__init__"
                ):
                    expected = list(
                        inspect.signature(
                            getattr(Task, method.name)
                        ).parameters
                    )
                    assert [one.arg for one in method.args.args] == expected, (
                        f"{node.name}.{method.name}"
                    )
