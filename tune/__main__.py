"""Sweep batch size, precision and any other key of a training run.

On a cluster of several nodes a sweep looks at their versions, clocks and storage first (`python -m cluster check`).

Exit codes: 0 the sweep has an answer, or fits; 1 no trial ended well, nodes are not in order, or the sweep was cut off
(how to resume is said); 2 a value on the command line or in the configuration cannot be used, or the sweep never fits
the cluster; 130 interrupted, and how to resume is said.
"""

import datetime as dt
import math
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from trainers.command_line import run
from trainers.errors import MISSING, ConfigError
from trainers.output import Output
from trainers.residents import join_cluster
from tune.config import SweepConfig
from tune.sweeps.client import RESIDENT, run_by_resident
from tune.sweeps.spec import SweepSpec, is_complete, read_saved, read_sweep
from tune.sweeps.sweep import SweepInterrupted, SweepResult, run_to_answer, saved_answer

_Sweep = Annotated[str, Field(title="SWEEP.yaml", description="a file or URI")]
_Directory = Annotated[str, Field(description="a sweep's directory or URI")]
_SWEEPS = "two or more sweeps' directories or URIs, the first to compare with"
_NoCheck = Annotated[bool, Field(description="do not look at the nodes first")]
_STORE = "where sweeps are kept (default: $PACELINE_STORAGE, else ./results)"
_FINAL = "how long the training with the winner takes; default: as a trial"
_SHARE = "price of spot machines as a share of on-demand; default: by the price table"
_REGIONS = "choose of these regions; may be repeated; default: all that the price table knows"
_SPEED = "how many times as fast as the cluster file's a GPU is"
_Speed = Annotated[str, Field(pattern=r"^[^=]+=[0-9]{0,6}\.?[0-9]{1,6}$")]
_WHAT_IF = "predict the measured configurations on such machines, as in 8xH100,4xA10G@25Gbit/50us,3xcpu"
_MEASURED = "with --what-if: a sweep whose trials tell of workers or devices, too; may be repeated"
_CLUSTER = "the file of the cluster it would run on; required without --what-if"
_MINUTES = "how long a trial takes; default: the mean of those that ended"


def sweep(
    location: _Sweep,
    overrides: dict[str, Any],
    output: Output,
    *,
    fresh: Annotated[bool, Field(description="start anew: delete what the sweep's directory holds")] = False,
    no_check: _NoCheck = False,
) -> int:
    """Sweep, or go on with the sweep in its directory; keys of the run are `--train.dotted.key value`."""
    return _sweep(read_sweep(location, overrides), fresh, not no_check, output)


def resume(directory: _Directory, output: Output, *, no_check: _NoCheck = False) -> int:
    """Go on with a sweep that was cut off."""
    return _sweep(read_saved(directory), False, not no_check, output)


def report(directory: _Directory, output: Output) -> int:
    """Write the report again from the journal; says where the sweep has not ended."""
    spec = read_saved(directory)
    if spec.config.search != "random" and not is_complete(spec):
        print(f"the sweep has not ended: `python -m tune resume {shlex.quote(spec.uri)}` goes on")
    return _show(saved_answer(spec), output)


def watch(
    directory: _Directory,
    *,
    port: Annotated[int, Field(ge=0, le=65535, description="of the loopback; 0: any free one")] = 0,
) -> int:
    """Serve the report of a sweep that runs, here or on another machine, or has yet to begin; Ctrl-C ends it."""
    from tune.views.watch import serve

    serve(directory, port)
    return 0


def compare(
    directories: Annotated[tuple[str, ...], Field(title="DIRECTORY DIRECTORY...", description=_SWEEPS)],
    *,
    html: Annotated[str | None, Field(title="FILE", description="write a page as well")] = None,
) -> int:
    """Put sweeps side by side: what differs, what changed in the answer, and by how much, with its noise."""
    from rich.console import Console

    from tune.views.compare import compare as compared
    from tune.views.compared import page, tables

    found = compared(directories)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    for shown in tables(found):
        console.print(shown)
    if html is not None:
        try:
            Path(html).write_text(page(found), encoding="utf-8")
        except OSError as error:
            rule = f"cannot be written ({error.strerror})"
            raise ConfigError("--html", html, rule, "name a file in a directory of yours") from error
        print(f"page: {html}")
    return 0


def knowledge(
    *,
    storage_path: Annotated[str | None, Field(title="URI", description=_STORE)] = None,
    explain: Annotated[str | None, Field(title="DIRECTORY", description="say what this sweep began with")] = None,
    delete: Annotated[tuple[str, ...], Field(title="ID", description="forget this sweep; may be repeated")] = (),
) -> int:
    """List what sweeps have found, say what a sweep took from that, or delete some of it."""
    from tune.views import known

    if explain is not None:
        lines = known.explained(explain)
    else:
        lines = known.delete(storage_path, delete) if delete else known.listed(storage_path)
    for line in lines:
        print(line)
    return 0


def plan(
    location: _Sweep,
    overrides: dict[str, Any],
    output: Output,
    *,
    cluster: Annotated[str | None, Field(title="CLUSTER.yaml", description=_CLUSTER)] = None,
    what_if: Annotated[str | None, Field(title="SHAPES", description=_WHAT_IF)] = None,
    measured: Annotated[tuple[str, ...], Field(title="DIRECTORY", description=_MEASURED)] = (),
    minutes_per_trial: Annotated[float | None, Field(gt=0, le=1e9, title="M", description=_MINUTES)] = None,
    deadline: Annotated[str | None, Field(title="TIME", description="choose the cheapest machines by then")] = None,
    budget: Annotated[float | None, Field(gt=0, le=1e12, title="USD", description="and for at most so much")] = None,
    final_minutes: Annotated[float | None, Field(gt=0, le=1e9, title="M", description=_FINAL)] = None,
    spot_share: Annotated[float | None, Field(gt=0, lt=1, title="X", description=_SHARE)] = None,
    region: Annotated[tuple[str, ...], Field(title="REGION", description=_REGIONS)] = (),
    spot_hours: Annotated[float, Field(gt=0, le=1e6, title="H", description="until spot machines go, mean")] = 2.0,
    gone_hours: Annotated[float, Field(gt=0, le=1e6, title="H", description="until they are back, mean")] = 1.0,
    speed: Annotated[tuple[_Speed, ...], Field(title="GPU=X", description=_SPEED)] = (),
    write: Annotated[str | None, Field(title="FILE", description="write the cluster file of the choice")] = None,
) -> int:
    """Say lanes, trials, hours and dollars of a sweep on a cluster, by a deadline the machines, or what its measured
    configurations would take on other machines; start nothing.
    """
    if what_if is not None:
        for option, given in {"--cluster": cluster, "--deadline": deadline}.items():
            if given is not None:
                raise ConfigError(option, given, "has no effect with --what-if", "remove it", "command line")
        return _predict(read_sweep(location, overrides, own_workers=False), what_if, measured, output)
    if measured:
        raise ConfigError("--measured", measured[0], "has no effect without --what-if", "remove it", "command line")
    if cluster is None:
        raise ConfigError("--cluster", MISSING, "is required", "write `--cluster CLUSTER.yaml`", "command line")
    from cluster.files.ray_up import load_cluster
    from tune.sweeps.plan import make_plan

    spec, file = read_sweep(location, overrides, own_workers=False), load_cluster(cluster)
    forecast = make_plan(spec, file, minutes_per_trial)
    if deadline is None:
        lines, figures = [*forecast.lines()], ("trials", "ended", "usd_per_hour", "trial_s", "time_s", "usd")
        output.result("\n".join(lines), lines[-1], {name: getattr(forecast, name) for name in figures})
        return 0
    from cluster.spot.availability import SpotRates
    from trainers.config.yaml import dump_yaml
    from tune.sweeps.chosen import cluster_yaml
    from tune.sweeps.deadline import Terms, plan_by_deadline

    terms = Terms(
        _moment(deadline),
        dt.datetime.now(dt.UTC),
        math.inf if budget is None else budget,
        None if final_minutes is None else final_minutes * 60,
        spot_share=spot_share,
        regions=region,
        rates=SpotRates(spot_hours * 3600, gone_hours * 3600),
        speeds={model: float(times) for model, _, times in (given.rpartition("=") for given in speed)},
    )
    found = plan_by_deadline(forecast, terms)
    lines, chance = [*found.lines()], found.best.probability(terms.budget_usd)
    record = {"choice": found.best.words, "usd": float(found.best.usd.mean()), "probability": chance}
    output.result("\n".join(lines), lines[1], record)
    if write is not None:
        Path(write).write_text(dump_yaml(cluster_yaml(file, found.best)), encoding="utf-8")
        print(f"cluster      {write}")
    return 0 if found.is_sure else 1


def _predict(spec: SweepSpec, what_if: str, measured: tuple[str, ...], output: Output) -> int:
    """Print what measured configurations would take on other machines; returns the exit code."""
    from tune.what_if import answer
    from tune.what_if.shapes import read_shapes
    from tune.what_if.shown import remarks, table

    found = answer.what_if(spec, read_shapes(what_if), measured)
    if not (output.quiet or output.as_json):
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table(spec, found))
    lines = [*remarks(spec, found)]
    shapes = [one.plain() for one in found.found]
    output.result("\n".join(lines), lines[0], {"predicted": shapes, "missing": dict(found.missing)})
    return 0 if found.found else 1


def _moment(text: str) -> dt.datetime:
    """Return a time of day with its date; without a zone it is this machine's."""
    try:
        return dt.datetime.fromisoformat(text).astimezone()
    except ValueError as error:
        raise ConfigError("--deadline", text, "is no time", "write for example 2026-12-01T18:00") from error


_by_resident: list[list[str]] = []
"""The arguments of the command, which the resident driver may run in place of this process."""


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == [RESIDENT]:
        from tune.sweeps.resident import serve

        serve(Path(arguments[1]), run_here)
        return 0
    join_cluster()
    _by_resident[:] = [arguments]
    return run_here(arguments)


def run_here(arguments: list[str]) -> int:
    """The command, in this process; returns its exit code."""
    functions: dict[str, Callable[..., int]] = {
        "": sweep,
        "resume": resume,
        "report": report,
        "watch": watch,
        "compare": compare,
        "knowledge": knowledge,
        "plan": plan,
    }
    return run("python -m tune", __doc__, functions, arguments, SweepConfig)


def _sweep(spec: SweepSpec, fresh: bool, checked: bool, output: Output) -> int:
    may_keep = spec.config.keep_lanes_s > 0 and spec.config.isolation == "warm"
    if _by_resident and may_keep and (code := run_by_resident(_by_resident[0], output.descriptor)) is not None:
        return code
    try:
        result = run_to_answer(spec, fresh, checked, True, output)
    except SweepInterrupted as interrupted:
        python = Path(sys.executable)
        if python.is_relative_to(Path.cwd()):
            python = python.relative_to(Path.cwd())
        command = f"{shlex.quote(str(python))} -m tune resume {shlex.quote(spec.uri)}"
        words = f"interrupted: {interrupted.kept} trials are kept; go on with"
        if not output.as_json:
            print(f"{words}\n    {command}", flush=True)
        return output.failed("interrupted", f"{words} {command}", 130)
    return _show(result, output)


def _show(result: SweepResult, output: Output) -> int:
    """Print the table, the sentence and where things are."""
    from rich.console import Console

    code = 0 if result.best_yaml is not None else 1
    lines = [result.answer.sentence]
    if result.best_yaml is not None:
        lines.append(f"best.yaml:   {result.best_yaml}   (python -m trainers ... trains it)")
    lines.append(f"report.html: {result.report}")
    if not (output.quiet or output.as_json):
        console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
        console.print(result.table())
    output.result(
        "\n".join(lines),
        lines[0],
        {
            "status": "done" if code == 0 else "error",
            "sentence": result.answer.sentence,
            "trials": Counter(record.status for record in result.records),
            "best": None if result.best is None else asdict(result.best),
            "best_yaml": result.best_yaml,
            "report": result.report,
            "uri": result.spec.uri,
        },
    )
    return code


if __name__ == "__main__":
    raise SystemExit(main())
