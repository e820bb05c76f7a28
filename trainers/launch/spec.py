"""A run as plain data: read from a file and checked.

Environment read: RANK, WORLD_SIZE and what else torchrun sets.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    TypeVar,
)

from trainers.config.function import FunctionConfig, build_run, kind_of
from trainers.config.model import Tree, build, override
from trainers.config.sections import ScalingConfig
from trainers.config.train import TrainConfig
from trainers.config.yaml import parse_mapping, read_text
from trainers.context import RunContext
from trainers.errors import MISSING, ConfigError, counted, did_you_mean
from trainers.launch.process import embedded
from trainers.launch.user_code import (
    add_to_path,
    load_function,
    load_task,
    portable,
    task_path,
)
from trainers.lease import fenced
from trainers.loop.watchdog import watched
from trainers.measure.result import Answer
from trainers.output import TORCHRUN
from trainers.storage import Storage, parse_json, storage_uri

if TYPE_CHECKING:
    from trainers.task import Task

MARK = "config.yaml"
"""The file that marks a directory as a run's."""


R = TypeVar("R", bound=Answer)


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
    """The file that the configuration came from, for error messages."""
    uri: str
    """The run's directory."""
    token: str = field(default="", kw_only=True)
    """The token of the directory's lease: workers write only while this token
    holds the lease. Empty if there is no lease to check.
    """
    quiet: bool = field(default=False, kw_only=True)
    """Whether workers log only warnings."""
    told: Literal["", "line", "json"] = field(default="", kw_only=True)
    """How the run's records are shown while it runs: not at all, as a live
    line, or each as JSON on standard output.
    """

    @functools.cached_property
    def storage(self) -> Storage:
        """The run's directory."""
        return fenced(Storage(self.uri), MARK, self.token)

    def __getstate__(self) -> Tree:
        return asdict(self)  # without cached properties


class FunctionSpec(Spec):
    """A run of a training function with Ray Train."""

    @functools.cached_property
    def config(self) -> FunctionConfig:
        """The configuration, validated on first access in each process."""
        return build(FunctionConfig, self.tree, self.source)

    def load(self) -> Callable[[], Any]:
        """Return the imported function, ready to be called without arguments.

        Puts the directories of the function's module on `sys.path`. Raises
        ConfigError if the function cannot be imported.
        """
        config = self.config
        add_to_path(list(self.path))
        return load_function(
            config.train_func, config.train_loop_config, self.source
        )


class RunSpec(Spec):
    """A run of our own loop."""

    @functools.cached_property
    def config(self) -> TrainConfig:
        """The configuration, validated on first access in each process."""
        return build(TrainConfig, self.tree, self.source)

    def load_task(self, context: RunContext | None = None) -> Task:
        """Import and construct the task; raises ConfigError.

        A new watchdog watches the import, unless `context` already has one.
        """
        config = self.config
        rank = int(os.environ.get("RANK", "0"))
        driver = RunContext(None, "driver", rank)
        with watched(config.failure, context or driver) as watchdog:
            watchdog.enter("the import of the task")
            add_to_path(list(self.path))
            return load_task(config.task, config.task_args, self.source)


class Job(RunSpec, ABC, Generic[R]):
    """What the workers of a run do: training, or something else with its task."""

    answer: ClassVar[type[Any]]
    """The type of `execute`'s result."""

    @abstractmethod
    def execute(self, context: RunContext) -> R:
        """Do the work of one worker."""

    def read_result(self, text: bytes) -> R:
        """Parse the JSON of the result of `execute`."""
        found: R = parse_json(text, self.answer)
        return found


def torchrun_world_size() -> int | None:
    """Return the number of workers if torchrun started this process, else None.

    Raises ConfigError if another launcher set only some of what torchrun sets.
    """
    missing = sorted(TORCHRUN - os.environ.keys())
    if not missing:
        return int(os.environ["WORLD_SIZE"])
    if os.environ.keys() >= {"RANK", "MASTER_ADDR"}:
        rule = "is not set, unlike RANK and MASTER_ADDR"
        fix = "start the workers with torchrun, which sets all, or unset RANK"
        raise ConfigError(missing[0], MISSING, rule, fix)
    return None


def read_file(location: str) -> tuple[Tree, Path | None]:
    """Return a configuration file's mapping and its directory (None for a URI)."""
    if "://" in location:
        file = Storage(location)
        return parse_mapping(
            _read(file.parent, file.name, location), location
        ), None
    path = Path(location)
    tree = parse_mapping(read_text(path, location), location)
    return tree, Path(os.path.abspath(path.parent))  # noqa: PTH100 (no symlink is resolved)


def _read(storage: Storage, name: str, source: str) -> str:
    fix = "name another file, or restore this one"
    if storage.info(name).type.name != "File":
        raise ConfigError("the file", source, "is not a file", fix)
    try:
        return storage.read(name).decode()
    except UnicodeDecodeError as error:
        rule = f"is not text ({error.reason})"
        raise ConfigError("the file", source, rule, fix) from error


def read_mapping(storage: Storage, name: str) -> Tree:
    """Read a YAML file of ours from storage; ConfigError if it is damaged."""
    source = storage.locate(name)
    return parse_mapping(_read(storage, name, source), source)


def read_run(
    location: str, overrides: Mapping[str, Any], world_size: int | None = None
) -> RunSpec | FunctionSpec:
    """Read and check a run's file without importing torch or Ray; raises ConfigError.

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
    """Set dotted keys in a run's mapping, and check the result; see `make_spec`."""
    kind = kind_of(tree)
    tree = override(kind, tree, overrides)
    is_torchruns = world_size is not None and kind is TrainConfig
    if is_torchruns:
        torchruns = {"scaling.num_workers": world_size, "launcher": "spawn"}
        tree = override(TrainConfig, tree, torchruns)
    return make_spec(tree, source, directory, own_workers=not is_torchruns)


def make_spec(
    tree: Tree, source: str, directory: Path | None, own_workers: bool = True
) -> RunSpec | FunctionSpec:
    """Check a run's mapping, which came from `source`, and return the run's spec.

    Relative names are relative to `directory`. With `own_workers`, the workers
    must fit on this machine unless they will run on a cluster; torchrun's
    workers are already running.
    """
    config = build_run(tree, source)
    key = "train_func"
    on_ray = True
    if isinstance(config, TrainConfig):
        key = "task"
        on_ray = config.launcher == "ray"
        config = config.with_global_batch()
    if own_workers and (embedded() or not on_ray):
        check_machine(config.scaling, source)
    path = task_path(
        getattr(config, key), config.task_dir, directory, source, key
    )
    try:
        place = Storage(storage_uri(config.storage_path))
    except ConfigError as error:
        raise error.at(source) from error
    kind = RunSpec if isinstance(config, TrainConfig) else FunctionSpec
    uri = place.child(config.name).uri
    return kind(config.tree(), tuple(portable(path)), source, uri)


def check_machine(scaling: ScalingConfig, source: str) -> None:
    """Raise ConfigError if a local launcher's workers do not fit on this machine."""
    cores = len(os.sched_getaffinity(0))
    workers = scaling.max_workers
    each = scaling.cpus_per_worker
    if workers * each > cores:
        cost = f" (each worker takes {each})" if each > 1 else ""
        rule = f"must fit on this machine, which has {counted(cores, 'core')}{cost}"
        fix = f"set it to at most {max(1, cores // each)}, or use `launcher: ray` on a cluster"
        raise ConfigError("scaling.num_workers", workers, rule, fix, source)


def check_precision(spec: RunSpec, device_type: str | None = None) -> None:
    """Raise ConfigError if the precision does not suit a type of device.

    None means the device that the run would use on this machine.
    """
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
    """Return a run's directory and last configuration; ConfigError if there is no run."""
    storage = Storage(storage_uri(location))
    if not storage.exists(MARK):
        above = storage.parent
        runs = [
            name for name in above.names() if above.exists(f"{name}/{MARK}")
        ]
        otherwise = "give the directory of a run"
        fix = did_you_mean(storage.name, runs, otherwise, above.locate)
        raise ConfigError(
            "RUN", location, f"is not a run: it holds no {MARK}", fix
        )
    tree = read_mapping(storage, MARK)
    return storage, build(TrainConfig, tree, storage.locate(MARK))
