"""Turn a run given from Python into what a file would say: plain data and names.

Workers import a task by the name of its module. What is defined in a notebook lies in
no module: its cells' source is written to one, in notebook_tasks/, and that file is
what trains, now and from the configuration that is saved.
"""

import ast
import hashlib
import importlib
import inspect
import linecache
import os
import symtable
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from trainers.errors import MISSING, ConfigError
from trainers.launch.spec import read_file
from trainers.redaction import redact

Given = str | os.PathLike[str] | Mapping[str, Any] | type | Callable[..., Any]
"""A file or URI, a mapping of keys, a Task class, or a training function of Ray
Train's.
"""

_FOLDER = "notebook_tasks"
_FIX = "make it in the class, pass it in `task_args`, or write the class to a file (`%%writefile task.py`)"


def check_thread(call: str) -> None:
    """Raise ConfigError outside the main thread, where alone Python hears of Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            call,
            MISSING,
            "was called in a thread of its own",
            "call it in the main thread",
        )


def read_given(run: Given, call: str) -> tuple[dict[str, Any], str, Path | None]:
    """Return a run's mapping, its source for messages, and its directory.

    Raises ConfigError, in which `call` names what the user has called.
    """
    if isinstance(run, str | os.PathLike):
        location = os.fspath(run)
        tree, directory = read_file(location)
        return tree, location, directory
    places: list[Path] = []
    if isinstance(run, type) or inspect.isroutine(run):
        run = {"task" if isinstance(run, type) else "train_func": run}
    if not isinstance(run, Mapping):
        rule = f"is a {type(run).__name__}, where a file, a mapping, a Task class or a function is needed"
        raise ConfigError(
            call,
            MISSING,
            rule,
            "of a task give the class, and its arguments as `task_args`",
        )
    tree = plain(run, call, places)
    return tree, call, places[0] if places else Path.cwd()


def plain(value: Any, call: str, places: list[Path], key: str = "") -> Any:
    """Return plain data, as a file has it; adds directories of classes to `places`."""
    if isinstance(value, Mapping):
        return {
            str(name): plain(one, call, places, f"{key}.{name}".lstrip("."))
            for name, one in value.items()
        }
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, list | tuple | range):
        return [plain(one, call, places, key) for one in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, type) or inspect.isroutine(value):
        name, place = _reference(value, call, key)
        if place is not None:
            places.append(place)
        return name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    rule = f"holds a {type(value).__name__}, which no file can"
    raise ConfigError(
        key, MISSING, rule, "give numbers, text, lists and mappings", call
    )


def _reference(thing: Any, call: str, key: str) -> tuple[str, Path | None]:
    """Return `module:name` of a class or function, and its directory unless installed."""
    name = thing.__qualname__
    module = thing.__module__
    main = sys.modules["__main__"]
    if not name.isidentifier():
        fix = "define it with `class` or `def` at the top level of a module, or of a notebook"
        raise ConfigError(key, name, "has no name in its module", fix, call)
    file, script = (
        getattr(sys.modules.get(one), "__file__", None) for one in (module, "__main__")
    )
    if module == "__main__":
        if file is None:
            module, root = _write_module(thing, call, key)
            return f"{module}:{name}", root
        module = main.__spec__.name if main.__spec__ else Path(file).stem
    elif (
        file is not None
        and script is not None
        and Path(file).absolute() == Path(script).absolute()
    ):
        rule = f"is called whenever {file} is imported, as workers do"
        fix = 'put it below `if __name__ == "__main__":`'
        raise ConfigError(call, MISSING, rule, fix)
    if file is None or "site-packages" in (path := Path(os.path.abspath(file))).parts:  # noqa: PTH100 (as for a YAML)
        return f"{module}:{name}", None
    return f"{module}:{name}", path.parents[
        module.count(".") + (path.name == "__init__.py")
    ]


def _write_module(thing: Any, call: str, key: str) -> tuple[str, Path]:
    """Write a notebook's class or function, and all it uses, as a module beside it.

    Imports are taken over, functions and classes by their source, and anything else by
    its value. ConfigError names what cannot be written down. A module is named by what
    it says: a class that has changed is another task.
    """
    space = vars(sys.modules["__main__"])
    imports = list[str]()
    definitions = list[str]()
    seen = set[str]()

    def add(name: str, value: Any) -> None:
        if name in seen:
            return
        seen.add(name)
        home = getattr(value, "__module__", None)
        own = getattr(value, "__qualname__", None)
        if isinstance(value, ModuleType):
            imports.append(
                f"import {value.__name__}"
                + (f" as {name}" if name != value.__name__ else "")
            )
        elif home == "__main__" and (
            isinstance(value, type) or inspect.isfunction(value)
        ):
            if own != name and own in space:
                add(own, value)
                definitions.append(f"{name} = {own}")
                return
            source = _source(value)
            if source is None:
                raise refused(name, "has no source that can be found")
            for used in sorted(_globals(symtable.symtable(source, name, "exec"))):
                if used in space:
                    add(used, space[used])
            definitions.append(source)
        elif own and getattr(sys.modules.get(str(home)), own, None) is value:
            imports.append(
                f"from {home} import {own}" + (f" as {name}" if name != own else "")
            )
        elif _is_literal(value):
            definitions.append(f"{name} = {value!r}")
            if redact(definitions[-1]) != definitions[-1]:
                raise refused(
                    name,
                    "holds a secret, which no file may",
                    "read it from the environment, in the class",
                )
        else:
            raise refused(
                name, f"is a {type(value).__name__} that only this notebook has"
            )

    def refused(name: str, rule: str, fix: str = _FIX) -> ConfigError:
        return ConfigError(
            key,
            thing.__name__,
            f"cannot be given to workers: `{name}` {rule}",
            fix,
            call,
        )

    add(thing.__name__, thing)
    head = "# Written by Paceline from the cells of a notebook.\nfrom __future__ import annotations"
    text = "\n\n\n".join(["\n".join([head, *sorted(imports)]), *definitions]) + "\n"
    digest = hashlib.sha256(ast.dump(ast.parse(text)).encode()).hexdigest()[:8]
    file = Path.cwd() / _FOLDER / f"{thing.__name__}_{digest}.py"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        importlib.invalidate_caches()
    return f"{_FOLDER}.{file.stem}", file.parent.parent


def _source(thing: Any) -> str | None:
    """Return the statement that defined a class or function, from its cell."""
    members = vars(thing).values() if isinstance(thing, type) else [thing]
    functions = (getattr(one, "__func__", getattr(one, "fget", one)) for one in members)
    for code in (one.__code__ for one in functions if inspect.isfunction(one)):
        lines = linecache.getlines(code.co_filename)
        for node in ast.parse("".join(lines)).body:
            if not isinstance(
                node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                continue
            if node.name == thing.__name__ and code.co_firstlineno <= (
                node.end_lineno or 0
            ):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno]).rstrip()
    return None


def _globals(table: symtable.SymbolTable) -> set[str]:
    """Return the names that source reads from its module."""
    found = {
        one.get_name()
        for one in table.get_symbols()
        if one.is_referenced() and one.is_global()
    }
    return found.union(*map(_globals, table.get_children()))


def _is_literal(value: Any) -> bool:
    """Whether its `repr` is Python that gives it again."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError):
        return False
