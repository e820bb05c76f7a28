"""A sweep from its start to its answer, for the command and `from tune import sweep`."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainers.errors import counted, redact
from trainers.launch.from_python import Given, check_thread, plain, read_given
from trainers.launch.process import without_collection
from trainers.lease import InUseError, held
from trainers.output import Output
from trainers.tracking.delivery import followed
from trainers.tracking.sinks import check_trackers
from tune.sweeps.spec import (
    SAVED,
    Interrupted,
    SweepSpec,
    is_complete,
    prepare,
    read_saved,
    sweep_with,
)
from tune.sweeps.steer import (
    apply_extension,
    content,
    kept_sweep,
    order_extension,
)
from tune.trials.journal import Journal, write_state
from tune.trials.record import TrialRecord
from tune.trials.steering import Actions

if TYPE_CHECKING:
    from rich.table import Table

    from tune.report.answer import Answer

logger = logging.getLogger(__name__)


class SweepInterrupted(KeyboardInterrupt):
    """Raised by Ctrl-C, a notebook's interrupt or SIGTERM; ended trials are kept."""

    def __init__(self, kept: int) -> None:
        super().__init__(
            f"{counted(kept, 'trial')} kept; the same call continues"
        )
        self.kept = kept


@dataclass(frozen=True, repr=False)
class SweepResult:
    """A sweep's trials and its answer."""

    spec: SweepSpec
    records: list[TrialRecord]
    """All trials, including those that failed."""
    answer: Answer
    """The answer, with `line`, `doubts`, `ranking` and more."""

    @property
    def best(self) -> TrialRecord | None:
        """The best trial, with `config` and `metrics`; None if none ended well."""
        return self.answer.best

    @property
    def best_yaml(self) -> str | None:
        """The file that trains with the best configuration: `train(result.best_yaml)`.

        None if no trial ended well.
        """
        return self.spec.storage.locate("best.yaml") if self.best else None

    @property
    def report(self) -> str:
        """The location of the page with figures."""
        return self.spec.storage.locate("report.html")

    def table(self, width: int | None = None) -> Table:
        """Return the table that the command prints, for rich; at most `width` wide."""
        from tune.report.table import table

        return table(self.spec.config, self.records, self.answer, width)

    def __repr__(self) -> str:
        return redact(f"{self.answer.text}\n  report {self.report}")

    def _repr_html_(self) -> str:
        from rich.text import Text

        from tune.report.table import as_html

        return as_html(self.table(), Text(repr(self)))


def sweep(
    train: Given,
    space: Mapping[str, Any],
    objective: str | Mapping[str, Any] = "val_loss",
    *,
    fresh: bool = False,
    check: bool = True,
    **keys: Any,
) -> SweepResult:
    """Sweep a training run, or continue the sweep in its directory, as `python -m tune`.

    Args:
        train: The run to vary: its file (a path or URI), a mapping of its
            keys, a Task class (also one of a notebook), or a training function
            for Ray Train.
        space: Dotted keys of the run and their values: a list, or a range such
            as `{"loguniform": [1e-4, 1e-2]}`.
        objective: What decides which trial is best: a metric, or a mapping
            with `metric`, `mode` and `target`.
        fresh: Start over: delete what the sweep's directory holds.
        check: Check the nodes of a cluster first.
        keys: Further keys of the sweep (`name="lr"`, `search="random"`,
            `budget={"trials": 20}`), and of the run (`**{"train.epochs": 3}`).

    Returns:
        The trials and the answer.

    Raises:
        SweepInterrupted: A subclass of KeyboardInterrupt; the same call
            continues the sweep.
        ConfigError: A value cannot be used.
        ClusterError: The check of the nodes found errors.
        PacelineError: The sweep was cut off.
    """
    check_thread("sweep()")
    places: list[Path] = []
    objective = (
        {"metric": objective} if isinstance(objective, str) else objective
    )
    tree = plain({"space": space, "objective": objective}, "sweep()", places)
    overrides = plain(keys, "sweep()", places)
    directory: Path | None = Path.cwd()
    if isinstance(train, str | os.PathLike):
        file = os.fspath(train)
        tree["train"] = file if "://" in file else str(Path.cwd() / file)
    else:
        tree["train"], _, directory = read_given(train, "sweep()")
    spec = sweep_with(
        tree, "sweep()", places[0] if places else directory, overrides
    )
    return run_to_answer(spec, fresh, check)


def extend(
    directory: str | os.PathLike[str], *, check: bool = True, **keys: Any
) -> SweepResult:
    """Continue a sweep, optionally with other keys: `python -m tune DIRECTORY`.

    Ended trials are not trained again. Trials that an extension makes longer
    continue from their last checkpoints, if they have any.

    Args:
        directory: The sweep's directory, a path or URI.
        check: Check the nodes of a cluster first.
        keys: Keys of the sweep (`space={"global_batch_size": [16, 32]}` sets
            those keys of the space that it names), and of the run
            (`**{"train.epochs": 10}`).

    Returns:
        The trials and the answer.

    Raises:
        InUseError: A subclass of ConfigError: the sweep is running, and
            continues with the keys once its trials have ended.
        PacelineError: As for `sweep`.
    """
    check_thread("extend()")
    overrides = plain(keys, "extend()", [])
    overrides |= {
        f"space.{key}": values
        for key, values in overrides.pop("space", {}).items()
    }
    return run_to_answer(
        order_extension(os.fspath(directory), overrides), False, check
    )


def run_to_answer(
    spec: SweepSpec,
    fresh: bool,
    checked: bool,
    is_command: bool = False,
    output: Output | None = None,
) -> SweepResult:
    """Run all trials without a record, write the report, and run any extension.

    Args:
        spec: The sweep; if it was read from its directory, its changes are
            applied as an extension.
        fresh: Whether to delete what the directory holds.
        checked: Whether to check the nodes first.
        is_command: Whether the process does nothing else. If not, its Ray
            connection, its log and its garbage collection stay as they are.
        output: How to report to the user.
    """
    output = output or Output()
    result = _run_held(spec, fresh, checked, is_command, output)
    # Run the extension of a user who found the lease still held after this
    # process had looked for extensions.
    while (extended := pending_extension(result.spec)) is not None:
        try:
            result = _run_held(extended, False, checked, is_command, output)
        except InUseError:  # another process has started the extended sweep
            break
    return result


def _run_held(
    spec: SweepSpec,
    fresh: bool,
    checked: bool,
    is_command: bool,
    output: Output,
) -> SweepResult:
    """Run the sweep and write its report while holding the directory's lease."""
    from trainers.launch.process import shown_log

    check_trackers(spec.trackers, spec.path, spec.source)
    with ExitStack() as stack:
        stack.enter_context(shown_log(0, is_command, output.quiet))
        token = stack.enter_context(held(spec.storage, SAVED))
        num_before = (
            apply_extension(spec) if spec.is_kept else prepare(spec, fresh)
        )
        spec = replace(spec, token=token)
        state: Literal["ended", "cut off"] = "cut off"
        stack.callback(lambda: write_state(spec.storage, state))
        has_ended = is_complete(spec)
        if not has_ended:
            # An earlier start's trials and lanes are no longer there.
            write_state(spec.storage, "running")
        stack.enter_context(
            followed(
                "tune.sweeps.tracking",
                spec.storage,
                token,
                spec.trackers,
                spec.path,
                f"`{spec.resume()}`",
                has_ended=has_ended,
            )
        )
        if has_ended:
            anew = "--fresh" if is_command else "fresh=True"
            logger.info(
                "%s is complete already (%s starts it over)", spec.uri, anew
            )
            result = saved_answer(spec)
        else:
            if num_before:
                logger.info(
                    "%s already holds %s that ended: only the remaining trials run",
                    spec.uri,
                    counted(num_before, "trial"),
                )
            try:
                result = _run_to_end(spec, checked, is_command, output)
            except (Interrupted, KeyboardInterrupt):
                kept = len(Journal(spec.storage).names())
                raise SweepInterrupted(kept) from None
        state = "ended"
        return result


def _run_to_end(
    spec: SweepSpec, checked: bool, is_command: bool, output: Output
) -> SweepResult:
    """Run the sweep, including extensions that are added while it runs.

    To save time, imports run while Ray starts, and the report is written while
    Ray shuts down.
    """
    with without_collection(own_process=is_command):
        from trainers.on_ray.cluster import connect, leaving
    with ThreadPoolExecutor(1, initializer=_block_sigterm) as beside:
        with leaving(), closing(spec.zygote()) as zygote:
            imported = beside.submit(import_module, "tune.sweeps._run")
            beside.submit(import_module, "ray.train.torch")
            with without_collection(own_process=is_command):
                connect(False, {"sweep": redact(spec.uri)})
                imported.result()
                from tune.sweeps._run import environment, run_sweep
            records = run_sweep(spec, checked, output, zygote)
            extended = pending_extension(spec)
            while extended is not None:
                spec = extended
                apply_extension(spec)
                if is_complete(spec):
                    records = Journal(spec.storage).records()
                else:
                    records = run_sweep(spec, checked, output)
                extended = pending_extension(spec)
            answer = beside.submit(_answer, spec, records, environment())
        return answer.result()


def pending_extension(spec: SweepSpec) -> SweepSpec | None:
    """Return the sweep as users have extended it, or None if nothing is pending."""
    if not Actions(spec.storage).read().extension:
        return None
    following = replace(read_saved(spec.uri), token=spec.token)
    # A sweep that was begun again from its file has that file's budget and
    # lanes, also if the saved sweep was extended by others before.
    known = (content(spec), content(kept_sweep(spec.uri)))
    return None if content(following) in known else following


def _block_sigterm() -> None:
    """Leave SIGTERM to the main thread, which defers it while Ray shuts down."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def saved_answer(spec: SweepSpec) -> SweepResult:
    """Write the report again from the journal."""
    from tune.report.write import read_environment

    return _answer(
        spec, Journal(spec.storage).records(), read_environment(spec.storage)
    )


def _answer(
    spec: SweepSpec, records: list[TrialRecord], environment: dict[str, str]
) -> SweepResult:
    from tune.report.write import write_report

    task_dir = spec.path[0] if spec.path else None
    answer = write_report(
        spec.storage,
        spec.config,
        spec.train,
        records,
        environment,
        task_dir=task_dir,
    )
    return SweepResult(replace(spec, token=""), records, answer)
