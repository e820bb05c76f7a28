"""A run as plain data: read from a file, checked before any worker starts, and executed by each worker.

Environment read: RAY_ADDRESS (the cluster of `launcher: ray`; without it an embedded one on this machine);
RANK, WORLD_SIZE, MASTER_ADDR, which torchrun sets.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.config import TrainConfig
from trainers.errors import ConfigError
from trainers.locate import add_to_path, load_task, portable, task_path
from trainers.settings import build, dump_yaml, override, parse_mapping, parse_yaml
from trainers.storage import Storage, storage_uri

if TYPE_CHECKING:
    from trainers.context import RunContext
    from trainers.metrics import RunResult

# Keys that decide what is learned. A run that goes on must not have changed them.
IDENTITY = (
    "task",
    "task_args",
    "seed",
    "global_batch_size",
    "drop_last",
    "precision",
    "optimizer",
    "lr_schedule",
    "lr_scaling",
    "clip_grad_norm",
)


@dataclass(frozen=True)
class RunSpec:
    """Everything that a worker needs; crosses to other processes as plain data."""

    tree: dict[str, Any]
    """The resolved TrainConfig."""
    path: tuple[str, ...]
    """Directories of the task's module."""
    source: str
    """The file it came from, for error messages."""
    uri: str
    """The run's directory."""

    @property
    def config(self) -> TrainConfig:
        """The configuration."""
        return build(TrainConfig, self.tree, self.source)

    @property
    def storage(self) -> Storage:
        """The run's directory."""
        return Storage(self.uri)

    def execute(self, context: RunContext) -> RunResult:
        """Run the loop as one worker."""
        from trainers.loop import fit

        add_to_path(list(self.path))
        config = self.config
        return fit(load_task(config.task, config.task_args, self.source), config, context)


def torchrun_world_size() -> int | None:
    """The number of workers when torchrun (or what sets its variables) started this process."""
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return int(os.environ["WORLD_SIZE"])
    return None


def read_file(location: str) -> tuple[str, Path | None]:
    """The text of a configuration file and its directory (None when it is not on this machine)."""
    if "://" in location:
        parent, _, name = location.rpartition("/")
        storage = Storage(parent)
        if not storage.exists(name):
            raise ConfigError("the file", location, "is not there", "check the URI")
        return storage.read(name).decode(), None
    path = Path(location)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        raise ConfigError(
            "the file",
            location,
            "is not there",
            f"did you mean `{path.parent / near[0]}`?" if near else "check its name",
        )
    return path.read_text(), Path(os.path.abspath(path.parent))  # noqa: PTH100 (no symlink is resolved)


def read_spec(location: str, overrides: Mapping[str, Any], world_size: int | None = None) -> RunSpec:
    """Read and check a training file; ConfigError says what is wrong, before torch or Ray is imported.

    `world_size` is given by a launcher that has decided it already (torchrun).
    """
    text, directory = read_file(location)
    tree = override(TrainConfig, parse_mapping(text, location), overrides)
    if world_size is not None:
        tree = override(TrainConfig, tree, {"scaling.num_workers": world_size, "launcher": "spawn"})
    return make_spec(tree, location, directory)


def make_spec(tree: dict[str, Any], source: str, directory: Path | None) -> RunSpec:
    """Check a training mapping that came from `source`, whose relative names mean `directory`."""
    config = build(TrainConfig, tree, source)
    try:
        path = task_path(config.task, config.task_dir, directory, source)
        uri = storage_uri(config.storage_path)
        if config.launcher != "ray" or not os.environ.get("RAY_ADDRESS"):
            check_machine(config)
    except ConfigError as error:
        raise error.at(source) from error
    resolved = config.with_global_batch().tree()
    return RunSpec(resolved, tuple(portable(path)), source, Storage(uri).child(config.name).uri)


def check_machine(config: TrainConfig) -> None:
    """Workers of a local launcher must fit on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers, each = config.scaling.max_workers, config.scaling.cpus_per_worker
    if workers * each > cores:
        cost = f" with {each} cores each" if each > 1 else ""
        raise ConfigError(
            "scaling.num_workers",
            workers,
            f"must fit on this machine{cost}, which has {cores} cores",
            f"set it to at most {max(1, cores // each)}, or use `launcher: ray` on a cluster",
        )


def check_task(spec: RunSpec) -> None:
    """What only the task's own module can refute: that it imports, its class, its arguments."""
    add_to_path(list(spec.path))
    config = spec.config
    load_task(config.task, config.task_args, spec.source)


def check_precision(spec: RunSpec, device_type: str | None = None) -> None:
    """The precision and the device: `device_type` is where workers will train; None: what this machine has."""
    from trainers.device import resolve_device
    from trainers.precision import check_device_type, resolve_precision

    config = spec.config
    try:
        if device_type is None:
            resolve_precision(config.precision, resolve_device(config.device))
        else:
            check_device_type(config.precision, device_type)
    except ConfigError as error:
        raise error.at(spec.source) from error


def prepare_storage(spec: RunSpec, fresh: bool) -> RunResult | None:
    """Make the run's directory ready; the result when the run is complete already.

    Raises ConfigError when another run of this name is there that learned something else.
    """
    from trainers.device import environment
    from trainers.metrics import RunResult

    storage, config = spec.storage, spec.config
    if fresh:
        storage.delete("")
    storage.prove_writable()
    if storage.exists("config.yaml"):
        before = parse_yaml(storage.read("config.yaml").decode(), storage.locate("config.yaml"))
        for key in IDENTITY:
            if before.get(key) != spec.tree.get(key):
                raise ConfigError(
                    key,
                    spec.tree.get(key),
                    f"differs from {before.get(key)} in {storage.uri}",
                    "train under another `--name`, or start anew with --fresh",
                    spec.source,
                )
        if storage.exists("result.json"):
            result = RunResult.from_json(storage.read("result.json"))
            same_length = all(before.get(key) == spec.tree.get(key) for key in ("epochs", "max_steps"))
            if result.status == "done" and same_length:
                return result
    storage.write("config.yaml", dump_yaml(spec.tree).encode())
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu")
    storage.write("environment.json", json.dumps(environment(device), indent=2).encode())
    return None
