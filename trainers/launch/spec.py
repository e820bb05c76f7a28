"""A run as plain data: read from a file, checked, and executed by each worker.

Environment read: RAY_ADDRESS (the cluster of `launcher: ray`; without it an embedded
one on this machine); RANK, WORLD_SIZE, MASTER_ADDR, which torchrun sets.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from trainers.config import TrainConfig
from trainers.config.function import FunctionConfig, kind_of
from trainers.config.model import build
from trainers.config.overrides import override
from trainers.config.yaml import LONGEST, decode, parse_mapping, read_text
from trainers.context import RunContext
from trainers.errors import ConfigError, did_you_mean
from trainers.launch.find_task import (
    add_to_path,
    load_function,
    load_task,
    portable,
    task_path,
)
from trainers.launch.imports import without_collection
from trainers.lease import fenced
from trainers.loop.watchdog import enter, watched
from trainers.storage import Storage, storage_uri

if TYPE_CHECKING:
    from trainers.measure.result import RunResult
    from trainers.task import Task


MARK = "config.yaml"
"""The file that makes a directory a run's."""


class Result(Protocol):
    """What a worker returns."""

    def to_json(self) -> str:
        """Return it as it crosses between processes."""


R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Spec:
    """What is to be run; crosses to other processes as plain data.

    Its `tree` must not be changed.
    """

    tree: dict[str, Any]
    """The resolved configuration."""
    path: tuple[str, ...]
    """Directories of the module that the configuration names."""
    source: str
    """The file it came from, for error messages."""
    uri: str
    """The run's directory."""
    token: str = field(default="", kw_only=True)
    """Of the directory's lease, without which nothing is written; empty where nobody
    holds one.
    """
    quiet: bool = field(default=False, kw_only=True)
    """Whether workers log nothing but warnings."""
    told: Literal["", "line", "json"] = field(default="", kw_only=True)
    """What becomes of the run's records while it runs: nothing, a live line, or a
    record each on standard output.
    """

    @functools.cached_property
    def storage(self) -> Storage:
        """The run's directory."""
        return fenced(Storage(self.uri), MARK, self.token)

    def __getstate__(self) -> dict[str, Any]:
        return asdict(self)  # without what is kept of the properties


class FunctionSpec(Spec):
    """A run of a training function for Ray Train."""

    @functools.cached_property
    def config(self) -> FunctionConfig:
        """The configuration, validated at the first access in a process."""
        return build(FunctionConfig, self.tree, self.source)

    def load(self) -> Callable[[], Any]:
        """Import the function, with its directories on `sys.path`; ready to be called.

        ConfigError as for a task.
        """
        add_to_path(list(self.path))
        return load_function(
            self.config.train_func, self.config.train_loop_config, self.source
        )


class Job(Spec, ABC, Generic[R]):
    """All that a worker of our own loop needs."""

    @functools.cached_property
    def config(self) -> TrainConfig:
        """The configuration, validated at the first access in a process."""
        return build(TrainConfig, self.tree, self.source)

    def load_task(self) -> Task:
        """Import and construct the task; raises ConfigError."""
        rank = int(os.environ.get("RANK", "0"))
        with watched(
            self.config.failure, RunContext(None, "driver", rank)
        ):  # where no worker is watched
            enter("the import of the task")
            add_to_path(list(self.path))
            return load_task(self.config.task, self.config.task_args, self.source)

    @abstractmethod
    def execute(self, context: RunContext) -> R:
        """Do the work of one worker."""

    @abstractmethod
    def read_result(self, text: bytes) -> R:
        """Parse what `execute` returned, from its JSON."""


class RunSpec(Job["RunResult"]):
    """A training run."""

    def execute(self, context: RunContext) -> RunResult:
        """Train as one worker."""
        with watched(self.config.failure, context):
            with without_collection():
                import torch._dynamo  # noqa: F401 (every optimizer imports it)

                from trainers.loop.fit import fit
            return fit(self.load_task(), self.config, context)

    def read_result(self, text: bytes) -> RunResult:
        """What `execute` gave, from its JSON."""
        from trainers.measure.result import RunResult

        return RunResult.from_json(text)


def torchrun_world_size() -> int | None:
    """Return the number of workers if torchrun started this process, else None."""
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return int(os.environ["WORLD_SIZE"])
    return None


def read_file(location: str) -> tuple[dict[str, Any], Path | None]:
    """Return the mapping of a configuration file and its directory (None: elsewhere)."""
    if "://" in location:
        file = Storage(location)
        return parse_mapping(_read(file.parent, file.name, location), location), None
    path = Path(location)
    try:
        tree = parse_mapping(read_text(path, location), location)
        return tree, Path(os.path.abspath(path.parent))  # noqa: PTH100 (no symlink is resolved)
    except FileNotFoundError:
        beside = [file.name for file in path.parent.glob("*.y*ml")]
        fix = did_you_mean(
            path.name, beside, "check its name", lambda near: str(path.parent / near)
        )
        raise ConfigError("the file", location, "is not there", fix) from None


def _read(storage: Storage, name: str, source: str) -> str:
    info = storage.info(name)
    if info.type.name != "File":
        rule = "is not there" if info.type.name == "NotFound" else "is no file"
        raise ConfigError("the file", source, rule, "check its name")
    if info.size > LONGEST:
        raise ConfigError(
            "the file", source, f"is longer than {LONGEST} bytes", "write less in it"
        )
    return decode(storage.read(name), source)


def read_mapping(storage: Storage, name: str) -> dict[str, Any]:
    """Read a YAML mapping of ours from storage; ConfigError names a damaged file."""
    source = storage.locate(name)
    return parse_mapping(_read(storage, name, source), source)


def read_run(
    location: str, overrides: Mapping[str, Any], world_size: int | None = None
) -> RunSpec | FunctionSpec:
    """Read and check a run's file, before torch or Ray is imported; raises ConfigError.

    `world_size` is given by a launcher that has decided it already (torchrun).
    """
    tree, directory = read_file(location)
    return run_with(tree, location, directory, overrides, world_size)


def run_with(
    tree: dict[str, Any],
    source: str,
    directory: Path | None,
    overrides: Mapping[str, Any],
    world_size: int | None,
) -> RunSpec | FunctionSpec:
    """`make_spec` or `make_function_spec` of a mapping with dotted keys set."""
    if kind_of(tree) is FunctionConfig:
        return make_function_spec(
            override(FunctionConfig, tree, overrides), source, directory
        )
    tree = override(TrainConfig, tree, overrides)
    if world_size is not None:
        tree = override(
            TrainConfig, tree, {"scaling.num_workers": world_size, "launcher": "spawn"}
        )
    return make_spec(tree, source, directory, own_workers=world_size is None)


def make_function_spec(
    tree: dict[str, Any], source: str, directory: Path | None, own_workers: bool = True
) -> FunctionSpec:
    """Check the mapping of a training function, as `make_spec`."""
    config = build(FunctionConfig, tree, source)
    named = config.train_func
    key = "train_func"
    path, uri = _places(
        config,
        named,
        key,
        source,
        directory,
        own_workers and not os.environ.get("RAY_ADDRESS"),
    )
    return FunctionSpec(config.tree(), path, source, uri)


def make_spec(
    tree: dict[str, Any], source: str, directory: Path | None, own_workers: bool = True
) -> RunSpec:
    """Check a training mapping from `source`, whose relative names mean `directory`.

    `own_workers`: the workers will be started here, and must fit; torchrun's are
    started already, on any machine.
    """
    if kind_of(tree) is FunctionConfig:
        rule = "is no `task`, which this command needs"
        fix = "name a run of a task"
        raise ConfigError("train_func", tree["train_func"], rule, fix, source)
    config = build(TrainConfig, tree, source)
    own_workers = own_workers and (
        config.launcher != "ray" or not os.environ.get("RAY_ADDRESS")
    )
    path, uri = _places(config, config.task, "task", source, directory, own_workers)
    return RunSpec(config.with_global_batch().tree(), path, source, uri)


def _places(
    config: TrainConfig | FunctionConfig,
    named: str,
    key: str,
    source: str,
    directory: Path | None,
    own_workers: bool,
) -> tuple[tuple[str, ...], str]:
    """Return the directories of the module that `key` names, and the run's own."""
    try:
        path = task_path(named, config.task_dir, directory, source, key)
        uri = storage_uri(config.storage_path)
        if own_workers:
            check_machine(config)
    except ConfigError as error:
        raise error.at(source) from error
    return tuple(portable(path)), Storage(uri).child(config.name).uri


def check_machine(config: TrainConfig | FunctionConfig) -> None:
    """Raise ConfigError where a local launcher's workers do not fit on this machine."""
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    workers = config.scaling.max_workers
    each = config.scaling.cpus_per_worker
    if workers * each > cores:
        cost = f" with {each} cores each" if each > 1 else ""
        rule = f"must fit on this machine{cost}, which has {cores} cores"
        fix = f"set it to at most {max(1, cores // each)}, or use `launcher: ray` on a cluster"
        raise ConfigError("scaling.num_workers", workers, rule, fix)


def check_precision(spec: RunSpec, device_type: str | None = None) -> None:
    """Check precision and device; `device_type` is the workers', None: this machine's."""
    from trainers.devices.device import resolve_device
    from trainers.model.precision import check_device_type, resolve_precision

    config = spec.config
    try:
        if device_type is None:
            resolve_precision(config.precision, resolve_device(config.device))
        else:
            check_device_type(config.precision, device_type)
    except ConfigError as error:
        raise error.at(spec.source) from error
