"""Train a PyTorch task with one command, and use what was trained.

    torchrun --nproc-per-node 2 -m trainers CONFIG.yaml

evaluate and predict run under torchrun, too.

Exit codes: 0 done or stopped; 1 the run failed; 2 a value on the command line
or in the configuration cannot be used; 74 this process was a worker, hung, and
ended itself; 130 interrupted.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, Any, NoReturn

from pydantic import Field

from trainers.command_line import leave, run
from trainers.config import TrainConfig
from trainers.config.model import Tree
from trainers.errors import ConfigError
from trainers.launch.process import follow_agent
from trainers.launch.spec import (
    FunctionSpec,
    check_precision,
    read_run,
    torchrun_world_size,
)
from trainers.output import Output, torchrun_rank
from trainers.start import do_on_cluster, launch, run_training, train_function
from trainers.storage import storage_uri

_Run = Annotated[str, Field(description="a run's directory or URI")]
_Name = Annotated[
    str, Field(title="NAME", description="newest, best or step-N")
]
_Split = Annotated[
    str,
    Field(description="the split to read, as the task's `dataset` names it"),
]


def _out(ending: str) -> Any:
    return Field(
        title=f"FILE{ending}",
        description="a file or URI to write",
        pattern=rf"\{ending}$",
        json_schema_extra={"rule": f"must end in {ending}"},
    )


def train(
    location: Annotated[
        str,
        Field(
            title="CONFIG.yaml",
            description="a file, or a URI (s3://bucket/sweep/best.yaml)",
        ),
    ],
    overrides: Tree,
    output: Output,
    *,
    fresh: Annotated[
        bool,
        Field(description="start over: first empty the run's directory"),
    ] = False,
) -> int:
    """Train, or resume from the run's newest checkpoint."""
    follow_agent()
    spec = read_run(location, overrides, torchrun_world_size())
    if isinstance(spec, FunctionSpec):
        return _tell(output, train_function(spec, fresh, True, output))
    result = run_training(spec, fresh, True, output)
    record = {**asdict(result), "uri": spec.uri}
    output.result(str(result), _joined(str(result), 2), record)
    return 0


def evaluate(
    run: _Run,
    overrides: Tree,
    output: Output,
    *,
    split: _Split = "val",
    checkpoint: _Name = "newest",
) -> int:
    """Evaluate a checkpoint on a split.

    Uses `--scaling.num_workers` workers (default: 1).
    """
    return _infer(run, overrides, output, split, checkpoint, None)


def predict(
    run: _Run,
    overrides: Tree,
    output: Output,
    *,
    out: Annotated[str, _out(".parquet")],
    split: _Split = "val",
    checkpoint: _Name = "newest",
) -> int:
    """Write the model's output for every sample of a split.

    Uses `--scaling.num_workers` workers (default: 1).
    """
    return _infer(run, overrides, output, split, checkpoint, storage_uri(out))


def export(
    run: _Run,
    *,
    out: Annotated[str, _out(".safetensors")],
    checkpoint: _Name = "newest",
) -> int:
    """Write the weights of a checkpoint, for use without Paceline."""

    from trainers.inference import export

    _check_out(storage_uri(out))
    print(export(run, out, checkpoint))
    return 0


def explain(
    run: Annotated[
        str,
        Field(description="a run's directory or URI, or a YAML file"),
    ],
    output: Output,
    *,
    verify: Annotated[
        bool,
        Field(
            description="measure the first three advised changes against the old configuration"
        ),
    ] = False,
    seconds: Annotated[
        float,
        Field(
            title="S",
            gt=0,
            le=600,
            description="seconds of the profile, and of each measurement of --verify",
        ),
    ] = 2.0,
) -> int:
    """Say where a run's time goes, and why; change nothing."""
    from trainers.explain import explain, read_subject
    from trainers.launch.local import run_spawn
    from trainers.launch.process import embedded, setup_logging

    setup_logging(0, quiet=True)
    subject = read_subject(run)
    if subject.config.launcher == "ray" and not embedded():
        found = explain(subject, do_on_cluster, seconds, "ray", verify)
    else:
        found = explain(subject, run_spawn, seconds, "spawn", verify)
    return _tell(output, found)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    commands: dict[str, Callable[..., int]] = {
        "": train,
        "evaluate": evaluate,
        "predict": predict,
        "export": export,
        "explain": explain,
    }
    return run(
        "python -m trainers", __doc__, commands, argv, TrainConfig, advise=True
    )


def _infer(
    location: str,
    overrides: Tree,
    output: Output,
    split: str,
    checkpoint: str,
    out: str | None,
) -> int:
    from trainers.inference import Inference, run_spec
    from trainers.launch.process import setup_logging

    follow_agent()
    torchrun = torchrun_world_size()
    rank = torchrun_rank() or 0
    spec = run_spec(location, overrides, torchrun)
    setup_logging(rank, output.quiet)
    spec.load_task()
    check_precision(spec)
    if out is not None:
        _check_out(out)
    plain = asdict(replace(spec, quiet=output.quiet))
    job = Inference(**plain, split=split, which=checkpoint, out=out)
    launcher = "torchrun" if torchrun is not None else spec.config.launcher
    return _tell(output, launch(job, launcher, rank))


def _check_out(out: str) -> None:
    """Raise ConfigError if `out` exists and is not a regular file.

    The writer renames a finished file to `out`, which would replace a device
    such as /dev/null for the whole machine.
    """
    if os.path.lexists(out) and not stat.S_ISREG(os.lstat(out).st_mode):
        is_directory = os.path.isdir(out)  # noqa: PTH112 (Path's raises)
        rule = "is a directory" if is_directory else "is not a regular file"
        raise ConfigError("--out", out, rule, "name a file")


def _tell(output: Output, result: Any) -> int:
    """Report what the command has done; return the exit code."""
    text = str(result)
    output.result(text, _joined(text), {"status": "done", **asdict(result)})
    return 0


def _joined(text: str, most: int | None = None) -> str:
    """Return the first `most` lines of a text as one line."""
    return "  ".join(line.strip() for line in text.splitlines()[:most])


def script() -> NoReturn:
    """Run the command, and end the process."""
    leave(main())


if __name__ == "__main__":
    script()
