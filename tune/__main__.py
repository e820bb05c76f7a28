"""Sweep batch size, precision and any other key of a training run.

Run as:
    python -m tune SWEEP.yaml [--fresh] [--no-check] [--dotted.key value ...] [--train.dotted.key value ...]
    python -m tune resume DIRECTORY [--no-check]      go on with a sweep that was cut off
    python -m tune report DIRECTORY      write the report again from the journal
    python -m tune plan SWEEP.yaml --cluster CLUSTER.yaml [--minutes_per_trial M] [--dotted.key value ...]
                                         lanes, trials, hours and dollars on that cluster; starts nothing
On a cluster of several nodes a sweep looks at their versions, clocks and storage first (`python -m cluster check`);
--no-check leaves that out.
Exit code 0: the sweep has an answer, or fits; 1: no trial ended well, or nodes are not in order; 2: a value in the
configuration cannot be used, or the sweep never fits the cluster; 130: interrupted, and how to resume is said.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainers.config.overrides import parse_overrides
from trainers.config.reference import reference
from trainers.errors import PacelineError
from trainers.launch.imports import without_collection
from tune.config import SweepConfig
from tune.sweep.spec import SweepSpec, is_complete, prepare, read_saved, read_sweep

if TYPE_CHECKING:
    from tune.trials.record import TrialRecord


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    args, checked = [arg for arg in given if arg != "--no-check"], "--no-check" not in given
    if not args or args[0] in ("-h", "--help"):
        print(__doc__, reference(SweepConfig), sep="\n")
        return 0 if args else 2
    try:
        if args[0] in ("resume", "report"):
            if len(args) != 2:
                print(f"error: `{args[0]}` takes one directory", file=sys.stderr)
                return 2
            spec = read_saved(args[1])
            return _report(spec) if args[0] == "report" else _sweep(spec, False, checked)
        if args[0] == "plan":
            return _plan(args[1:])
        overrides = parse_overrides([arg for arg in args[1:] if arg != "--fresh"])
        return _sweep(read_sweep(args[0], overrides), "--fresh" in args, checked)
    except PacelineError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _plan(args: list[str]) -> int:
    from tune.sweep.plan import make_plan, parse_options

    if not args or args[0].startswith("--"):
        print("error: `plan` takes a sweep file first", file=sys.stderr)
        return 2
    file, minutes, overrides = parse_options(parse_overrides(args[1:]))
    spec = read_sweep(args[0], overrides, own_workers=False)
    from cluster.files.ray_up import load_cluster

    for line in make_plan(spec, load_cluster(file), minutes).lines():
        print(line)
    return 0


def _sweep(spec: SweepSpec, fresh: bool, checked: bool) -> int:
    from trainers.launch.local import setup_logging

    setup_logging(0)
    before = prepare(spec, fresh)
    if is_complete(spec):
        print(f"{spec.uri} is complete already (--fresh starts it anew)")
        return _report(spec)
    if before:
        print(f"{spec.uri} holds {before} trials that have ended: only the others run")
    with without_collection(own_process=True):
        from tune.sweep.progress import Interrupted
        from tune.sweep.run import disconnect, environment, run_sweep

    try:
        records = run_sweep(spec, checked)
        versions = environment()
    except (Interrupted, KeyboardInterrupt):
        disconnect()
        print(
            f"interrupted: {prepare(spec, False)} trials are kept; go on with\n    {_resume_command(spec)}", flush=True
        )
        return 130
    disconnect()
    return _answer(spec, records, versions)


def _resume_command(spec: SweepSpec) -> str:
    """As the user would type it."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return f"{shlex.quote(str(python))} -m tune resume {shlex.quote(spec.uri)}"


def _report(spec: SweepSpec) -> int:
    import json

    from tune.trials.journal import Journal

    summary = json.loads(spec.storage.read("summary.json")) if spec.storage.exists("summary.json") else {}
    return _answer(spec, Journal(spec.storage).records(), summary.get("environment", {}))


def _answer(spec: SweepSpec, records: list[TrialRecord], environment: dict[str, str]) -> int:
    """Write the report, and print the table, the sentence and where things are."""
    from rich.console import Console

    from tune.report.table import table
    from tune.report.write import write_report

    answer = write_report(
        spec.storage, spec.config, spec.train, records, environment, task_dir=spec.path[0] if spec.path else None
    )
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(table(spec.config, records, answer))
    print(answer.sentence)
    if answer.best is not None:
        print(f"best.yaml:   {spec.storage.locate('best.yaml')}   (python -m trainers ... trains it)")
    print(f"report.html: {spec.storage.locate('report.html')}")
    return 0 if answer.best is not None else 1


if __name__ == "__main__":
    raise SystemExit(main())
