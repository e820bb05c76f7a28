"""Find and import what a configuration names as `module:name`."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.causes import raised_at
from trainers.config.model import Tree
from trainers.errors import ConfigError, did_you_mean
from trainers.launch.process import without_collection
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

    The module may be in the YAML file's directory or one above it, in the
    working directory, or installed.

    Raises ConfigError if the module is nowhere.
    """
    module, _, class_name = task.partition(":")
    own = []
    starts = []
    if task_dir:
        starts.append(Path(task_dir))
    if yaml_dir is not None:
        own.append(yaml_dir)
        starts += [yaml_dir, *yaml_dir.parents]
    for start in [*starts, Path.cwd()]:
        root = Path(os.path.abspath(start))  # noqa: PTH100 (no symlink is resolved)
        base = root.joinpath(*module.split("."))
        with contextlib.suppress(OSError):  # a name too long for a file
            if (
                base.with_suffix(".py").is_file()
                or (base / "__init__.py").is_file()
            ):
                return [str(path) for path in dict.fromkeys([root, *own])]
    with contextlib.suppress(ImportError, ValueError, OSError):
        if importlib.util.find_spec(module) is not None:
            return [str(path) for path in own]
    folder = yaml_dir or Path.cwd()
    where = (
        f"{Path.cwd() / (task_dir or '')}, in {folder} or a directory above it"
    )
    beside = [path.stem for path in folder.glob("*.py")]
    leaf = module.rpartition(".")[2]
    otherwise = "check the name and `task_dir`"
    fix = did_you_mean(
        leaf, beside, otherwise, lambda near: f"{near}:{class_name}"
    )
    file = module.replace(".", "/") + ".py"
    rule = f"cannot be found: no {file} in {where}, and no installed module of that name"
    raise ConfigError(key, task, rule, fix, source)


def portable(paths: list[str]) -> list[str]:
    """Inside a Ray job, make paths below the working directory relative to it.

    In the next job, the package is in another place, and maybe on another
    node.
    """
    if not inside_ray_job():
        return paths
    here = Path.cwd()
    found = []
    for path in map(Path, paths):
        is_below = path.is_relative_to(here)
        found.append(str(path.relative_to(here) if is_below else path))
    return found


def add_to_path(paths: list[str]) -> None:
    """Put directories first on `sys.path`.

    Relative ones are looked for below the working directory, then below the
    entries of `sys.path`.
    """
    for path in reversed(paths):
        for base in [str(Path.cwd()), *sys.path]:
            found = str(Path(base, path))
            if Path(found).is_dir():
                if found in sys.path:
                    sys.path.remove(found)
                sys.path.insert(0, found)
                break


def load_task(task: str, task_args: Tree, source: str) -> Task:
    """Import and construct a task; its directories must be on `sys.path`.

    Random numbers drawn meanwhile are the same in every process.

    Raises ConfigError.
    """
    with without_collection():
        from trainers.devices.device import drawn_alike
        from trainers.task import Task

        with drawn_alike():
            cls = load_class("task", task, Task, source)
    _check_call("task_args", task_args, cls, source, **task_args)
    with drawn_alike():
        made: Task = cls(**task_args)
    for name in vars(made).keys() & vars(Task).keys():
        _, *arguments = inspect.signature(vars(Task)[name]).parameters
        try:
            inspect.signature(vars(made)[name]).bind(*arguments)
        except TypeError as error:
            rule = f"sets self.{name}, which takes the place of {name}({', '.join(arguments)}) and cannot be called so ({error})"
            raise ConfigError(
                "task", task, rule, "rename the attribute", source
            ) from error
        except ValueError:  # a built-in function does not tell its signature
            pass
    return made


def load_class(key: str, named: str, base: type, source: str) -> type:
    """Import the class named `module:Class`, which must derive from `base`."""

    def fits(value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, base)

    kind = f"class derived from {base.__module__}.{base.__name__}"
    found: type = load_named(key, named, kind, fits, source)
    return found


def load_function(
    train_func: str, config: Tree, source: str
) -> Callable[[], Any]:
    """Import a training function; bind `config` if the function takes a parameter."""
    with without_collection():
        function: Callable[..., Any] = load_named(
            "train_func", train_func, "function", _is_function, source
        )
    if config or inspect.signature(function).parameters:
        _check_call("train_loop_config", config, function, source, config)
        return functools.partial(function, copy.deepcopy(config))
    return function


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def load_named(
    key: str, named: str, kind: str, fits: Callable[[Any], bool], source: str
) -> Any:
    """Import `module:name`; ConfigError if it is not of the `kind` that `fits` tests."""
    module_name, _, name = named.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        words = str(error)
        where = raised_at(error, below=1)
        if isinstance(error, SyntaxError) and error.filename:
            words = error.msg
            where = f"{Path(error.filename).name}:{error.lineno}"
        rule = (
            f"cannot be imported ({type(error).__name__}: {words}, at {where})"
        )
        fix = "fix that line or install what it needs"
        raise ConfigError(key, named, rule, fix, source) from error
    found = getattr(module, name, None)
    if not fits(found):
        rule = f"names no {kind} in {getattr(module, '__file__', module_name)}"
        there = [other for other, value in vars(module).items() if fits(value)]
        otherwise = "name one, or write it"
        fix = did_you_mean(
            name, there, otherwise, lambda near: f"{module_name}:{near}"
        )
        raise ConfigError(key, named, rule, fix, source)
    return found


def _check_call(
    key: str, value: Any, called: Any, source: str, *args: Any, **given: Any
) -> None:
    """Raise ConfigError if a class or function does not accept these arguments."""
    signature = inspect.signature(called)
    name = getattr(called, "__name__", "it")
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        rule = f"does not fit {name} ({error})"
        fix = f"match the signature {name}{signature}"
        raise ConfigError(key, value, rule, fix, source) from error
