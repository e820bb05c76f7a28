"""Train one model, and use what was trained.

Run as:
    python -m trainers CONFIG.yaml [--fresh] [--profile] [--dotted.key value ...]
    torchrun --nproc-per-node 2 -m trainers CONFIG.yaml
    python -m trainers evaluate RUN [--split val] [--checkpoint newest|best|step-N] [--dotted.key value ...]
    python -m trainers predict RUN --out FILE.parquet [the same]
    python -m trainers export RUN --out FILE.safetensors [--checkpoint newest|best|step-N]
CONFIG may be a file or a URI (s3://bucket/sweep/best.yaml), RUN is a run's directory or URI. `--profile` is
`--profile_steps 5`. Exit code 0: done or stopped; 1: the run failed; 2: a value in the configuration cannot be used.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainers.config import TrainConfig
from trainers.config.overrides import parse_overrides
from trainers.config.reference import reference
from trainers.errors import POLICIES, ConfigError, PacelineError
from trainers.launch.imports import without_collection
from trainers.launch.spec import check_precision, prepare_storage, read_spec, torchrun_world_size

if TYPE_CHECKING:
    from trainers.measure.result import RunResult

PROFILE_STEPS = 5
"""What `--profile` records."""
COMMANDS = {
    "evaluate": ("trainers.inference.passes", "evaluate_command"),
    "predict": ("trainers.inference.passes", "predict_command"),
    "export": ("trainers.inference.export", "main"),
}
"""Module and function of each command; anything else is a CONFIG.yaml to train."""


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(__doc__, reference(TrainConfig), sep="\n")
        return 0 if args else 2
    training = args[0] not in COMMANDS
    try:
        if training:
            return _train(args[0], args[1:])
        module, function = COMMANDS[args[0]]
        command: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
        return command(args[1:])
    except PacelineError as error:
        advice = POLICIES[error.status].advice if training and error.exit_code != ConfigError.exit_code else ""
        complain(f"{error} ({advice})" if advice else str(error))
        return error.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return 130


def complain(sentences: str) -> None:
    """Errors on standard error, a line each; once for all of torchrun's workers."""
    if os.environ.get("RANK", "0") == "0":
        for line in sentences.splitlines():
            print(f"error: {line}", file=sys.stderr)


def _train(location: str, rest: list[str]) -> int:
    fresh = "--fresh" in rest
    overrides = parse_overrides([arg for arg in rest if arg not in ("--fresh", "--profile")])
    if "--profile" in rest:
        overrides.setdefault("profile_steps", PROFILE_STEPS)
    torchrun = torchrun_world_size()
    spec = read_spec(location, overrides, torchrun)
    launcher = "torchrun" if torchrun is not None else spec.config.launcher

    with without_collection(own_process=True):
        from trainers.launch.local import failing_as_run, run_local, run_spawn, run_torchrun, setup_logging

        if launcher == "ray":
            from trainers.on_ray.connect import check_cluster
            from trainers.on_ray.trainer import run_on_ray
    rank = int(os.environ["RANK"]) if torchrun is not None else 0
    setup_logging(rank)
    spec.load_task()
    if launcher == "ray":
        check_precision(spec, check_cluster(spec))
    else:
        check_precision(spec)
    finished = prepare_storage(spec, fresh) if rank == 0 else None
    if finished is not None and torchrun is None:
        print(f"{spec.uri} is complete already (--fresh starts it anew)")
        print(summary(finished))
        return 0
    run = {"local": run_local, "spawn": run_spawn, "torchrun": run_torchrun}.get(launcher) or run_on_ray
    with failing_as_run(rank):
        result = run(spec)
    if rank == 0:
        print(summary(result))
    return 0


def summary(result: RunResult) -> str:
    """The result as the user reads it."""
    plural = "s" if result.world_size > 1 else ""
    figures = "  ".join(f"{name} {value:.4f}" for name, value in sorted(result.metrics.items()))
    arithmetic = f"microbatch {result.microbatch_size} x accumulation {result.accumulation}"
    done = f"{result.status}: {result.steps} steps, {result.epochs:.4g} epochs"
    lines = [
        f"{done}, {result.train_time_s:.1f} s of training ({result.wall_time_s:.1f} s with evaluation and checkpoints)",
        f"  {figures}",
        f"  global batch {result.global_batch_size} = {arithmetic} x {result.world_size} worker{plural}",
    ]
    speed = result.throughput
    if speed is not None:
        lines.append(
            f"  {speed.samples_per_s:,.0f} samples/s; a step {speed.step_time_s * 1e3:.2f} ms "
            f"(95 % interval +-{speed.step_time_ci95_s * 1e3:.2f}, n={speed.steps}); "
            f"{speed.data_wait_share:.0%} of it waiting for data"
        )
    if result.compile is not None and result.first_step_s is not None:
        counts = ", ".join(
            f"{count} {name if count == 1 else name + 's'}"
            for name, count in (
                ("graph", result.compile["graphs"]),
                ("graph break", result.compile["graph_breaks"]),
                ("recompile", result.compile["recompiles"]),
            )
        )
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
