"""Train a PyTorch task with one command, and use what was trained.

    torchrun --nproc-per-node 2 -m trainers CONFIG.yaml      (evaluate and predict run under torchrun, too)

Exit codes: 0 done or stopped; 1 the run failed; 2 a value on the command line or in the configuration cannot be used;
74 this process was a worker, hung, and ended itself; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from trainers.command_line import run
from trainers.config import TrainConfig
from trainers.errors import ConfigError, counted
from trainers.launch.imports import without_collection
from trainers.launch.signals import follow_agent
from trainers.launch.spec import (
    MARK,
    FunctionSpec,
    check_kept,
    check_precision,
    prepare_function,
    prepare_storage,
    read_run,
    read_spec,
    torchrun_world_size,
)
from trainers.lease import held
from trainers.redaction import redact
from trainers.storage import storage_uri

if TYPE_CHECKING:
    from trainers.measure.result import RunResult

_PROFILE_STEPS = 5
_Run = Annotated[str, Field(description="a run's directory or URI")]
_Name = Annotated[str, Field(title="NAME", description="newest, best or step-N")]
_Split = Annotated[str, Field(description="the name that the task's `dataset` gets")]


def train(
    location: Annotated[str, Field(title="CONFIG.yaml", description="a file, or a URI (s3://bucket/sweep/best.yaml)")],
    overrides: dict[str, Any],
    *,
    fresh: Annotated[bool, Field(description="start anew: delete what the run's directory holds")] = False,
    profile: Annotated[bool, Field(description=f"the same as --profile_steps {_PROFILE_STEPS}")] = False,
) -> int:
    """Train, or go on from the run's newest checkpoint."""
    follow_agent()
    torchrun = torchrun_world_size()
    overrides = ({"profile_steps": _PROFILE_STEPS} if profile else {}) | overrides
    spec = read_run(location, overrides, torchrun)
    if isinstance(spec, FunctionSpec):
        return _train_function(spec, fresh, torchrun is not None)
    launcher = "torchrun" if torchrun is not None else spec.config.launcher
    with without_collection(own_process=True):
        from trainers.launch.local import setup_logging

        if launcher == "ray":
            from trainers.on_ray.connect import check_cluster
    rank = 0 if torchrun is None else int(os.environ["RANK"])
    setup_logging(rank)
    spec.load_task()
    check_precision(spec, check_cluster(spec) if launcher == "ray" else None)
    with held(spec.storage, MARK) if rank == 0 else contextlib.nullcontext("") as token:
        result = prepare_storage(spec, fresh) if rank == 0 else None
        if result is not None and torchrun is None:
            print(f"{spec.uri} is complete already (--fresh starts it anew)")
        else:
            result = _launch(replace(spec, token=token), launcher, rank)
        if rank == 0:
            check_kept(spec.storage, result)
    if rank == 0:
        print(redact(summary(result)))
    return 0


def evaluate(run: _Run, overrides: dict[str, Any], *, split: _Split = "val", checkpoint: _Name = "newest") -> int:
    """Evaluate a checkpoint on a split, in one worker or `--scaling.num_workers N`."""
    return _infer(run, overrides, split, checkpoint, None)


def predict(
    run: _Run,
    overrides: dict[str, Any],
    *,
    out: Annotated[str, Field(title="FILE.parquet", description="a file or URI to write")],
    split: _Split = "val",
    checkpoint: _Name = "newest",
) -> int:
    """Write what the model says of every sample of a split, in one worker or `--scaling.num_workers N`."""
    return _infer(run, overrides, split, checkpoint, storage_uri(out))


def export(
    run: _Run,
    *,
    out: Annotated[str, Field(title="FILE.safetensors", description="a file or URI to write")],
    checkpoint: _Name = "newest",
) -> int:
    """Write the weights of a checkpoint, for readers without Paceline."""
    from trainers.inference import export

    print(export.export(run, out, checkpoint))
    return 0


def memory(
    location: Annotated[str, Field(title="CONFIG.yaml", description="a file, or a URI")],
    overrides: dict[str, Any],
    *,
    gpu: Annotated[
        str | None, Field(title="NAME", description='with its memory, as "H100 80GB"; default: what is here')
    ] = None,
) -> int:
    """Predict the memory that steps will take, and the largest microbatch; trains nothing, and takes none."""
    spec = read_spec(location, overrides, own_workers=False)
    from trainers.launch.local import setup_logging
    from trainers.launch.memory_page import memory_page

    setup_logging(0)
    for line in memory_page(spec, gpu):
        print(redact(line), flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    commands: dict[str, Callable[..., int]] = {
        "": train,
        "evaluate": evaluate,
        "predict": predict,
        "export": export,
        "memory": memory,
    }
    return run("python -m trainers", __doc__, commands, argv, TrainConfig, advise=True)


def _train_function(spec: FunctionSpec, fresh: bool, by_torchrun: bool) -> int:
    """Train with a user's own function, on Ray."""
    if by_torchrun:
        rule = "is called by workers of Ray Train, which torchrun does not start"
        raise ConfigError("train_func", spec.config.train_func, rule, "start it without torchrun", spec.source)
    with without_collection(own_process=True):
        from trainers.launch.local import failing_as_run, setup_logging
        from trainers.on_ray.connect import check_cluster, disconnect
        from trainers.on_ray.function import run_function

    setup_logging(0)
    spec.load()
    check_cluster(spec)
    with contextlib.ExitStack() as stack:
        stack.callback(disconnect)
        token = stack.enter_context(held(spec.storage, MARK))
        stack.enter_context(failing_as_run(0))
        prepare_function(spec, fresh)
        said = run_function(replace(spec, token=token))
    print(redact(said))
    return 0


def _infer(location: str, overrides: dict[str, Any], split: str, checkpoint: str, out: str | None) -> int:
    from trainers.inference.passes import Inference, check_out, run_spec
    from trainers.launch.local import setup_logging

    follow_agent()
    torchrun = torchrun_world_size()
    rank = 0 if torchrun is None else int(os.environ["RANK"])
    spec = run_spec(location, overrides, torchrun)
    setup_logging(rank)
    spec.load_task()
    check_precision(spec)
    if out is not None and rank == 0:
        check_out(out)
    job = Inference(**asdict(spec), split=split, which=checkpoint, out=out)
    result = _launch(job, "torchrun" if torchrun is not None else spec.config.launcher, rank)
    if rank == 0:
        print(redact(str(result)))
    return 0


def _launch(job: Any, launcher: str, rank: int) -> Any:
    """Run a RunSpec or an Inference on all of its workers, of which this process may be one."""
    from trainers.launch import local

    starts: dict[str, Any] = {"local": local.run_local, "spawn": local.run_spawn, "torchrun": local.run_torchrun}
    with contextlib.ExitStack() as stack:
        if launcher == "ray":
            from trainers.on_ray.connect import disconnect
            from trainers.on_ray.trainer import run_on_ray

            starts["ray"] = run_on_ray
            stack.callback(disconnect)  # Ray prints what its workers say, amid lines of ours, until then
        stack.enter_context(local.failing_as_run(rank))
        return starts[launcher](job)


def summary(result: RunResult) -> str:
    """The result as the user reads it."""
    own_s, earlier_s = result.train_time_s - result.earlier_time_s, result.earlier_time_s
    steps = counted(result.steps, "step")
    if result.epochs is not None:
        steps += f", {counted(result.epochs, 'epoch', '.4g')}"
    done = f"{result.status}: {steps}, {own_s:.1f} s of training"
    before = f"; {earlier_s:.1f} s of training before this start" if earlier_s else ""
    workers = counted(result.world_size, "worker")
    arithmetic = f"microbatch {result.microbatch_size} x accumulation {result.accumulation} x {workers}"
    lines = [
        f"{done} ({result.wall_time_s:.1f} s with evaluation and checkpoints{before})",
        "  " + "  ".join(f"{name} {value:.4f}" for name, value in sorted(result.metrics.items())),
        f"  global batch {result.global_batch_size} = {arithmetic}",
    ]
    if (speed := result.throughput) is not None:
        lines.append(
            f"  {speed.samples_per_s:,.0f} samples/s; a step {speed.step_time_s * 1e3:.2f} ms "
            f"(95 % interval +-{speed.step_time_ci95_s * 1e3:.2f}, n={speed.steps}); "
            f"{speed.data_wait_share:.0%} of it waiting for data"
        )
    if result.compile is not None and result.first_step_s is not None:
        names = ((count, what.replace("_", " ")) for what, count in result.compile.items())
        counts = ", ".join(f"{count} {name.removesuffix('s' * (count == 1))}" for count, name in names)
        lines.append(f"  first step {result.first_step_s:.1f} s (compile), {counts}")
    if result.mfu is not None and result.flops_per_sample is not None:
        lines.append(f"  MFU {result.mfu:.1%} ({result.flops_per_sample / 1e9:.4g} GFLOP a sample)")
    lines.append(f"  peak memory {result.peak_memory_bytes / 2**20:,.0f} MiB")
    if result.checkpoint:
        lines.append(f"  checkpoint {result.checkpoint}")
    if result.world_size > 1 and result.ranks:
        from trainers.measure.ranks import table

        lines += [f"  {line}" for line in table(result.ranks)]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
