"""Write the pages of docs/ that come from the code; a test checks them.

Run as (`make docs` writes all):
    python docs/make.py [config | commands | api | benchmarks] > docs/config.md
    python docs/make.py [train | sweep] > trainers/schema.json    (tune/schema.json)
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainers.command_line import Command, entries
from trainers.config import TrainConfig
from trainers.config.function import FunctionConfig
from trainers.config.model import Settings
from tune.config import SweepConfig

CONFIG = """# Configuration

Every key of `train.yaml` and `sweep.yaml` (`make docs` writes this page from the code). On the command line,
`--dotted.key value` sets a key, and `--train.dotted.key value` a key of a sweep's run. Files are YAML 1.2: `1e-3` is a
number and `off` is a word. The error for an unknown key, or for another tool's name (`accumulate_grad_batches`), names
the right key. A task's run needs exactly one of `global_batch_size`, `batch_size_per_worker` and `batch_schedule`, and
exactly one of `epochs` and `max_steps`.
"""
COMMANDS = """# Commands

What `--help` prints for each command (`make docs` writes this page). `paceline-train`, `paceline-sweep` and
`paceline-cluster` are the same commands, once Paceline is installed. `--dotted.key value` sets any key of
[config.md](config.md). `--name value` and `--name=value` are the same; a name may have hyphens or underscores.
[training.md](training.md#what-it-shows) explains `--quiet, --json`.
"""
QUIET = re.compile(r"--quiet .*\n +--json .*")
"""The help of two options that many commands share: the page explains them once."""
API = """# Python

The public names and their docstrings (`make docs` writes this page). [python.md](python.md) shows how to use them, and
[tasks.md](tasks.md) when each method of a task is called. Anything not listed here may change in any release.
"""
DOORS = {"trainers": TrainConfig, "tune": SweepConfig, "cluster": None}
MODULES = ("trainers", "tune", "tune.ray")
RETURNED = (
    "trainers.inference:TrainedRun",
    "trainers.on_ray.trainer:FunctionRun",
    "tune.sweeps.sweep:SweepResult",
)


def markdown(
    title: str, model: type[Settings], above: type[Settings] | None = None
) -> str:
    """Return all keys as a section of docs/config.md.

    Keys that the model `above` has with the same default and text are only named.
    """
    known = [] if above is None else [*entries(above)]
    own = [entry for entry in entries(model) if entry not in known]
    rows = (
        f"| `{key}` | {default} | {text} |".replace("[", "\\[")
        for key, default, text in own
    )
    shared = dict.fromkeys(
        key.partition(".")[0]
        for key, *rest in entries(model)
        if (key, *rest) in known
    )
    named = (
        [f"As above: {', '.join(f'`{key}`' for key in shared)}.", ""]
        if shared
        else []
    )
    return "\n".join(
        [
            f"## {title}",
            "",
            *named,
            "| key | default | meaning |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def config() -> str:
    """Return docs/config.md: every key of the YAML files."""
    of_function = markdown(
        "train.yaml with train_func", FunctionConfig, TrainConfig
    )
    return "\n".join(
        [
            CONFIG,
            markdown("train.yaml", TrainConfig),
            of_function,
            markdown("sweep.yaml", SweepConfig),
        ]
    )


def commands() -> str:
    """Return docs/commands.md: every command and option."""
    parts = [COMMANDS]
    for door, settings in DOORS.items():
        module = importlib.import_module(f"{door}.__main__")
        about, _, exit_codes = (inspect.getdoc(module) or "").rpartition(
            "\n\n"
        )
        about = re.sub(
            r"^    (.*)$", r"```text\n\1\n```", about, flags=re.MULTILINE
        )
        parts += [f"## python -m {door}\n", f"{about}\n", f"{exit_codes}\n"]
        parts += [
            f"```text\n{QUIET.sub('--quiet, --json', one.help())}\n```\n"
            for one in newest(door_commands(door, settings))
        ]
    return "\n".join(parts)


def door_commands(
    door: str, settings: type[Settings] | None
) -> dict[str, Command]:
    """Return a package's commands by their words; the one without a word is ""."""
    module: Any = importlib.import_module(f"{door}.__main__")
    found: dict[str, Callable[..., int]] = {}

    def caught(
        _call: str,
        _doc: str | None,
        functions: dict[str, Callable[..., int]],
        *_rest: Any,
        **_named: Any,
    ) -> int:
        found.update(functions)
        return 0

    run = module.run
    module.run = caught
    try:
        module.main([])
    finally:
        module.run = run
    return {
        word: Command(f"python -m {door} {word}".rstrip(), function, settings)
        for word, function in found.items()
    }


def newest(commands: dict[str, Command]) -> list[Command]:
    """Return one command per function: of two names, the one listed last."""
    return list(
        {command.function: command for command in commands.values()}.values()
    )


def api() -> str:
    """Return docs/api.md: the public names, and the classes that functions return."""
    parts = [API]
    for name in MODULES:
        module = importlib.import_module(name)
        parts += [
            f"## {name}\n",
            *(
                _name(public, getattr(module, public))
                for public in module.__all__
            ),
        ]
    parts += ["## What they return\n"]
    for place in RETURNED:
        module_name, _, name = place.partition(":")
        parts += [
            _name(name, getattr(importlib.import_module(module_name), name))
        ]
    return "\n".join(parts)


def _name(name: str, value: Any) -> str:
    """Return a class's or function's docstring, and those of a class's methods."""
    text = f"### {name}\n\n{_text(value)}\n"
    if inspect.isclass(value) and issubclass(value, Settings):
        return text.rstrip() + " [config.md](config.md) has its keys.\n"
    if not inspect.isclass(value):
        return text.replace("\n\n", f"\n\n```text\n{_head(value)}\n```\n\n", 1)
    if "__init__" in vars(value) and "__init__" in inspect.getsource(value):
        text = text.replace(
            "\n\n", f"\n\n```text\n{_head(value.__init__, name)}\n```\n\n", 1
        )
    text += "".join(f"\n- {line}" for line in _attributes(value)) + "\n" * any(
        _attributes(value)
    )
    if value.__module__.startswith(
        "trainers.data."
    ):  # whose methods are the loop's
        return text
    for word, member in vars(value).items():
        member = getattr(member, "fget", member)
        if (
            inspect.isfunction(member)
            and not word.startswith("_")
            and member.__doc__
        ):
            text += f"\n#### {word}\n\n```text\n{_head(member)}\n```\n\n{_text(member)}\n"
    return text


def _attributes(value: type) -> list[str]:
    """Return the documented attributes of a class and of its base classes."""
    found = []
    for part in reversed(
        [
            one
            for one in value.__mro__
            if one.__module__.partition(".")[0] in DOORS
        ]
    ):
        [node] = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in itertools.pairwise(node.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                meaning = " ".join(str(text.value.value).split())
                found.append(
                    f"`{ast.unparse(field.target)}: {ast.unparse(field.annotation)}`: {meaning}"
                )
    return found


def _head(function: Any, name: str = "") -> str:
    """Return a function's signature as in its source, in lines of 110 characters."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    node.args.args = [one for one in node.args.args if one.arg != "self"]
    returns = (
        f" -> {ast.unparse(node.returns)}" if node.returns and not name else ""
    )
    given = [
        ast.unparse(one)
        for one in node.decorator_list
        if ast.unparse(one) == "property"
    ]
    head = f"{name or node.name}({ast.unparse(node.args)}){returns}"
    wrapped = textwrap.fill(
        head,
        110,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join([*(f"@{one}" for one in given), wrapped])


def _text(value: Any) -> str:
    """Return a docstring as Markdown: only the list of arguments is converted."""
    text = inspect.getdoc(value) or ""
    before, named, after = text.partition("Args:\n")
    arguments, _, rest = after.partition("\n\n")
    listed = re.sub(
        r"^    (\w+): ", r"- `\1`: ", arguments, flags=re.MULTILINE
    )
    listed = re.sub(r"^ {8}", "  ", listed, flags=re.MULTILINE)
    return f"{before}{listed}\n\n{rest}".rstrip() if named else text


def benchmarks() -> str:
    """Return docs/benchmarks.md: the newest kept figures of each benchmark."""
    return str(_beside("figures").page())


def train() -> str:
    """Return the schema of train.yaml."""
    return str(_beside("schemas").train())


def sweep() -> str:
    """Return the schema of sweep.yaml."""
    return str(_beside("schemas").sweep())


def _beside(name: str) -> Any:
    """Import a module of this folder."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


PAGES = {page.__name__: page for page in (config, commands, api, benchmarks)}
"""The functions that return docs/NAME.md, by NAME."""
SCHEMAS = {"trainers/schema.json": train, "tune/schema.json": sweep}

if __name__ == "__main__":
    makers = PAGES | {maker.__name__: maker for maker in SCHEMAS.values()}
    print(makers[sys.argv[1] if len(sys.argv) > 1 else "config"](), end="")
