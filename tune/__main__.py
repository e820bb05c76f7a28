"""Sweep batch size, precision and any other key of a training run.

On a cluster of several nodes a sweep looks at their versions, clocks and storage first
(`python -m cluster check`).

Exit codes: 0 the sweep has an answer, or fits; 1 no trial ended well, nodes are not in
order, or the sweep was cut off (how to resume is said); 2 a value on the command line
or in the configuration cannot be used, or the sweep never fits the cluster; 130
interrupted, and how to resume is said.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import Field

from trainers.command_line import leave, run
from trainers.config.yaml import parse_yaml
from trainers.lease import InUseError
from trainers.output import Output
from tune.config import SweepConfig
from tune.report.words import in_a_line
from tune.sweeps.extension import order_extension
from tune.sweeps.spec import SweepSpec, is_complete, read_kept, read_saved, read_sweep
from tune.sweeps.steer import known_trials
from tune.sweeps.steer import steer as steer_sweep
from tune.sweeps.sweep import SweepInterrupted, SweepResult, run_to_answer, saved_answer

_Sweep = Annotated[str, Field(title="SWEEP.yaml", description="a file or URI")]
_Directory = Annotated[str, Field(description="a sweep's directory or URI")]
_Steer = Annotated[
    tuple[str, ...],
    Field(
        min_length=1,
        title="SWEEP [ACTION [TRIAL [KEY=VALUE]...]]",
        description="its directory, and what to do",
    ),
]
_NoCheck = Annotated[bool, Field(description="do not look at the nodes first")]
_MINUTES = "how long a trial takes; default: the mean of those that ended"


def sweep(
    location: _Sweep,
    overrides: dict[str, Any],
    output: Output,
    *,
    fresh: Annotated[
        bool, Field(description="start anew: delete what the sweep's directory holds")
    ] = False,
    no_check: _NoCheck = False,
) -> int:
    """Sweep, or go on with the sweep in its directory; keys of the run are
    `--train.dotted.key value`.
    """
    return _sweep(read_sweep(location, overrides), fresh, not no_check, output)


def extend(
    directory: _Directory,
    overrides: dict[str, Any],
    output: Output,
    *,
    no_check: _NoCheck = False,
) -> int:
    """Go on with a sweep, and with other keys where some are given: more points, trials
    or epochs, another objective.

    What is known is not trained again; keys of the run are `--train.dotted.key value`.
    Of a sweep that runs it is said to its process, which does so. `resume` is the same.
    """
    try:
        return _sweep(
            order_extension(directory, overrides), False, not no_check, output
        )
    except InUseError as error:
        if not overrides:
            raise
        words = f"{error.rule}; it goes on with {', '.join(overrides)} once its trials have ended"
        output.result(f"the sweep {words}", words, {"status": "running"})
        return 0


def steer(words: _Steer, output: Output) -> int:
    """Have a sweep, which may run elsewhere, do something: stop, clone or first TRIAL,
    pause, go-on; or list trials.

    stop: it ends at its next evaluation, or never starts. clone: again, with KEY=VALUE
    changed. first: it runs next.
    pause: no further trial starts, until go-on.
    """
    directory, *rest = words
    spec = read_kept(directory)
    if not rest:
        trials = known_trials(spec)
        lines = [
            f"{name}  {trial.status:12}  {in_a_line(trial.config)}"
            for name, trial in trials.items()
        ]
        output.result(
            "\n".join(lines),
            f"{len(trials)} trials",
            {"trials": {n: asdict(t) for n, t in trials.items()}},
        )
        return 0
    action, *rest = rest
    keys = dict(word.partition("=")[::2] for word in rest[1:])
    values = {
        key: parse_yaml(text, f"command line, {key}") for key, text in keys.items()
    }
    name = steer_sweep(directory, action, *rest[:1], **values)  # type: ignore[arg-type] # (it checks the action)
    said = " ".join(filter(None, (action, name)))
    output.result(
        f"{said}: done within seconds where the sweep runs, else by `{spec.resume()}`",
        said,
        {"trial": name},
    )
    return 0


def report(directory: _Directory, output: Output) -> int:
    """Write the report again from the journal; says where the sweep has not ended."""
    spec = read_saved(directory)
    if spec.config.search != "random" and not is_complete(spec):
        print(f"the sweep has not ended: `{spec.resume()}` goes on")
    return _show(saved_answer(spec), output)


def watch(
    directory: _Directory,
    *,
    port: Annotated[
        int, Field(ge=0, le=65535, description="of the loopback; 0: any free one")
    ] = 0,
) -> int:
    """Serve the report of a sweep that runs, here or on another machine, or has yet to
    begin; Ctrl-C ends it.
    """
    from tune.watch import serve

    serve(directory, port)
    return 0


def plan(
    location: _Sweep,
    overrides: dict[str, Any],
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
    """Say lanes, trials, hours and dollars of a sweep on a cluster; start nothing."""
    from cluster.files.ray_up import load_cluster
    from tune.sweeps.plan import make_plan

    spec = read_sweep(location, overrides, own_workers=False)
    forecast = make_plan(spec, load_cluster(cluster), minutes_per_trial)
    lines = [*forecast.lines()]
    figures = ("trials", "ended", "usd_per_hour", "trial_s", "time_s", "usd")
    [short] = [line for line in lines if line.startswith("USD ")]
    output.result(
        "\n".join(lines), short, {name: getattr(forecast, name) for name in figures}
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    functions: dict[str, Callable[..., int]] = {
        "": sweep,
        "resume": extend,
        "extend": extend,
        "steer": steer,
        "report": report,
        "watch": watch,
        "plan": plan,
    }
    return run("python -m tune", __doc__, functions, argv, SweepConfig)


def _sweep(spec: SweepSpec, fresh: bool, checked: bool, output: Output) -> int:
    try:
        result = run_to_answer(spec, fresh, checked, True, output)
    except SweepInterrupted as interrupted:
        python = Path(sys.executable)
        if python.is_relative_to(Path.cwd()):
            python = python.relative_to(Path.cwd())
        command = spec.resume(str(python))
        words = f"interrupted: {interrupted.kept} trials are kept; go on with"
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
