"""Find the module of a task or a training function as the user means it.

Beside the YAML, above it, in the working directory, or installed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.errors import ConfigError, did_you_mean
from trainers.launch.imports import without_collection
from trainers.storage import inside_ray_job

if TYPE_CHECKING:
    from trainers.task import Task


def task_path(
    task: str,
    task_dir: str | None,
    yaml_dir: Path | None,
    source: str,
    key: str = "task",
) -> list[str]:
    """Return the directories that `sys.path` needs for the module that `key` names.

    Looks for files, and imports nothing.

    Raises ConfigError when there is neither such a file nor such an installed module.
    """
    module, _, class_name = task.partition(":")
    own = [yaml_dir] if yaml_dir is not None else []
    for start in [
        *([Path(task_dir)] if task_dir else []),
        *own,
        *(yaml_dir.parents if yaml_dir else []),
        Path.cwd(),
    ]:
        root = Path(os.path.abspath(start))  # noqa: PTH100 (no symlink is resolved)
        base = root.joinpath(*module.split("."))
        with contextlib.suppress(OSError):  # a name too long for a file
            if base.with_suffix(".py").is_file() or (base / "__init__.py").is_file():
                return [str(path) for path in dict.fromkeys([root, *own])]
    if _is_installed(module):
        return [str(path) for path in own]
    where = f"in {yaml_dir} or a directory above it, " if yaml_dir else ""
    beside = sorted(path.stem for path in yaml_dir.glob("*.py")) if yaml_dir else []
    otherwise = "check the name, or set `task_dir`"
    fix = did_you_mean(
        module.rsplit(".", 1)[-1],
        beside,
        otherwise,
        lambda near: f"{near}:{class_name}",
    )
    file = module.replace(".", "/") + ".py"
    rule = f"cannot be found: no {file} {where}in {Path.cwd()}, nor an installed module"
    raise ConfigError(key, task, rule, fix, source)


def _is_installed(module: str) -> bool:
    """Whether the import system finds a module; imports no parent of it."""
    top, *below = module.split(".")
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec(top)
        for name in below:
            places = spec.submodule_search_locations if spec else None
            spec = (
                PathFinder.find_spec(f"{spec.name}.{name}", places)
                if spec and places and name
                else None
            )
        return spec is not None
    return False


def portable(paths: list[str]) -> list[str]:
    """Make directories below the working directory relative, inside a Ray job.

    The job's package lies elsewhere for the next job, and maybe on another node.

    Outside of one, return the paths as they are.
    """
    if not inside_ray_job():
        return paths
    here = Path.cwd()
    return [
        str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
        for path in paths
    ]


def add_to_path(paths: list[str]) -> None:
    """Put directories first on `sys.path`; relative ones lie below its entries."""
    for path in reversed(paths):
        candidates = (Path(base, path) for base in [str(Path.cwd()), *sys.path])
        found = next(
            (str(candidate) for candidate in candidates if candidate.is_dir()), None
        )
        if found is not None:
            if found in sys.path:
                sys.path.remove(found)
            sys.path.insert(0, found)


def _where(error: Exception) -> str:
    """Return file and line of a failed import: the innermost frame of the user's code."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    libraries = ("site-packages", "<frozen", sysconfig.get_path("stdlib"))
    theirs = [
        frame
        for frame in frames[1:]
        if not any(part in frame.filename for part in libraries)
    ]
    at = (theirs or frames)[-1]
    return f"{Path(at.filename).name}:{at.lineno}"


def load_task(task: str, task_args: dict[str, Any], source: str) -> Task:
    """Import and construct a task; its directories must be on `sys.path`.

    ConfigError says what is wrong.

    What it draws at random meanwhile is the same in every process.
    """
    with without_collection():
        from trainers.devices.rng import drawn_alike
        from trainers.task import Task

        with drawn_alike():
            cls = load_named("task", task, "class", source)
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        raise ConfigError(
            "task",
            task,
            "is not a trainers.task.Task",
            "derive the class from Task",
            source,
        )
    _check_call("task_args", task_args, cls, source, **task_args)
    with drawn_alike():
        return cls(**task_args)


def load_function(
    train_func: str, config: dict[str, Any], source: str
) -> Callable[[], Any]:
    """Import a training function and bind `config` where it takes one."""
    with without_collection():
        function: Callable[..., Any] = load_named(
            "train_func", train_func, "function", source
        )
    if not callable(function) or isinstance(function, type):
        raise ConfigError(
            "train_func", train_func, "is no function", "name one", source
        )
    if config or inspect.signature(function).parameters:
        _check_call("train_loop_config", config, function, source, config)
        return functools.partial(function, copy.deepcopy(config))
    return function


def load_named(key: str, named: str, kind: str, source: str) -> Any:
    """Import what `module:name` means, a class or a function."""
    module_name, _, name = named.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        words = error.msg if isinstance(error, SyntaxError) else str(error)
        rule = (
            f"cannot be imported ({type(error).__name__}: {words}, at {_where(error)})"
        )
        raise ConfigError(
            key, named, rule, "fix that line or install what it needs", source
        ) from error
    found = getattr(module, name, None)
    if found is None:
        fix = did_you_mean(
            name,
            dir(module),
            f"name a {kind} that is there",
            lambda near: f"{module_name}:{near}",
        )
        raise ConfigError(
            key, named, f"names no {kind} of {module.__file__}", fix, source
        )
    return found


def _check_call(
    key: str, value: Any, called: Any, source: str, *args: Any, **given: Any
) -> None:
    """Raise ConfigError where a class or function does not take these arguments."""
    signature = inspect.signature(called)
    name = getattr(called, "__name__", "it")
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        rule = f"does not fit {name} ({error})"
        fix = f"its signature is {name}{signature}"
        raise ConfigError(key, value, rule, fix, source) from error
