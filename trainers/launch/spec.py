"""A run as plain data: read from a file and checked; its directory.

Environment read: RAY_ADDRESS (the cluster of `launcher: ray`; without it an embedded
one on this machine); RANK, WORLD_SIZE, MASTER_ADDR, which torchrun sets.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from trainers.causes import raised_at
from trainers.config.function import FUNCTION_IDENTITY, FunctionConfig, kind_of
from trainers.config.model import Tree, build, override
from trainers.config.sections import ScalingConfig
from trainers.config.train import IDENTITY, TrainConfig
from trainers.config.yaml import LONGEST, decode, dump_yaml, parse_mapping, read_text
from trainers.context import RunContext
from trainers.errors import CheckpointError, ConfigError, StorageError, did_you_mean
from trainers.launch.process import without_collection
from trainers.lease import LEASE, fenced
from trainers.loop.watchdog import watched
from trainers.measure.result import RunResult
from trainers.storage import Storage, inside_ray_job, parse_json, storage_uri

if TYPE_CHECKING:
    from trainers.task import Task

logger = logging.getLogger(__name__)

MARK = "config.yaml"
"""The file that marks a directory as a run's."""


def task_path(
    task: str,
    task_dir: str | None,
    yaml_dir: Path | None,
    source: str,
    key: str = "task",
) -> list[str]:
    """Return the directories that `sys.path` needs for the module that `key` names.

    The module may be beside the YAML file, above it, in the working directory, or
    installed. Looks for files, and imports nothing.

    Raises ConfigError if there is neither such a file nor such an installed module.
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
            if base.with_suffix(".py").is_file() or (base / "__init__.py").is_file():
                return [str(path) for path in dict.fromkeys([root, *own])]
    if _is_installed(module):
        return [str(path) for path in own]
    where = str(Path.cwd())
    beside: list[str] = []
    if yaml_dir is not None:
        where = f"{yaml_dir} or a directory above it, in {where}"
        beside += sorted(path.stem for path in yaml_dir.glob("*.py"))
    otherwise = "check the name, or set `task_dir`"
    if task_dir:
        where = f"{Path.cwd() / task_dir} (`task_dir`), in {where}"
        otherwise = "check the name and `task_dir`"
    leaf = module.rpartition(".")[2]
    fix = did_you_mean(leaf, beside, otherwise, lambda near: f"{near}:{class_name}")
    file = module.replace(".", "/") + ".py"
    rule = f"cannot be found: no {file} in {where}, nor an installed module"
    raise ConfigError(key, task, rule, fix, source)


def _is_installed(module: str) -> bool:
    """Whether the import system finds a module, without importing its parents."""
    top, *below = module.split(".")
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec(top)
        for name in below:
            if spec is None or not spec.submodule_search_locations or not name:
                return False
            places = spec.submodule_search_locations
            spec = PathFinder.find_spec(f"{spec.name}.{name}", places)
        return spec is not None
    return False


def portable(paths: list[str]) -> list[str]:
    """Inside a Ray job, make paths below the working directory relative to it.

    The job's package is in another place in the next job, and maybe on another node.

    Outside of a job, return the paths as they are.
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
    """Put directories first on `sys.path`; relative ones are found via its entries."""
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

    Raises ConfigError, which says what is wrong.

    Random numbers that this draws are the same in every process.
    """
    with without_collection():
        from trainers.devices.device import drawn_alike
        from trainers.task import Task

        with drawn_alike():
            cls = load_class("task", task, Task, source)
    _check_call("task_args", task_args, cls, source, **task_args)
    with drawn_alike():
        made: Task = cls(**task_args)
    return made


def load_class(key: str, named: str, base: type, source: str) -> type:
    """Import the class named `module:Class`, which must derive from `base`."""
    found = load_named(key, named, "class", source)
    if isinstance(found, type) and issubclass(found, base):
        return found
    rule = f"is not a {base.__module__}.{base.__name__}"
    fix = f"derive the class from {base.__name__}"
    raise ConfigError(key, named, rule, fix, source)


def load_function(train_func: str, config: Tree, source: str) -> Callable[[], Any]:
    """Import a training function; bind `config` if it takes a parameter."""
    with without_collection():
        function: Callable[..., Any] = load_named(
            "train_func", train_func, "function", source
        )
    if not callable(function) or isinstance(function, type):
        rule = "is no function"
        raise ConfigError("train_func", train_func, rule, "name one", source)
    if config or inspect.signature(function).parameters:
        _check_call("train_loop_config", config, function, source, config)
        return functools.partial(function, copy.deepcopy(config))
    return function


def load_named(key: str, named: str, kind: str, source: str) -> Any:
    """Import the class or function named `module:name`."""
    module_name, _, name = named.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        words = str(error)
        where = raised_at(error, below=1)
        if isinstance(error, SyntaxError) and error.filename:
            words = error.msg
            where = f"{Path(error.filename).name}:{error.lineno}"
        rule = f"cannot be imported ({type(error).__name__}: {words}, at {where})"
        fix = "fix that line or install what it needs"
        raise ConfigError(key, named, rule, fix, source) from error
    found = getattr(module, name, None)
    if found is None:
        rule = f"names no {kind} of {module.__file__}"
        otherwise = f"name a {kind} that is there"
        beside = dir(module)
        fix = did_you_mean(
            name, beside, otherwise, lambda near: f"{module_name}:{near}"
        )
        raise ConfigError(key, named, rule, fix, source)
    return found


def _is_edited(name: str) -> bool:
    """Whether an imported module's file has changed since this was first asked."""
    module = sys.modules[name]
    file = Path(module.__file__ or "")
    if module.__spec__ is None or not file.is_file():
        return False
    now = file.stat().st_mtime_ns
    # A module that is imported again has another spec.
    before = vars(module.__spec__).setdefault("file_time_ns", now)
    return bool(now != before)


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
        fix = f"its signature is {name}{signature}"
        raise ConfigError(key, value, rule, fix, source) from error


class Result(Protocol):
    """What a worker returns."""

    def to_json(self) -> str:
        """Return it as JSON, to pass it between processes."""


@dataclass(frozen=True)
class Answer:
    """A result that consists of plain data."""

    def to_json(self) -> str:
        """Return it as JSON, to pass it between processes."""
        return json.dumps(asdict(self))


R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Spec:
    """What to run, as plain data that can be passed to other processes.

    Its `tree` must not be changed.
    """

    tree: Tree
    """The resolved configuration."""
    path: tuple[str, ...]
    """Directories of the module that the configuration names."""
    source: str
    """The file it came from, for error messages."""
    uri: str
    """The run's directory."""
    token: str = field(default="", kw_only=True)
    """The token of the directory's lease, without which nothing is written; empty if
    nobody holds a lease.
    """
    quiet: bool = field(default=False, kw_only=True)
    """Whether workers log only warnings."""
    told: Literal["", "line", "json"] = field(default="", kw_only=True)
    """What happens to the run's records while it runs: nothing, a live line, or one
    JSON record each on standard output.
    """

    @functools.cached_property
    def storage(self) -> Storage:
        """The run's directory."""
        return fenced(Storage(self.uri), MARK, self.token)

    def __getstate__(self) -> Tree:
        return asdict(self)  # without what is kept of the properties


class FunctionSpec(Spec):
    """A run of a training function with Ray Train."""

    @functools.cached_property
    def config(self) -> FunctionConfig:
        """The configuration, validated on first access in each process."""
        return build(FunctionConfig, self.tree, self.source)

    def load(self) -> Callable[[], Any]:
        """Return the imported function, ready to be called without arguments.

        Its directories are put on `sys.path`. Raises ConfigError as for a task.
        """
        config = self.config
        add_to_path(list(self.path))
        return load_function(config.train_func, config.train_loop_config, self.source)


class RunSpec(Spec):
    """A run of our own loop."""

    @functools.cached_property
    def config(self) -> TrainConfig:
        """The configuration, validated on first access in each process."""
        return build(TrainConfig, self.tree, self.source)

    def load_task(self, context: RunContext | None = None) -> Task:
        """Import and construct the task; raises ConfigError.

        A watchdog watches this, unless `context` already has one.
        """
        config = self.config
        rank = int(os.environ.get("RANK", "0"))
        driver = RunContext(None, "driver", rank)
        with watched(config.failure, context or driver) as watchdog:
            watchdog.enter("the import of the task")
            add_to_path(list(self.path))
            task = load_task(config.task, config.task_args, self.source)
        module, _, _ = config.task.partition(":")
        if _is_edited(module) and context is not None:
            logger.warning(
                "%s has changed since this process imported it, and is trained as it was: restart the process (in a notebook, the kernel)",
                sys.modules[module].__file__,
            )
        return task


class Job(RunSpec, ABC, Generic[R]):
    """What the workers of a run do: training, or something else with its task."""

    answer: ClassVar[type[Any]]
    """The type of `execute`'s result."""

    @abstractmethod
    def execute(self, context: RunContext) -> R:
        """Do the work of one worker."""

    def read_result(self, text: bytes) -> R:
        """Parse the JSON of what `execute` returned."""
        found: R = parse_json(text, self.answer, finite=False)
        return found


class TrainJob(Job[RunResult]):
    """Trains a run with our loop."""

    answer = RunResult

    def execute(self, context: RunContext) -> RunResult:
        """Train as one worker."""
        with watched(self.config.failure, context):
            with without_collection():
                import torch._dynamo  # noqa: F401 (every optimizer imports it)

                from trainers.loop.fit import fit
            return fit(self.load_task(context), self.config, context)


def torchrun_world_size() -> int | None:
    """Return the number of workers if torchrun started this process, else None."""
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return int(os.environ["WORLD_SIZE"])
    return None


def read_file(location: str) -> tuple[Tree, Path | None]:
    """Return a configuration file's mapping and its directory (None for a URI)."""
    if "://" in location:
        file = Storage(location)
        return parse_mapping(_read(file.parent, file.name, location), location), None
    path = Path(location)
    above = path.parent
    try:
        tree = parse_mapping(read_text(path, location), location)
        return tree, Path(os.path.abspath(above))  # noqa: PTH100 (no symlink is resolved)
    except FileNotFoundError:
        beside = [file.name for file in above.glob("*.y*ml")]
        otherwise = "check its name"
        fix = did_you_mean(path.name, beside, otherwise, lambda near: str(above / near))
        raise ConfigError("the file", location, "is not there", fix) from None


def _read(storage: Storage, name: str, source: str) -> str:
    info = storage.info(name)
    rule = ""
    if info.type.name == "NotFound":
        rule = "is not there"
    elif info.type.name != "File":
        rule = "is no file"
    elif info.size > LONGEST:
        rule = f"is longer than {LONGEST} bytes"
    if rule:
        raise ConfigError("the file", source, rule, "name another")
    return decode(storage.read(name), source)


def read_mapping(storage: Storage, name: str) -> Tree:
    """Read a YAML file of ours from storage; ConfigError if it is damaged."""
    source = storage.locate(name)
    return parse_mapping(_read(storage, name, source), source)


def read_run(
    location: str, overrides: Mapping[str, Any], world_size: int | None = None
) -> RunSpec | FunctionSpec:
    """Read and check a run's file before torch or Ray is imported; ConfigError if bad.

    `world_size` is given if the launcher has already decided it (torchrun).
    """
    tree, directory = read_file(location)
    return run_with(tree, location, directory, overrides, world_size)


def run_with(
    tree: Tree,
    source: str,
    directory: Path | None,
    overrides: Mapping[str, Any],
    world_size: int | None,
) -> RunSpec | FunctionSpec:
    """Set dotted keys in a mapping, and check it by the function for its kind.

    That is `make_function_spec` for a training function, and otherwise `make_spec`.
    """
    kind = kind_of(tree)
    tree = override(kind, tree, overrides)
    if kind is FunctionConfig:
        return make_function_spec(tree, source, directory)
    if world_size is not None:
        torchruns = {"scaling.num_workers": world_size, "launcher": "spawn"}
        tree = override(TrainConfig, tree, torchruns)
    return make_spec(tree, source, directory, own_workers=world_size is None)


def make_function_spec(
    tree: Tree, source: str, directory: Path | None, own_workers: bool = True
) -> FunctionSpec:
    """Check a training function's mapping, as `make_spec` checks a run's."""
    config = build(FunctionConfig, tree, source)
    if own_workers and not os.environ.get("RAY_ADDRESS"):
        check_machine(config.scaling, source)
    path, uri = _places(config, "train_func", source, directory)
    return FunctionSpec(config.tree(), path, source, uri)


def make_spec(
    tree: Tree, source: str, directory: Path | None, own_workers: bool = True
) -> RunSpec:
    """Check a run's mapping from `source`; relative names are relative to `directory`.

    With `own_workers`, the workers will be started on this machine, and must fit;
    torchrun's are already running, on any machine.
    """
    config = build(TrainConfig, tree, source)
    on_cluster = config.launcher == "ray" and os.environ.get("RAY_ADDRESS")
    if own_workers and not on_cluster:
        check_machine(config.scaling, source)
    path, uri = _places(config, "task", source, directory)
    return RunSpec(config.with_global_batch().tree(), path, source, uri)


def _places(
    config: TrainConfig | FunctionConfig,
    key: str,
    source: str,
    directory: Path | None,
) -> tuple[tuple[str, ...], str]:
    """Return the directories of the module that `key` names, and the run's URI."""
    named = getattr(config, key)
    path = task_path(named, config.task_dir, directory, source, key)
    try:
        place = Storage(storage_uri(config.storage_path))
    except ConfigError as error:
        raise error.at(source) from error
    return tuple(portable(path)), place.child(config.name).uri


def check_machine(scaling: ScalingConfig, source: str) -> None:
    """Raise ConfigError if a local launcher's workers do not fit on this machine."""
    cores = len(os.sched_getaffinity(0))
    workers = scaling.max_workers
    each = scaling.cpus_per_worker
    if workers * each > cores:
        cost = f" with {each} cores each" if each > 1 else ""
        rule = f"must fit on this machine{cost}, which has {cores} cores"
        fix = f"set it to at most {max(1, cores // each)}, or use `launcher: ray` on a cluster"
        raise ConfigError("scaling.num_workers", workers, rule, fix, source)


def check_precision(spec: RunSpec, device_type: str | None = None) -> None:
    """Check precision and device for a type of device; None means this machine's."""
    from trainers.devices.device import resolve_device
    from trainers.model.precision import check_device_type, resolve_precision

    config = spec.config
    try:
        if device_type is None:
            device = resolve_device(config.device)
            resolve_precision(config.precision, device)
        else:
            check_device_type(config.precision, device_type)
    except ConfigError as error:
        raise error.at(spec.source) from error


def open_run(location: str) -> tuple[Storage, TrainConfig]:
    """Return a run's directory and its last configuration; ConfigError if none."""
    storage = Storage(storage_uri(location))
    if not storage.exists(MARK):
        above = storage.parent
        runs = [name for name in above.names() if above.exists(f"{name}/{MARK}")]
        otherwise = "give the directory of a run"
        fix = did_you_mean(storage.name, runs, otherwise, above.locate)
        raise ConfigError("RUN", location, f"is no run: there is no {MARK} in it", fix)
    tree = read_mapping(storage, MARK)
    return storage, build(TrainConfig, tree, storage.locate(MARK))


def delete_own(storage: Storage, mark: str) -> None:
    """Delete a directory's content except its lease; ConfigError if it lacks `mark`."""
    names = [name for name in storage.names() if name != LEASE]
    if names and mark not in names:
        rule = f"is not ours to delete: it holds files but no {mark}"
        raise ConfigError("--fresh", storage.uri, rule, "give another `--name`")
    # The mark comes last: cut off, the rest is still ours to delete.
    for name in sorted(names, key=lambda name: name == mark):
        storage.delete(name)


def _finished(storage: Storage) -> RunResult | None:
    """Return the result of a run that is done, else None."""
    if not storage.exists("result.json"):
        return None
    try:
        result = storage.read_json("result.json", RunResult, finite=False)
        if result.status == "done":
            check_kept(storage, result)
            return result
    except (StorageError, CheckpointError) as error:
        logger.warning("%s; the run goes on from its newest checkpoint", error)
    return None


def check_kept(storage: Storage, result: RunResult) -> None:
    """Raise an error if the checkpoint that a run ended with does not exist.

    StorageError if it was deleted, CheckpointError if the result is damaged.
    """
    from trainers.checkpoint.manifest import Manifest

    if result.checkpoint is None:
        return
    name = Storage(result.checkpoint).name  # its run may have been moved since
    if not re.fullmatch("step-[0-9]{12}", name):
        where = storage.locate("result.json")
        raise CheckpointError(f"{where} is damaged: it names no checkpoint")
    kept = storage.child("checkpoints", name)
    files = ["manifest.json"]
    if kept.exists("manifest.json"):
        files += Manifest.from_json(kept.read("manifest.json")).files
    for file in files:
        if not kept.exists(file):
            raise StorageError(
                f"the run ended as `{result.status}`, but {kept.locate(file)} was deleted since"
            )


def prepare_storage(spec: RunSpec, fresh: bool) -> RunResult | None:
    """Prepare the run's directory; return the result if the run is already complete.

    This process must hold the lease of the directory.

    Raises ConfigError if it contains a run of this name that trained something else.
    """
    if fresh:
        delete_own(spec.storage, MARK)
    result = find_result(spec)
    if result is None:
        # Of a shorter run: it must not be taken for this one's.
        spec.storage.delete("result.json")
        keep(spec)
    return result


def find_result(spec: RunSpec) -> RunResult | None:
    """Return the result of the run if it is complete, and change nothing.

    Raises ConfigError as `prepare_storage`.
    """
    if not spec.storage.exists(MARK):
        return None
    before = check_same(spec, IDENTITY)
    lengths = ("epochs", "max_steps", "early_stopping")
    if any(before.get(key) != spec.tree.get(key) for key in lengths):
        return None
    return _finished(spec.storage)


def prepare_function(spec: FunctionSpec, fresh: bool) -> None:
    """Prepare the directory of a function's run; ConfigError as in prepare_storage."""
    if fresh:
        delete_own(spec.storage, MARK)
    if spec.storage.exists(MARK):
        check_same(spec, FUNCTION_IDENTITY)
    keep(spec)


def check_same(spec: Spec, keys: Sequence[str]) -> Tree:
    """Return the run's earlier configuration; ConfigError if one of `keys` differs."""
    before = read_mapping(spec.storage, MARK)
    for key in keys:
        was = before.get(key)
        now = spec.tree.get(key)
        if was != now:
            rule = f"differs from {was} in {spec.storage.uri}"
            fix = "train under another `--name`, or start anew with --fresh"
            raise ConfigError(key, now, rule, fix, spec.source)
    return before


def keep(spec: Spec) -> None:
    """Write the configuration into the run's directory."""
    # A command that opens the run later may start in another directory.
    found = {"task_dir": spec.path[0]} if spec.path else {}
    spec.storage.write(MARK, dump_yaml({**spec.tree, **found}).encode())
