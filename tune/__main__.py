"""Sweep batch size, precision and any other key of a training run.

Keys of the run are written `--train.dotted.key value`.

On a cluster of several nodes, a sweep first checks their versions and storage
(`python -m cluster check`).

Exit codes: 0 the sweep has an answer (`plan`: it fits the cluster); 1 no trial
ended well, nodes are faulty, or the sweep was cut off; 2 a value on the
command line or in the configuration cannot be used, or the sweep never fits
the cluster; 130 interrupted. If the sweep was cut off or interrupted, the
output says how to resume it.
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
from trainers.errors import MISSING, ConfigError, counted
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
    read_sweep,
)
from tune.sweeps.steer import (
    kept_sweep,
    known_trials,
    order_extension,
    steer_in_words,
)
from tune.sweeps.sweep import (
    SweepInterrupted,
    SweepResult,
    run_to_answer,
    saved_answer,
)

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
_MINUTES = "minutes a trial takes; default: the mean of the ended trials"


def sweep(
    location: Annotated[
        str,
        Field(
            title="SWEEP",
            description="a sweep's file (.yaml) or directory, as path or URI",
        ),
    ],
    overrides: Tree,
    output: Output,
    *,
    fresh: Annotated[
        bool,
        Field(
            description="start over: delete what the sweep's directory holds"
        ),
    ] = False,
    report: Annotated[
        bool,
        Field(
            description="write a sweep's report again, from its journal; train nothing"
        ),
    ] = False,
    no_check: Annotated[
        bool, Field(description="do not check the nodes first")
    ] = False,
) -> int:
    """Run a sweep from its file, or continue the one in a directory.

    Keys given with a directory extend its sweep: more values, trials or
    epochs, another objective. Ended trials are not trained again. A running
    sweep applies the extension once all of its trials have ended.
    """
    is_directory = report or _is_directory(location)
    if report and (fresh or overrides):
        fix = "leave out `--fresh` and the keys"
        raise ConfigError("--report", MISSING, "only writes a report", fix)
    if is_directory and fresh:
        rule = f"starts a sweep from its file, and {location} is a directory"
        fix = "leave out `--fresh`, or give the .yaml file"
        raise ConfigError("--fresh", MISSING, rule, fix)
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
        then = f"the sweep continues with {keys} once its trials have ended"
        words = f"the directory {error.rule}; {then}"
        output.result(words, then, {"status": "running"})
        return 0


def steer(words: _Steer, output: Output) -> int:
    """Stop, clone or prioritize a trial of a sweep, pause the sweep, or list its trials.

    stop TRIAL: the trial ends at its next evaluation, or never starts. clone
    TRIAL: the trial runs again, with KEY=VALUE changed. first TRIAL: the trial
    runs next. pause: no further trial starts until go-on. If the sweep is not
    running, this takes effect when the sweep is resumed.
    """
    directory, *action = words
    spec = read_kept(directory)
    if not action:
        trials = known_trials(spec)
        lines = [
            f"{name}  {trial.status:12}  {in_a_line(trial.config)}"
            for name, trial in trials.items()
        ]
        record = {name: asdict(trial) for name, trial in trials.items()}
        output.result(
            "\n".join(lines), counted(len(trials), "trial"), {"trials": record}
        )
        return 0
    name = steer_in_words(directory, *action)
    said = f"{action[0]} {name}".rstrip()
    when = f"done within seconds if the sweep is running, else once `{spec.resume()}` resumes it"
    output.result(f"{said}: {when}", said, {"trial": name})
    return 0


def watch(
    directory: _Directory,
    *,
    port: Annotated[
        int,
        Field(
            ge=0,
            le=65535,
            description="port on the loopback; 0: any free port",
        ),
    ] = 0,
) -> int:
    """Serve the report of a sweep that runs, or has yet to begin, on any machine.

    The page's buttons steer the sweep. Ctrl-C ends the page, not the sweep.
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
            title="CLUSTER.yaml",
            description="the file of the cluster to plan for",
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
        bool, Field(description="let the agent start, extend and stop sweeps")
    ] = False,
    max_trials: Annotated[
        int | None,
        Field(
            ge=1,
            title="N",
            description="most trials of all sweeps that the agent starts",
        ),
    ] = None,
    max_usd: Annotated[
        float | None,
        Field(
            gt=0,
            title="D",
            description="most dollars of all sweeps that the agent starts",
        ),
    ] = None,
    usd_per_hour: Annotated[
        float | None,
        Field(
            gt=0,
            title="P",
            description="price of everything that a sweep occupies",
        ),
    ] = None,
) -> int:
    """Serve sweeps to an agent: the Model Context Protocol on standard input and output.

    --allow-run needs --max-trials, --max-usd and --usd-per-hour.
    """
    require_package("COMMAND", "mcp")
    from tune.mcp import Limits, serve

    limits = max_trials, max_usd, usd_per_hour
    if {limit is not None for limit in limits} != {allow_run}:
        rule = "must be given with --max-trials, --max-usd and --usd-per-hour"
        raise ConfigError(
            "--allow-run", MISSING, rule, "give all four of them, or none"
        )
    granted = Limits(max_trials or 0, max_usd or 0.0, usd_per_hour or 0.0)
    serve(granted if allow_run else None)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    functions: dict[str, Callable[..., int]] = {
        # older names of the same command, for a directory
        "resume": sweep,
        "extend": sweep,
        "": sweep,
        "steer": steer,
        "watch": watch,
        "plan": plan,
        "mcp": mcp,
    }
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["report"]:  # older name of --report
        args[0] = "--report"
    return run("python -m tune", __doc__, functions, args, SweepConfig)


def _is_directory(location: str) -> bool:
    if "://" in location:
        return Storage(location).exists(SAVED)
    return os.path.isdir(location)  # noqa: PTH112 (False, never an error)


def _report(directory: str, output: Output) -> int:
    spec = kept_sweep(directory)
    if not spec.config.redraws and not is_complete(spec):
        print(f"the sweep has not ended: `{spec.resume()}` continues it")
    return _show(saved_answer(spec), output)


def _sweep(spec: SweepSpec, fresh: bool, checked: bool, output: Output) -> int:
    try:
        result = run_to_answer(spec, fresh, checked, True, output)
    except SweepInterrupted as interrupted:
        command = spec.resume()
        kept = counted(interrupted.kept, "trial")
        words = f"interrupted: {kept} kept; continue with"
        if not output.as_json:
            print(f"{words}\n    {command}", flush=True)
        return output.failed("interrupted", f"{words} {command}", 130)
    return _show(result, output)


def _show(result: SweepResult, output: Output) -> int:
    """Print the table, the answer and the paths of files; return the exit code."""
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
        console = Console(
            width=None if sys.stdout.isatty() else 140, highlight=False
        )
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
