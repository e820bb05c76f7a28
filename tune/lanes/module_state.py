"""What modules keep in their globals and classes, as it was when their import ended.

A trial that is over must not speak to the next one through a package that both import: a registry, a counter, a shared
state such as accelerate's, a function that was exchanged. Namespaces (of modules, of their classes, of objects that
they keep) and containers are copied shallowly as the outermost import ends, and compared in C: nearly all are as they
were. What an import changes in other packages (it registers itself there) belongs to the import, and stays.
"""

import collections
import contextlib
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Protocol

import torch

from tune.lanes.snapshots import CONTAINERS, Snapshots

_INSTALLED = tuple(
    f"{directory}/"
    for directory in dict.fromkeys(
        [
            *(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")),
            *site.getsitepackages(),
            site.getusersitepackages(),
        ]
    )
)
_OWN_PACKAGES = ("trainers", "cluster", "tune")
_LEFT_ALONE = frozenset(
    [
        # Watched by name in process_state.py, and what torch itself computes with: it keeps caches there.
        *("torch", "numpy", "functorch", "torchgen", "triton", "sympy", "mpmath", "networkx"),
        # Ray's workers and our own loop use them all the time, from threads of their own.
        *("ray", "google", "grpc", "opencensus", "opentelemetry", "prometheus_client", "psutil", "setproctitle"),
        *("aiohttp", "aiosignal", "frozenlist", "multidict", "yarl", "propcache", "cloudpickle", "pickle5", "msgpack"),
        *("colorful", "pydantic", "pydantic_core", "pyarrow", "pynvml", "cuda", "yaml", "jsonschema", "referencing"),
        # Part of their state lies in native code: half of it put back would be worse than none.
        *("jax", "jaxlib", "tensorflow", "cupy", "numba", "llvmlite"),
        # They see to it that modules can be imported, traced or tested at all.
        *("_distutils_hack", "pkg_resources", "setuptools", "wrapt", "pytest", "_pytest", "coverage"),
    ]
)
"""Packages whose globals are not put back."""
_CODE = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(type, property, staticmethod, classmethod, types.MethodType),
)
_DEPTH = 3
"""How deep containers are followed into containers."""
_LARGE = 256
"""Containers of more items are tables: what these hold is not followed."""
_SLOTS_OF_PYTHON = frozenset(
    ["__slotnames__", "__abstractmethods__", "__annotations__", "__doc__", "__warningregistry__"]
)
"""Names that Python itself writes to (copyreg, abc, warnings)."""
_MISSING = object()
_TORCH = f"{Path(torch.__file__).parent}/"


def is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to a package that was installed: nobody edits it between two trials."""
    return file.startswith(_INSTALLED)


def is_of_users(module: Any, path: Sequence[str] | None) -> bool:
    """Whether a module lies in `path` (directories that end with a separator; None: anywhere) and is not installed."""
    name = getattr(module, "__name__", "")
    if name.partition(".")[0] in _OWN_PACKAGES or name in ("__main__", "__mp_main__"):
        return False
    file = getattr(module, "__file__", None)
    if file is None:  # a directory without __init__.py keeps its modules as attributes
        with contextlib.suppress(Exception):
            file = f"{next(iter(module.__path__))}/__init__.py"
    # A module in C may refuse to be imported twice; a virtual environment may lie beside the task.
    if not isinstance(file, str) or not file.endswith(".py") or is_installed(file):
        return False
    return path is None or file.startswith(tuple(path))


def is_code(value: Any) -> bool:
    """Whether a value is a function, a method or a class."""
    return issubclass(type(value), _CODE)


class Recorded(Protocol):
    """State that tells what an import has changed in it from what the trial has."""

    def read(self) -> Any:
        """What it is now."""

    def absorb(self, before: Any) -> None:
        """What has changed since `before` (as `read` gave it) belongs to an import: as if it had been so at first."""


class ModuleState:
    """The globals of installed packages, recorded by the imports from now on (and at once, for those imported)."""

    def __init__(self) -> None:
        self.others: list[Recorded] = []  # what else takes up what an import changes
        self._snapshots = Snapshots()
        self._owners: list[Any] = []  # None: a container
        self._labels: list[str] = []
        self._known: set[int] = set()  # all are kept alive by the lists above
        self._of_others: set[int] = (
            set()
        )  # containers that a package has only imported: sys.modules, torch's registries
        self._looked_at: set[str] = set()
        self._importing = threading.local()
        self.executed: set[str] = set()  # modules that were since the last `restore`
        self._lock = threading.RLock()  # comparing may import
        self._watch_modules(list(sys.modules))
        self.finder = _Finder(self)
        sys.meta_path.insert(0, self.finder)

    def close(self) -> None:
        """Record no more imports."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self.finder)

    def restore(self) -> list[str]:
        """Put back what has changed since it was recorded; returns what cannot be, in words."""
        with self._lock:
            self.executed.clear()
            left = []
            for index in self._snapshots.differing():
                owner, now, kept = self._owners[index], self._snapshots.now[index], self._snapshots.kept[index]
                try:
                    if owner is None:
                        _refill(now, kept)
                    else:
                        _put_back(owner, now, kept)
                except Exception as error:
                    left.append(f"{self._labels[index]} has changed and cannot be put back: {error!s:.80}")
            return left

    @contextlib.contextmanager
    def importing(self, module: types.ModuleType) -> Iterator[None]:
        """While a module is executed; the outermost records all that have been by its end."""
        self.executed.add(module.__name__)
        if (names := getattr(self._importing, "names", None)) is not None:
            names.append(module.__name__)
            yield
            return
        self._importing.names = names = [module.__name__]
        with self._lock:
            before = self._snapshots.changes()
            others = [(other, other.read()) for other in self.others]
        try:
            yield
        finally:
            self._importing.names = None
            with self._lock:
                for other, state in others:
                    other.absorb(state)
                self._absorb(before)
                self._watch_modules(names)

    def _absorb(self, before: dict[int, Any]) -> None:
        for index in self._snapshots.absorb(before):
            now, label = self._snapshots.now[index], self._labels[index]
            for value in list(now.values() if hasattr(now, "values") else now):
                self._watch_value(label, value, label.partition(".")[0], 1)

    def _watch_modules(self, names: list[str]) -> None:
        for name in [name for name in sys.modules if name not in self._looked_at]:
            self._looked_at.add(name)
            namespace = getattr(sys.modules[name], "__dict__", {})
            self._of_others.add(id(namespace))
            if not _is_watched(name, sys.modules[name]):
                self._of_others.update(id(value) for value in list(namespace.values()) if type(value) in CONTAINERS)
        for name in names:
            if (module := sys.modules.get(name)) is not None and _is_watched(name, module):
                self._watch_module(name, module)

    def _watch_module(self, name: str, module: Any) -> None:
        if id(module) in self._known:
            return
        package = name.partition(".")[0]
        self._watch(name, module, vars(module))
        for key, value in list(vars(module).items()):
            label = f"{name}.{key}"
            if issubclass(type(value), type):
                if value.__module__ == name and id(value) not in self._known:
                    self._watch(label, value, vars(value))
                    for attribute, kept in list(vars(value).items()):
                        self._watch_value(f"{label}.{attribute}", kept, package, 1)
            else:
                self._watch_value(label, value, package, 0)

    def _watch_value(self, label: str, value: Any, package: str, depth: int) -> None:
        """A container, or an object of the package's own that keeps something."""
        if id(value) in self._known or id(value) in self._of_others or depth > _DEPTH:
            return
        if type(value) in CONTAINERS:
            if label.endswith("__"):
                return
            self._watch(label, None, value)
            if len(value) > _LARGE:
                return
            inner = value.values() if isinstance(value, dict) else value
            kinds = set(map(type, inner))
            if not kinds.isdisjoint(CONTAINERS):
                for one in list(inner):
                    if type(one) in CONTAINERS:
                        self._watch_value(label, one, package, depth + 1)
        elif depth <= 1 and _keeps_state(value, package):
            self._watch(label, value, vars(value))
            for key, one in list(vars(value).items()):
                if type(one) in CONTAINERS:
                    self._watch_value(f"{label}.{key}", one, package, depth + 1)

    def _watch(self, label: str, owner: Any, now: Any) -> None:
        self._known.add(id(now if owner is None else owner))
        self._snapshots.add(now)
        self._owners.append(owner)
        self._labels.append(label)


class _Finder:
    """Finds nothing itself: has the loaders that others find tell when they execute a module."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if spec.origin is not None and spec.loader is not None and is_installed(spec.origin):
                    self._tell(spec.loader)
                return spec
        return None

    def _tell(self, loader: Any) -> None:
        execute: Callable[[types.ModuleType], None] | None = getattr(loader, "exec_module", None)
        if execute is None or not hasattr(loader, "__dict__") or issubclass(type(loader), type):
            return

        def exec_module(module: types.ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)  # whoever looks at the loader later finds it as it came
            with self._state.importing(module):
                execute(module)

        loader.exec_module = exec_module


def _is_watched(name: str, module: Any) -> bool:
    package = name.partition(".")[0]
    if package in _LEFT_ALONE or package in _OWN_PACKAGES or package in sys.stdlib_module_names:
        return False
    file = getattr(module, "__file__", None)
    return isinstance(module, types.ModuleType) and isinstance(file, str) and is_installed(file)


def _keeps_state(value: Any, package: str) -> bool:
    """Whether a value is an object of a class of this package, with attributes in Python."""
    kind = type(value)
    if kind.__module__.partition(".")[0] != package or issubclass(kind, (types.ModuleType, threading.Thread, type)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _refill(container: Any, kept: Any) -> None:
    if isinstance(container, dict):  # one by one: other threads may be reading it
        for key in [key for key in container if key not in kept]:
            del container[key]
        for key, value in kept.items():
            if container.get(key, _MISSING) is not value:
                container[key] = value
        if list(container) == list(kept):
            return
    container.clear()
    (container.extend if isinstance(container, (list, collections.deque)) else container.update)(kept)


def _put_back(owner: Any, now: Any, kept: dict[str, Any]) -> None:
    """Put back the attributes of a module, a class or an object; what is only there since it was asked for stays."""
    is_module = issubclass(type(owner), types.ModuleType)
    for name in [name for name, value in kept.items() if now.get(name, _MISSING) is not value]:
        value = now.get(name)
        # A lane that lost its reference would start such a thread again and again.
        if name in _SLOTS_OF_PYTHON or isinstance(value, threading.Thread) or by_torch(name, value):
            kept[name] = value
        else:
            _set(owner, now, name, kept[name])
    for name in [name for name in now if name not in kept]:
        value = now[name]
        is_submodule = isinstance(value, types.ModuleType)
        lazy = is_module and (is_submodule or (is_code(value) and not is_of_strangers(value)))
        if lazy or name in _SLOTS_OF_PYTHON or isinstance(value, threading.Thread):
            kept[name] = value
        else:
            _delete(owner, now, name)


def is_of_strangers(value: Any) -> bool:
    """Whether a function or class was made by a module that is not installed, or is no longer there."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None:
        return getattr(value, "__module__", None) is not None
    return module.__name__ == "__main__" or is_of_users(module, None)


def by_torch(name: str, value: Any) -> bool:
    """Whether torch itself has wrapped a function of this name, as it does with an optimizer's `step`."""
    code = getattr(value, "__code__", None)
    return code is not None and value.__name__ == name and code.co_filename.startswith(_TORCH)


def _set(owner: Any, now: Any, name: str, value: Any) -> None:
    if issubclass(type(owner), type):
        type.__setattr__(owner, name, value)  # whatever its metaclass does
    else:
        now[name] = value


def _delete(owner: Any, now: Any, name: str) -> None:
    if issubclass(type(owner), type):
        type.__delattr__(owner, name)
    else:
        del now[name]
