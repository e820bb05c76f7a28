"""A task's module is found as the user means it, wherever the command is
started; what is wrong is said.
"""

import sys
import uuid
from pathlib import Path

import pytest

from trainers.errors import ConfigError
from trainers.launch.user_code import (
    add_to_path,
    load_task,
    portable,
    task_path,
)

TASK = """
from trainers.task import Task

class Mine(Task):
    def __init__(self, width=3, *, depth: int = 1):
        self.width, self.depth = width, depth

class Plain(Task):
    pass

class Needs(Task):
    def __init__(self, width):
        self.width = width

class Sets(Task):
    def __init__(self, attribute):
        setattr(self, attribute, len)

class NoTask:
    pass

value = 3
"""


@pytest.fixture
def name():
    """A module name that no other test has imported."""
    return f"task_{uuid.uuid4().hex[:8]}"


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch, tmp_path):
    """sys.path, sys.modules and the working directory as they were."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for module in set(sys.modules) - before:
        if module.startswith(("task_", "package_")):
            del sys.modules[module]


def write(path, text=TASK):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path.parent


def load(path, task, **args):
    add_to_path(path)
    return load_task(task, dict(args), "train.yaml")


def test_a_module_beside_the_yaml_is_found_from_another_directory(
    tmp_path, name
):
    folder = write(tmp_path / "user" / f"{name}.py")
    path = task_path(f"{name}:Mine", None, folder, "train.yaml")
    assert path == [str(folder)]
    task = load(path, f"{name}:Mine", width=5, depth=2)
    assert (task.width, task.depth) == (5, 2)


def test_a_package_above_the_yaml_is_found(tmp_path, name):
    package = name.replace("task", "package")
    folder = write(tmp_path / "repo" / package / "digits" / "task.py")
    path = task_path(f"{package}.digits.task:Mine", None, folder, "train.yaml")
    # The root for the package, and the YAML's own directory for what the task
    # imports from beside it.
    assert path == [str(tmp_path / "repo"), str(folder)]
    assert type(load(path, f"{package}.digits.task:Mine")).__name__ == "Mine"


def test_a_task_may_import_its_neighbours(tmp_path, name):
    package = name.replace("task", "package")
    folder = write(
        tmp_path / "repo" / package / "task.py",
        f"from {name}_helper import *\n" + TASK,
    )
    write(folder / f"{name}_helper.py", "answer = 42\n")
    path = task_path(f"{package}.task:Mine", None, folder, "train.yaml")
    load(path, f"{package}.task:Mine")


def test_task_dir_wins_over_both(tmp_path, name):
    write(Path.cwd() / f"{name}.py")
    folder = write(tmp_path / "user" / f"{name}.py")
    given = write(tmp_path / "given" / f"{name}.py")
    assert task_path(f"{name}:Mine", str(given), folder, "train.yaml")[
        0
    ] == str(given)


@pytest.mark.parametrize("given", ["nowhere", "/no/such"])
def test_a_wrong_task_dir_is_named_in_full(tmp_path, name, given):
    with pytest.raises(ConfigError) as raised:
        task_path(f"{name}:Mine", given, tmp_path, "train.yaml")
    assert str(Path.cwd() / given) in raised.value.rule


def test_an_installed_module_needs_no_directory(tmp_path):
    assert task_path("trainers.task:Task", None, None, "train.yaml") == []
    assert task_path("json:Mine", None, tmp_path, "train.yaml") == [
        str(tmp_path)
    ]


def wrong(tmp_path, name, cls, text=TASK, **args):
    add_to_path([str(write(tmp_path / "user" / f"{name}.py", text))])
    with pytest.raises(ConfigError) as raised:
        load_task(f"{name}:{cls}", dict(args), "train.yaml")
    assert raised.value.exit_code == 2
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


@pytest.mark.parametrize(
    ("cls", "args", "words"),
    [("Mine", {"wide": 1}, "'wide'"), ("Needs", {}, "'width'")],
)
def test_task_args_must_fit_the_signature(tmp_path, name, cls, args, words):
    text = wrong(tmp_path, name, cls, **args)
    assert "`task_args: " in text
    assert words in text


def test_an_attribute_must_be_callable_as_the_method_that_it_hides(
    tmp_path, name
):
    text = wrong(tmp_path, name, "Sets", attribute="transform")
    assert "self.transform" in text
    assert "(batch, training)" in text
    assert load_task(f"{name}:Sets", {"attribute": "collate"}, "test")


@pytest.mark.parametrize(
    ("text", "line", "kind"),
    [
        (
            "import json\nimport not_installed_anywhere\n",
            2,
            "ModuleNotFoundError",
        ),
        ("x = 1\ny = = 2\n", 2, "SyntaxError"),
        ("def f():\n    return 1 / 0\n\nf()\n", 2, "ZeroDivisionError"),
    ],
)
def test_an_error_in_the_module_names_its_line(
    tmp_path, name, text, line, kind
):
    """The line of the user's own file, wherever below it the error was raised."""
    said = wrong(tmp_path, name, "Mine", text + TASK)
    assert f"cannot be imported ({kind}: " in said
    assert f"{name}.py:{line}" in said
    assert "<frozen" not in said


def test_paths_below_the_working_directory_are_portable(
    tmp_path, name, monkeypatch
):
    """A Ray job's package lies elsewhere on each node: relative directories
    mean the same there.
    """
    driver = tmp_path / "driver"
    node = tmp_path / "node"
    for root in (driver, node):
        write(root / "examples" / "x" / f"{name}.py")
    monkeypatch.chdir(driver)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    paths = portable(
        [
            str(driver / "examples" / "x"),
            str(driver),
            str(tmp_path / "outside"),
        ]
    )
    assert paths == ["examples/x", ".", str(tmp_path / "outside")]

    monkeypatch.chdir(node)
    add_to_path(paths)
    assert sys.path[0] == str(node / "examples" / "x")
    task = load_task(f"{name}:Mine", {}, "train.yaml")
    assert sys.modules[type(task).__module__].__file__ == str(
        node / "examples" / "x" / f"{name}.py"
    )
