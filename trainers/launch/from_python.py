"""Turn a run given from Python into plain data and names, as a file would have them.

Workers import a task by the name of its module. A class or function defined in
a notebook is in no module, so the source of its cells is written to a module
in notebook_tasks/.
"""

import ast
import builtins
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

from trainers.config.model import Tree
from trainers.errors import MISSING, ConfigError, redact
from trainers.launch.spec import read_file

Given = str | os.PathLike[str] | Mapping[str, Any] | type | Callable[..., Any]
"""A file or URI, a mapping of keys, a Task class, or a training function for
Ray Train.
"""

_FOLDER = "notebook_tasks"
_FIX = "create it in the class, pass it in `task_args`, or write the class to a file (`%%writefile task.py`)"


def check_thread(call: str) -> None:
    """Raise ConfigError outside the main thread, the only one that receives Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        rule = "was called outside the main thread"
        raise ConfigError(call, MISSING, rule, "call it in the main thread")


def read_given(run: Given, call: str) -> tuple[Tree, str, Path | None]:
    """Return a run's mapping, its source for messages, and its directory.

    Raises ConfigError, in which `call` names the function that the user
    called.
    """
    if isinstance(run, str | os.PathLike):
        location = os.fspath(run)
        tree, directory = read_file(location)
        return tree, location, directory
    places: list[Path] = []
    if isinstance(run, type):
        run = {"task": run}
    elif inspect.isroutine(run):
        run = {"train_func": run}
    if not isinstance(run, Mapping):
        rule = f"was given a {type(run).__name__}, but needs a file, a mapping, a Task class or a function"
        fix = "give a task as its class, and its arguments as `task_args`"
        raise ConfigError(call, MISSING, rule, fix)
    tree = plain(run, call, places)
    return tree, call, places[0] if places else Path.cwd()


def plain(value: Any, call: str, places: list[Path], key: str = "") -> Any:
    """Convert to plain data as in a file; append directories of classes to `places`."""
    if isinstance(value, Mapping):
        return {
            str(name): plain(part, call, places, f"{key}.{name}".lstrip("."))
            for name, part in value.items()
        }
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, list | tuple | range):
        return [plain(part, call, places, key) for part in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, type) or inspect.isroutine(value):
        name, place = _reference(value, call, key)
        if place is not None:
            places.append(place)
        return name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    rule = f"holds a {type(value).__name__}, which a file cannot hold"
    raise ConfigError(
        key, MISSING, rule, "give numbers, text, lists and mappings", call
    )


def _reference(thing: Any, call: str, key: str) -> tuple[str, Path | None]:
    """Return `module:name` of a class or function, and its directory if not installed."""
    name = thing.__qualname__
    module = thing.__module__
    main = sys.modules["__main__"]
    if not name.isidentifier():
        fix = "define it with `class` or `def` at the top level of a module, or of a notebook"
        raise ConfigError(key, name, "cannot be imported by name", fix, call)
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__":
        if file is None:
            module, root = _write_module(thing, call, key)
            return f"{module}:{name}", root
        module = main.__spec__.name if main.__spec__ else Path(file).stem
    elif any(
        each.function == "<module>"
        and each.frame.f_globals.get("__name__") == module
        for each in inspect.stack(0)
    ):
        rule = f"is called whenever {file} is imported, and workers import it"
        fix = 'put it below `if __name__ == "__main__":`'
        raise ConfigError(call, MISSING, rule, fix)
    if file is None:
        return f"{module}:{name}", None
    path = Path(os.path.abspath(file))  # noqa: PTH100 (as for a YAML)
    if "site-packages" in path.parts:
        return f"{module}:{name}", None
    depth = module.count(".")
    if path.name == "__init__.py":
        depth += 1
    return f"{module}:{name}", path.parents[depth]


def _write_module(thing: Any, call: str, key: str) -> tuple[str, Path]:
    """Write a notebook's class or function, and all it uses, as a module.

    Imports are copied, functions and classes written as source, and anything
    else as its value. ConfigError names what cannot be written. The module's
    name contains a digest of its content, so a changed class is another task.
    """
    module = _Module()
    try:
        module.add(thing.__name__, thing)
    except _CannotWriteError as error:
        name, rule, fix = error.args
        rule = f"cannot be given to workers: `{name}` {rule}"
        raise ConfigError(key, thing.__name__, rule, fix, call) from None
    text = module.text()
    said = ast.dump(ast.parse(text))
    digest = hashlib.sha256(said.encode()).hexdigest()[:8]
    file = Path.cwd() / _FOLDER / f"{thing.__name__}_{digest}.py"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        # A full disk may cut off what is written.
        whole = file.with_suffix(f".{os.getpid()}.tmp")
        whole.write_text(text)
        whole.replace(file)
        importlib.invalidate_caches()
    return f"{_FOLDER}.{file.stem}", file.parent.parent


class _CannotWriteError(Exception):
    """The name of a value, why no file can contain it, and the fix."""


class _Module:
    """The text of a module with all that a notebook's class or function needs."""

    def __init__(self) -> None:
        self._space = vars(sys.modules["__main__"])
        self._imports = list[str]()
        self._definitions = list[str]()
        self._seen = set[str]()

    def text(self) -> str:
        """Return the module's source, imports first."""
        head = "# Written by Paceline from the cells of a notebook.\nfrom __future__ import annotations"
        imports = "\n".join([head, *sorted(self._imports)])
        return "\n\n\n".join([imports, *self._definitions]) + "\n"

    def add(self, name: str, value: Any) -> None:
        """Add the definition of `name`, and of all that it uses."""
        if name in self._seen or _is_builtin(name, value):
            return
        self._seen.add(name)
        home = getattr(value, "__module__", None)
        own = getattr(value, "__qualname__", None)
        is_code = isinstance(value, type) or inspect.isfunction(value)
        if isinstance(value, ModuleType):
            self._import("import", value.__name__, name)
        elif home == "__main__" and is_code:
            self._define(name, value)
        elif own and getattr(sys.modules.get(str(home)), own, None) is value:
            self._import(f"from {home} import", own, name)
        else:
            self._assign(name, value)

    def _import(self, statement: str, own: str, name: str) -> None:
        renamed = f" as {name}" if name != own else ""
        self._imports.append(f"{statement} {own}{renamed}")

    def _define(self, name: str, value: Any) -> None:
        """Add a class or function of the notebook."""
        own = value.__qualname__
        if own != name and own in self._space:
            self.add(own, value)
            self._definitions.append(f"{name} = {own}")
            return
        source = _source(value)
        if source is None:
            raise _CannotWriteError(
                name, "has no source that can be found", _FIX
            )
        for used in sorted(_globals(symtable.symtable(source, name, "exec"))):
            if used in self._space:
                self.add(used, self._space[used])
        self._definitions.append(source)

    def _assign(self, name: str, value: Any) -> None:
        """Add a variable with its value."""
        if not _is_literal(value):
            rule = f"is a {type(value).__name__} that only this notebook has"
            raise _CannotWriteError(name, rule, _FIX)
        definition = f"{name} = {value!r}"
        if redact(definition) != definition:
            fix = "read it from the environment, in the class"
            raise _CannotWriteError(
                name,
                "holds a secret, which must not be written to a file",
                fix,
            )
        self._definitions.append(definition)


def _source(thing: Any) -> str | None:
    """Return the source that defined a class or function in a notebook's cell."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    members = [thing]
    if isinstance(thing, type):
        members = list(vars(thing).values())
    for member in members:
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if not inspect.isfunction(function):
            continue
        code = function.__code__
        lines = linecache.getlines(code.co_filename)
        for node in ast.parse("".join(lines)).body:
            if not isinstance(node, kinds) or node.name != thing.__name__:
                continue
            end = node.end_lineno or 0
            if code.co_firstlineno <= end:
                first = min(
                    part.lineno for part in (node, *node.decorator_list)
                )
                return "".join(lines[first - 1 : end]).rstrip()
    return None


def _globals(table: symtable.SymbolTable) -> set[str]:
    """Return the global names that the source refers to."""
    found = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced() and symbol.is_global()
    }
    return found.union(*map(_globals, table.get_children()))


def _is_builtin(name: str, value: Any) -> bool:
    """Whether the value is Python's builtin of this name, or the shell's wrapper of it.

    IPython has an `open` that protects its own files.
    """
    if name not in vars(builtins):
        return False
    return inspect.unwrap(value) is vars(builtins)[name]


def _is_literal(value: Any) -> bool:
    """Whether evaluating the value's `repr` gives an equal value."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError):
        return False
