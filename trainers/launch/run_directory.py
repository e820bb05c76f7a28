"""A run's directory: what it must hold before the run starts, and after its end."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainers.config.function import FUNCTION_IDENTITY
from trainers.config.model import build
from trainers.config.train import IDENTITY, TrainConfig
from trainers.config.yaml import dump_yaml
from trainers.errors import CheckpointError, ConfigError, StorageError, did_you_mean
from trainers.launch.spec import MARK, FunctionSpec, RunSpec, Spec, read_mapping
from trainers.lease import LEASE
from trainers.storage import Storage, storage_uri

logger = logging.getLogger(__name__)
if TYPE_CHECKING:
    from trainers.measure.result import RunResult


def open_run(location: str) -> tuple[Storage, TrainConfig]:
    """Return a run's directory and its last configuration; ConfigError without a run."""
    storage = Storage(storage_uri(location))
    if not storage.exists(MARK):
        runs = [
            name
            for name in storage.parent.names()
            if storage.parent.exists(f"{name}/{MARK}")
        ]
        fix = did_you_mean(
            storage.name, runs, "give the directory of a run", storage.parent.locate
        )
        raise ConfigError("RUN", location, f"is no run: there is no {MARK} in it", fix)
    return storage, build(
        TrainConfig, read_mapping(storage, MARK), storage.locate(MARK)
    )


def delete_own(storage: Storage, mark: str) -> None:
    """Delete what a directory holds but its lease; ConfigError if it lacks `mark`."""
    names = [name for name in storage.names() if name != LEASE]
    if names and mark not in names:
        rule = f"is not ours to delete: it holds files but no {mark}"
        raise ConfigError("--fresh", storage.uri, rule, "give another `--name`")
    for name in sorted(
        names, key=lambda name: name == mark
    ):  # cut off, it is still ours to delete
        storage.delete(name)


def _finished(storage: Storage) -> RunResult | None:
    """Return the result of a run that is done, else None."""
    from trainers.measure.result import RunResult

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
    """Raise an error where the checkpoint that a run ended with is not there.

    StorageError where it was deleted, CheckpointError where the result is damaged.
    """
    from trainers.checkpoint.manifest import Manifest

    if result.checkpoint is None:
        return
    name = Storage(result.checkpoint).name  # its run may have been moved since
    if not re.fullmatch("step-[0-9]{12}", name):
        raise CheckpointError(
            f"{storage.locate('result.json')} is damaged: it names no checkpoint"
        )
    kept = storage.child("checkpoints", name)
    lost = ["manifest.json"]
    if kept.exists("manifest.json"):
        lost = [
            file
            for file in Manifest.from_json(kept.read("manifest.json")).files
            if not kept.exists(file)
        ]
    if lost:
        raise StorageError(
            f"the run ended as `{result.status}`, but {kept.locate(lost[0])} was deleted since"
        )


def prepare_storage(spec: RunSpec, fresh: bool) -> RunResult | None:
    """Make the run's directory ready; return the result of a run that is complete.

    This process must hold its lease.

    Raises ConfigError when another run of this name is there that learned something
    else.
    """
    storage = spec.storage
    if fresh:
        delete_own(storage, MARK)
    if storage.exists(MARK):
        before = check_same(spec, IDENTITY)
        same_length = all(
            before.get(key) == spec.tree.get(key)
            for key in ("epochs", "max_steps", "early_stopping")
        )
        if same_length and (result := _finished(storage)) is not None:
            return result
        storage.delete(
            "result.json"
        )  # of a shorter run: it must not be taken for this one's
    keep(spec)
    return None


def prepare_function(spec: FunctionSpec, fresh: bool) -> None:
    """Make the directory of a function's run ready; ConfigError as in prepare_storage."""
    if fresh:
        delete_own(spec.storage, MARK)
    if spec.storage.exists(MARK):
        check_same(spec, FUNCTION_IDENTITY)
    keep(spec)


def check_same(spec: Spec, keys: Sequence[str]) -> dict[str, Any]:
    """Return the run's former configuration; ConfigError where one of `keys` differs."""
    before = read_mapping(spec.storage, MARK)
    for key in keys:
        if before.get(key) != spec.tree.get(key):
            rule = f"differs from {before.get(key)} in {spec.storage.uri}"
            fix = "train under another `--name`, or start anew with --fresh"
            raise ConfigError(key, spec.tree.get(key), rule, fix, spec.source)
    return before


def keep(spec: Spec) -> None:
    """Write the configuration into the run's directory."""
    # A command that opens the run later may start in another directory.
    found = {"task_dir": spec.path[0]} if spec.path else {}
    spec.storage.write(MARK, dump_yaml({**spec.tree, **found}).encode())
