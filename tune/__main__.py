"""Sweep batch size, precision and any other key of a training run.

Keys of the run are `--train.dotted.key value`.

On a cluster of several nodes a sweep looks at their versions and storage first
(`python -m cluster check`).

Exit codes: 0 the sweep has an answer, or fits; 1 no trial ended well, nodes are not in
order, or the sweep was cut off (how to resume is said); 2 a value on the command line
or in the configuration cannot be used, or the sweep never fits the cluster; 130
interrupted, and how to resume is said.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, NoReturn

from pydantic import Field

from trainers.command_line import leave, run
from trainers.config.model import Tree
from trainers.errors import ConfigError, counted
from trainers.lease import InUseError
from trainers.output import Output
from trainers.storage import Storage
from trainers.versions import require_package
from tune.config import SweepConfig
from tune.report.words import in_a_line
from tune.sweeps.spec import (
    SAVED,
    SweepSpec,
    is_complete,
    read_kept,
    read_saved,
    read_sweep,
)
from tune.sweeps.steer import known_trials, order_extension, steer_in_words
from tune.sweeps.sweep import SweepInterrupted, SweepResult, run_to_answer, saved_answer

_Sweep = Annotated[str, Field(title="SWEEP.yaml", description="a file or URI")]
_Directory = Annotated[str, Field(description="a sweep's directory or URI")]
_Steer = Annotated[
    tuple[str, ...],
    Field(
        min_length=1,
        title="DIRECTORY [ACTION [TRIAL [KEY=VALUE]...]]",
        description="a sweep's directory or URI, and what to do",
    ),
]
_MINUTES = "how long a trial takes; default: the mean of those that ended"


def sweep(
    location: Annotated[
        str,
        Field(title="SWEEP", description="its file (.yaml) or its directory, or a URI"),
    ],
    overrides: Tree,
    output: Output,
    *,
    fresh: Annotated[
        bool, Field(description="start anew: delete what the sweep's directory holds")
    ] = False,
    report: Annotated[
        bool,
        Field(description="write a directory's report from its journal; train nothing"),
    ] = False,
    no_check: Annotated[
        bool, Field(description="do not look at the nodes first")
    ] = False,
) -> int:
    """Run a sweep, or go on with what its directory holds.

    The keys that are given for a directory extend its sweep: more points, trials or
    epochs, another objective. What is known is not trained again. A sweep that is
    running extends itself once its trials have ended.
    """
    is_directory = report or _is_directory(location)
    if (is_directory and fresh) or (report and overrides):
        rule = "goes with no other option" if report else "is not for a directory"
        key = "--report" if report else "--fresh"
        raise ConfigError(key, location, rule, "leave out one of them")
    if report:
        return _report(location, output)
    if not is_directory:
        spec = read_sweep(location, overrides)
        return _sweep(spec, fresh, not no_check, output)
    try:
        spec = order_extension(location, overrides)
        return _sweep(spec, False, not no_check, output)
    except InUseError as error:
        if not overrides:
            raise
        keys = ", ".join(overrides)
        words = f"{error.rule}; it goes on with {keys} once its trials have ended"
        output.result(f"the sweep {words}", words, {"status": "running"})
        return 0


def steer(words: _Steer, output: Output) -> int:
    """Stop, clone or hurry a trial of a running sweep, pause the sweep, or list trials.

    stop TRIAL: it ends at its next evaluation, or never starts. clone TRIAL: run it
    again, with KEY=VALUE changed. first TRIAL: it runs next. pause: no further trial
    starts, until go-on. A sweep that is not running does so when it goes on.
    """
    directory, *action = words
    spec = read_kept(directory)
    if not action:
        trials = known_trials(spec)
        lines = []
        for name, trial in trials.items():
            lines.append(f"{name}  {trial.status:12}  {in_a_line(trial.config)}")
        record = {name: asdict(trial) for name, trial in trials.items()}
        output.result(
            "\n".join(lines), counted(len(trials), "trial"), {"trials": record}
        )
        return 0
    name = steer_in_words(directory, *action)
    said = f"{action[0]} {name}".rstrip()
    when = f"done within seconds where the sweep runs, else by `{spec.resume()}`"
    output.result(f"{said}: {when}", said, {"trial": name})
    return 0


def watch(
    directory: _Directory,
    *,
    port: Annotated[
        int, Field(ge=0, le=65535, description="of the loopback; 0: any free one")
    ] = 0,
) -> int:
    """Serve the report of a sweep that runs, or has yet to begin, here or elsewhere.

    Its buttons steer the sweep. Ctrl-C ends the page, not the sweep.
    """
    from tune.watch import serve

    serve(directory, port)
    return 0


def plan(
    location: _Sweep,
    overrides: Tree,
    output: Output,
    *,
    cluster: Annotated[
        str,
        Field(
            title="CLUSTER.yaml", description="the file of the cluster it would run on"
        ),
    ],
    minutes_per_trial: Annotated[
        float | None, Field(gt=0, le=1e9, title="M", description=_MINUTES)
    ] = None,
) -> int:
    """Forecast lanes, trials, hours and dollars of a sweep on a cluster; start nothing."""
    from cluster.files.ray_up import load_cluster
    from tune.sweeps.plan import make_plan

    spec = read_sweep(location, overrides, own_workers=False)
    forecast = make_plan(spec, load_cluster(cluster), minutes_per_trial)
    figures = asdict(forecast)
    lines = figures.pop("lines")
    [short] = [line for line in lines if line.startswith("USD ")]
    output.result("\n".join(lines), short, figures)
    return 0


def mcp(
    *,
    allow_run: Annotated[
        bool, Field(description="sweeps may be started, extended and stopped")
    ] = False,
    max_trials: Annotated[
        int | None, Field(ge=1, title="N", description="of all that it starts")
    ] = None,
    max_usd: Annotated[
        float | None, Field(gt=0, title="D", description="of all that it starts")
    ] = None,
    usd_per_hour: Annotated[
        float | None,
        Field(gt=0, title="P", description="price of all that a sweep holds"),
    ] = None,
) -> int:
    """Serve sweeps to an agent: the Model Context Protocol on standard input and output.

    --allow-run needs the two limits and the price.
    """
    require_package("COMMAND", "mcp")
    from tune.mcp import Limits, serve

    limits = max_trials, max_usd, usd_per_hour
    if {limit is not None for limit in limits} != {allow_run}:
        rule = "goes with --max-trials, --max-usd and --usd-per-hour"
        raise ConfigError(
            "--allow-run", allow_run, rule, "give all four of them, or none"
        )
    granted = Limits(max_trials or 0, max_usd or 0.0, usd_per_hour or 0.0)
    serve(granted if allow_run else None)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    functions: dict[str, Callable[..., int]] = {
        # older names of it, for a directory
        "resume": sweep,
        "extend": sweep,
        "": sweep,
        "steer": steer,
        "watch": watch,
        "plan": plan,
        "mcp": mcp,
    }
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["report"]:  # its older name
        args[0] = "--report"
    return run("python -m tune", __doc__, functions, args, SweepConfig)


def _is_directory(location: str) -> bool:
    if "://" in location:
        return Storage(location).exists(SAVED)
    return os.path.isdir(location)  # noqa: PTH112 (false for what is no path)


def _report(directory: str, output: Output) -> int:
    spec = read_saved(directory)
    if not spec.config.redraws and not is_complete(spec):
        print(f"the sweep has not ended: `{spec.resume()}` goes on")
    return _show(saved_answer(spec), output)


def _sweep(spec: SweepSpec, fresh: bool, checked: bool, output: Output) -> int:
    try:
        result = run_to_answer(spec, fresh, checked, True, output)
    except SweepInterrupted as interrupted:
        command = spec.resume()
        kept = counted(interrupted.kept, "trial")
        words = f"interrupted: {kept} kept; go on with"
        if not output.as_json:
            print(f"{words}\n    {command}", flush=True)
        return output.failed("interrupted", f"{words} {command}", 130)
    return _show(result, output)


def _show(result: SweepResult, output: Output) -> int:
    """Print the table, the answer and where things are."""
    from rich.console import Console

    code = 0 if result.best_yaml is not None else 1
    answer = result.answer
    lines = [answer.text]
    if result.best_yaml is not None:
        lines.append(
            f"best.yaml:   {result.best_yaml}   (python -m trainers ... trains it)"
        )
    lines.append(f"report.html: {result.report}")
    if not (output.quiet or output.as_json):
        console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
        console.print(result.table(console.width))
    output.result(
        "\n".join(lines),
        answer.line,
        {
            "status": "done" if code == 0 else "error",
            "answer": answer.line,
            "throughput": answer.fastest,
            "largest_batch": answer.largest,
            "doubts": [asdict(doubt) for doubt in answer.doubts],
            "trials": Counter(record.status for record in result.records),
            "best": None if result.best is None else asdict(result.best),
            "best_yaml": result.best_yaml,
            "report": result.report,
            "uri": result.spec.uri,
        },
    )
    return code


def script() -> NoReturn:
    """Run the command, and end the process."""
    leave(main())


if __name__ == "__main__":
    script()
