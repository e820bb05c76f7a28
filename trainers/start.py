"""Start a training run, for the command and for Python: `from trainers import train`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trainers.config.function import FUNCTION_IDENTITY
from trainers.config.model import Tree, refuse_changes
from trainers.config.train import IDENTITY
from trainers.config.yaml import dump_yaml
from trainers.errors import CheckpointError, ConfigError, StorageError
from trainers.launch.from_python import Given, check_thread, plain, read_given
from trainers.launch.process import without_collection
from trainers.launch.spec import (
    MARK,
    FunctionSpec,
    Job,
    R,
    RunSpec,
    Spec,
    check_precision,
    read_mapping,
    run_with,
    torchrun_world_size,
)
from trainers.launch.training import TrainJob
from trainers.lease import delete_own, held
from trainers.measure.result import RunResult
from trainers.output import Output, Sender, Take, torchrun_rank
from trainers.storage import Storage
from trainers.tracking.delivery import followed
from trainers.tracking.sinks import check_trackers

logger = logging.getLogger(__name__)


if TYPE_CHECKING:
    from trainers.inference import TrainedRun
    from trainers.on_ray.trainer import FunctionRun


def train(
    run: Given, *, fresh: bool = False, **keys: Any
) -> TrainedRun | FunctionRun:
    """Train, or resume from the newest checkpoint, as `python -m trainers` does.

    Args:
        run: The file of a run (a path or URI), a mapping of its keys, a Task
            class (also one of a notebook), or a training function for Ray
            Train (then a FunctionRun is returned).
        fresh: Start over: first empty the run's directory.
        keys: Keys of the run, which replace those of `run`: `epochs=3`,
            `**{"optimizer.lr": 0.1}`.

    An interrupt makes the run write a checkpoint and end as `stopped`; the
    same call then resumes it. Raises ConfigError if a value cannot be used,
    RunFailedError if training failed. Under torchrun every worker must call
    `train`.
    """
    check_thread("train()")
    places: list[Path] = []
    overrides = plain(keys, "train()", places)
    tree, source, directory = read_given(run, "train()")
    if places:
        directory = places[0]
    spec = run_with(tree, source, directory, overrides, torchrun_world_size())
    if isinstance(spec, FunctionSpec):
        return train_function(spec, fresh)
    result = run_training(spec, fresh)
    from trainers.inference import TrainedRun

    return TrainedRun(**vars(result), uri=spec.uri)


def run_training(
    spec: RunSpec,
    fresh: bool,
    is_command: bool = False,
    output: Output | None = None,
) -> RunResult:
    """Train with the configured launcher, or as a worker of torchrun.

    `is_command` says that the process has no other purpose; otherwise its Ray
    connection, its logging and its garbage collection are left as they were.
    """
    output = output or Output()
    is_torchrun = torchrun_world_size() is not None
    launcher = "torchrun" if is_torchrun else spec.config.launcher
    rank = torchrun_rank() or 0
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as cluster:
        with without_collection(own_process=is_command):
            from trainers.launch.process import shown_log

            if launcher == "ray":
                from trainers.on_ray.cluster import check_cluster, leaving

                cluster.enter_context(leaving())
        stack.enter_context(shown_log(rank, is_command, output.quiet))
        spec.load_task()
        trackers = spec.config.trackers if rank == 0 else []
        check_trackers(trackers, spec.path, spec.source)
        token = ""
        result: RunResult | None = None
        if rank == 0:
            token = stack.enter_context(held(spec.storage, MARK))
            if not fresh:  # before a cluster is started
                result = _find_result(spec)
        if result is None:
            device_type = check_cluster(spec) if launcher == "ray" else None
            check_precision(spec, device_type)
        if rank == 0:
            result = result or prepare_storage(spec, fresh)
            again = "the same command" if is_command else "the same call"
            stack.enter_context(
                followed(
                    "trainers.tracking.delivery",
                    spec.storage,
                    token,
                    trackers,
                    spec.path,
                    again,
                    has_ended=result is not None,
                )
            )
        if result is not None and not is_torchrun:
            anew = "--fresh" if is_command else "fresh=True"
            logger.info(
                "%s is complete already (%s starts it over)", spec.uri, anew
            )
        else:
            spec = _held(spec, token, output, is_command)
            # Until the cluster is left, Ray prints the output of its workers
            # between our lines.
            with cluster, _telling(spec, output, rank) as take:
                job = TrainJob(**asdict(spec))
                result = launch(job, launcher, rank, is_command, take)
        if rank == 0:
            check_kept(spec.storage, result)
    return result


S = TypeVar("S", bound=Spec)


def _held(spec: S, token: str, output: Output, is_command: bool) -> S:
    """Return the spec to launch, with its lease's token and how to report."""
    told: Literal["", "line", "json"] = ""
    if is_command and output.is_live:
        told = "line"
    elif is_command and output.as_json:
        told = "json"
    return replace(spec, token=token, quiet=output.quiet, told=told)


@contextlib.contextmanager
def _telling(spec: Spec, output: Output, rank: int) -> Iterator[Take | None]:
    """Yield the receiver of the run's records that the spec asks for, or None."""
    if spec.told == "" or rank > 0:
        yield None
    elif spec.told == "json":
        with contextlib.closing(Sender(output.records)) as take:
            yield take
    else:
        from trainers.terminal import live_line

        with live_line(spec.storage.name) as take:
            yield take


def train_function(
    spec: FunctionSpec,
    fresh: bool,
    is_command: bool = False,
    output: Output | None = None,
) -> FunctionRun:
    """Train with a user's own function, on Ray; see `run_training`."""
    output = output or Output()
    if torchrun_world_size() is not None:
        named = spec.config.train_func
        rule = (
            "is called by workers of Ray Train, which torchrun does not start"
        )
        fix = "start it without torchrun"
        raise ConfigError("train_func", named, rule, fix, spec.source)
    with without_collection(own_process=is_command):
        from trainers.launch.local import failing_as_run
        from trainers.launch.process import shown_log
        from trainers.on_ray.cluster import check_cluster, leaving
        from trainers.on_ray.trainer import run_function
    with contextlib.ExitStack() as stack:
        stack.enter_context(shown_log(0, is_command, output.quiet))
        spec.load()
        if spec.config.tracking:
            logger.warning(
                "`tracking` is for sweeps of a `train_func`: in a single run, the function itself must report to trackers"
            )
        token = stack.enter_context(held(spec.storage, MARK))
        stack.enter_context(leaving())
        check_cluster(spec)
        stack.enter_context(failing_as_run(0, is_command))
        _prepare_function(spec, fresh)
        spec = _held(spec, token, output, is_command)
        return run_function(
            spec, stack.enter_context(_telling(spec, output, 0))
        )


def do_on_cluster(job: Job[R]) -> R:
    """Run a job on the cluster's workers.

    For jobs that write nothing to storage (`explain`).
    """
    from trainers.on_ray.cluster import leaving
    from trainers.on_ray.trainer import run_job

    with leaving():
        return run_job(job)


def launch(
    job: Job[R],
    launcher: str,
    rank: int,
    is_command: bool = True,
    take: Take | None = None,
) -> R:
    """Run a job on all of its workers; `take` receives the run's records."""
    from trainers.launch import local

    starts: dict[str, Any] = {
        "local": local.run_local,
        "spawn": local.run_spawn,
        "torchrun": local.run_torchrun,
    }
    if launcher == "ray":
        from trainers.on_ray.trainer import run_on_ray

        starts["ray"] = run_on_ray
    with local.failing_as_run(rank, is_command):
        done: R = starts[launcher](job, take)
        return done


def _finished(storage: Storage) -> RunResult | None:
    """Return the result of a run that is done, else None."""
    if not storage.exists("result.json"):
        return None
    try:
        result = storage.read_json("result.json", RunResult)
        if result.status == "done":
            check_kept(storage, result)
            return result
    except (StorageError, CheckpointError) as error:
        logger.warning("%s; the run resumes from its newest checkpoint", error)
    return None


def check_kept(storage: Storage, result: RunResult) -> None:
    """Raise an error if the checkpoint that a run ended with does not exist.

    StorageError if one of the checkpoint's files was deleted, CheckpointError
    if its manifest is damaged.
    """
    from trainers.checkpoint.manifest import Manifest

    if result.checkpoint is None:
        return
    name = Storage(result.checkpoint).name  # its run may have been moved since
    kept = storage.child("checkpoints", name)
    files = ["manifest.json"]
    if kept.exists("manifest.json"):
        files += Manifest.from_json(kept.read("manifest.json")).files
    for file in files:
        if not kept.exists(file):
            raise StorageError(
                f"the run ended as `{result.status}`, but {kept.locate(file)} has since been deleted"
            )


def prepare_storage(spec: RunSpec, fresh: bool) -> RunResult | None:
    """Prepare the run's directory; return the result if the run is already complete.

    This process must hold the lease of the directory.

    Raises ConfigError if the directory contains a run that trained something
    else.
    """
    if fresh:
        delete_own(spec.storage, MARK)
    result = _find_result(spec)
    if result is None:
        # The result of a shorter run must not be taken for this run's.
        spec.storage.delete("result.json")
        _keep(spec)
    return result


def _find_result(spec: RunSpec) -> RunResult | None:
    """Return the result of the run if it is complete; change nothing.

    Raises ConfigError as `prepare_storage` does.
    """
    if not spec.storage.exists(MARK):
        return None
    before = _check_same(spec, IDENTITY)
    lengths = ("epochs", "max_steps", "early_stopping")
    if any(before.get(key) != spec.tree.get(key) for key in lengths):
        return None
    return _finished(spec.storage)


def _prepare_function(spec: FunctionSpec, fresh: bool) -> None:
    """Prepare the directory of a function's run; ConfigError as in prepare_storage."""
    if fresh:
        delete_own(spec.storage, MARK)
    if spec.storage.exists(MARK):
        _check_same(spec, FUNCTION_IDENTITY)
    _keep(spec)


def _check_same(spec: Spec, keys: Sequence[str]) -> Tree:
    """Return the run's earlier configuration; ConfigError if one of `keys` differs."""
    before = read_mapping(spec.storage, MARK)
    then = {key: before.get(key) for key in keys}
    now = {key: spec.tree.get(key) for key in keys}
    fix = "train under another `--name`, or start over with --fresh"
    refuse_changes(then, now, spec.storage.uri, fix, spec.source)
    return before


def _keep(spec: Spec) -> None:
    """Write the configuration into the run's directory."""
    # A command that opens the run later may start in another directory.
    found = {"task_dir": spec.path[0]} if spec.path else {}
    spec.storage.write(MARK, dump_yaml({**spec.tree, **found}).encode())
