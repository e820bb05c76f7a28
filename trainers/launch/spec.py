"""A run as plain data: read from a file, checked before any worker starts, and executed by each worker.

Environment read: RAY_ADDRESS (the cluster of `launcher: ray`; without it an embedded one on this machine);
RANK, WORLD_SIZE, MASTER_ADDR, which torchrun sets.
"""

from __future__ import annotations

import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.overrides import override
from trainers.config.train import IDENTITY
from trainers.config.yaml import dump_yaml, parse_mapping
from trainers.errors import MISSING, CheckpointError, ConfigError, did_you_mean
from trainers.launch.find_task import add_to_path, load_task, portable, task_path
from trainers.launch.imports import without_collection
from trainers.storage import Storage, storage_uri

logger = logging.getLogger(__name__)
if TYPE_CHECKING:
    from trainers.context import RunContext
    from trainers.measure.result import RunResult
    from trainers.task import Task


class Result(Protocol):
    """What a worker returns."""

    def to_json(self) -> str:
        """Return it as it crosses between processes."""


R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Job(ABC, Generic[R]):
    """All that a worker needs; crosses to other processes as plain data. Its `tree` must not be changed."""

    tree: dict[str, Any]
    """The resolved TrainConfig."""
    path: tuple[str, ...]
    """Directories of the task's module."""
    source: str
    """The file it came from, for error messages."""
    uri: str
    """The run's directory."""

    @functools.cached_property
    def config(self) -> TrainConfig:
        """The configuration, validated at the first access in a process."""
        return build(TrainConfig, self.tree, self.source)

    @functools.cached_property
    def storage(self) -> Storage:
        """The run's directory."""
        return Storage(self.uri)

    def __getstate__(self) -> dict[str, Any]:
        return asdict(self)  # without what is kept of the properties

    def load_task(self) -> Task:
        """Import and construct the task, with its directories on `sys.path`; ConfigError says what is wrong."""
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
        with without_collection():
            import torch._dynamo  # noqa: F401 (every optimizer imports it)

            from trainers.loop.fit import fit
        return fit(self.load_task(), self.config, context)

    def read_result(self, text: bytes) -> RunResult:
        """What `execute` gave, from its JSON."""
        from trainers.measure.result import RunResult

        return RunResult.from_json(text)


def torchrun_world_size() -> int | None:
    """Return the number of workers when torchrun (or what sets its variables) started this process, else None."""
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return int(os.environ["WORLD_SIZE"])
    return None


def read_file(location: str) -> tuple[str, Path | None]:
    """Return the text of a configuration file and its directory (None when it is not on this machine)."""
    if "://" in location:
        file = Storage(location)
        storage, name = file.parent, file.name
        if not storage.exists(name):
            raise ConfigError("the file", location, "is not there", "check the URI")
        return decode(storage.read(name), location), None
    path = Path(location)
    if not path.is_file():
        beside = [file.name for file in path.parent.glob("*.y*ml")]
        fix = did_you_mean(path.name, beside, "check its name", lambda near: str(path.parent / near))
        raise ConfigError("the file", location, "is not there", fix)
    return decode(path.read_bytes(), location), Path(os.path.abspath(path.parent))  # noqa: PTH100 (no symlink is resolved)


def decode(data: bytes, source: str) -> str:
    """Decode a text file; ConfigError when it is none."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError("the file", MISSING, f"is not text ({error.reason})", "save it as UTF-8", source) from error


def read_mapping(storage: Storage, name: str) -> dict[str, Any]:
    """Read a YAML mapping that we wrote to storage; ConfigError names the file when it is damaged."""
    source = storage.locate(name)
    return parse_mapping(decode(storage.read(name), source), source)


def read_spec(location: str, overrides: Mapping[str, Any], world_size: int | None = None) -> RunSpec:
    """Read and check a training file; ConfigError says what is wrong, before torch or Ray is imported.

    `world_size` is given by a launcher that has decided it already (torchrun).
    """
    text, directory = read_file(location)
    tree = override(TrainConfig, parse_mapping(text, location), overrides)
    if world_size is not None:
        tree = override(TrainConfig, tree, {"scaling.num_workers": world_size, "launcher": "spawn"})
    return make_spec(tree, location, directory, own_workers=world_size is None)


def make_spec(tree: dict[str, Any], source: str, directory: Path | None, own_workers: bool = True) -> RunSpec:
    """Check a training mapping that came from `source`, whose relative names mean `directory`.

    `own_workers`: the workers will be started here, and must fit; torchrun's are started already, on any machine.
    """
    config = build(TrainConfig, tree, source)
    try:
        path = task_path(config.task, config.task_dir, directory, source)
        uri = storage_uri(config.storage_path)
        if own_workers and (config.launcher != "ray" or not os.environ.get("RAY_ADDRESS")):
            check_machine(config)
    except ConfigError as error:
        raise error.at(source) from error
    resolved = config.with_global_batch().tree()
    return RunSpec(resolved, tuple(portable(path)), source, Storage(uri).child(config.name).uri)


def check_machine(config: TrainConfig) -> None:
    """Raise ConfigError where the workers of a local launcher do not fit on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers, each = config.scaling.max_workers, config.scaling.cpus_per_worker
    if workers * each > cores:
        cost = f" with {each} cores each" if each > 1 else ""
        rule = f"must fit on this machine{cost}, which has {cores} cores"
        fix = f"set it to at most {max(1, cores // each)}, or use `launcher: ray` on a cluster"
        raise ConfigError("scaling.num_workers", workers, rule, fix)


def check_precision(spec: RunSpec, device_type: str | None = None) -> None:
    """Check precision and device; `device_type` is where workers will train, None: what this machine has."""
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


def delete_own(storage: Storage, mark: str) -> None:
    """Delete a directory that holds the file `mark`, which we wrote; ConfigError when it holds something else."""
    if storage.names() and not storage.exists(mark):
        rule = f"is not ours to delete: it holds files but no {mark}"
        raise ConfigError("--fresh", storage.uri, rule, "give another `--name`")
    storage.delete("")


def _finished(storage: Storage) -> RunResult | None:
    """The result of a run that is done; None when there is none, or none that can be read."""
    from trainers.measure.result import RunResult

    if not storage.exists("result.json"):
        return None
    try:
        result = storage.read_json("result.json", RunResult, finite=False)
    except CheckpointError as error:
        logger.warning("%s; the run goes on from its newest checkpoint", error)
        return None
    return result if result.status == "done" else None


def prepare_storage(spec: RunSpec, fresh: bool) -> RunResult | None:
    """Make the run's directory ready; return the result when the run is complete already.

    Raises ConfigError when another run of this name is there that learned something else.
    """
    storage = spec.storage
    if fresh:
        delete_own(storage, "config.yaml")
    storage.prove_writable()
    if storage.exists("config.yaml"):
        before = read_mapping(storage, "config.yaml")
        for key in IDENTITY:
            if before.get(key) != spec.tree.get(key):
                rule = f"differs from {before.get(key)} in {storage.uri}"
                fix = "train under another `--name`, or start anew with --fresh"
                raise ConfigError(key, spec.tree.get(key), rule, fix, spec.source)
        same_length = all(before.get(key) == spec.tree.get(key) for key in ("epochs", "max_steps"))
        if same_length and (result := _finished(storage)) is not None:
            return result
        storage.delete("result.json")  # of a shorter run: it must not be taken for this one's
    # A command that opens the run later may start in another directory.
    found = {"task_dir": spec.path[0]} if spec.path else {}
    storage.write("config.yaml", dump_yaml({**spec.tree, **found}).encode())
    return None
