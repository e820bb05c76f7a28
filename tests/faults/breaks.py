"""Deliberately broken builds: patches by module, of which each check of the oracle must notice its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _skip_a_batch(module: Any) -> None:
    """After a resume the samples are those of the step after."""
    resume = module.Checkpointing.resume

    def skipped(self: Any) -> Any:
        stream_state = resume(self)
        if self.attempt.step:
            self.attempt.parts.sampler.seed += 1
        return stream_state

    module.Checkpointing.resume = skipped


def _lose_weights(module: Any) -> None:
    """A resume forgets a little of the model."""
    resume = module.Checkpointing.resume

    def forgetful(self: Any) -> Any:
        stream_state = resume(self)
        if self.attempt.step:
            next(self.attempt.parts.model.parameters()).data[0, 0] += 1e-12
        return stream_state

    module.Checkpointing.resume = forgetful


def _resume_older(module: Any) -> None:
    """A resume takes the oldest checkpoint in place of the newest."""
    names = module.Archive.names
    module.Archive.names = lambda self: names(self)[:1]


def _drop_a_record(module: Any) -> None:
    """The journal loses the record of a trial."""
    append = module.Journal.append

    def dropped(self: Any, record: Any) -> None:
        if record.config.get("task_args.trial") != 1:
            append(self, record)

    module.Journal.append = dropped


def _forget_records(module: Any) -> None:
    """A resumed sweep does not see what has ended."""
    module.Journal.find = lambda self, trial: None


def _exit_zero(module: Any) -> None:
    """Whatever went wrong, the command says that it is well."""
    run = module.run

    def well(*args: Any, **kwargs: Any) -> int:
        run(*args, **kwargs)
        return 0

    module.run = well


def _say_nothing(module: Any) -> None:
    """A failed command has no sentence."""
    module.complain = lambda *args: None


def _say_something_else(module: Any) -> None:
    """A failed command names another cause."""
    complain = module.complain
    module.complain = lambda *args: complain("something went wrong")


def _show_a_traceback(module: Any) -> None:
    """A traceback of ours on standard error."""
    complain = module.complain

    def shown(*args: Any) -> None:
        print("Traceback (most recent call last):\n  ...", file=sys.stderr)
        complain(*args)

    module.complain = shown


def _leave_a_process(module: Any) -> None:
    """A helper outlives the command."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)


def _leave_a_file(module: Any) -> None:
    """A temporary file outlives the command."""
    (Path(os.environ["TMPDIR"]) / f"paceline-{os.getpid()}").touch()


def _hang_at_the_end(module: Any) -> None:
    """The command does not end."""
    finish = module.finish

    def endless(status: Any, attempt: Any, *args: Any) -> Any:
        finish(status, attempt, *args)
        attempt.watchdog.close()
        time.sleep(600)

    module.finish = endless


def _claim_to_be_done(module: Any) -> None:
    """A run that was stopped says that it is done."""
    finish = module.finish
    module.finish = lambda status, *args: finish("done", *args)


def _take_any_lease(module: Any) -> None:
    """A second start takes over from a live run."""
    module._Lease._may_take = lambda self, found: True


BREAKS: dict[str, dict[str, Callable[[Any], None]]] = {
    "samples": {"trainers.loop.checkpointing": _skip_a_batch},
    "weights": {"trainers.loop.checkpointing": _lose_weights},
    "redone": {"trainers.checkpoint.store": _resume_older},
    "trials": {"tune.trials.journal": _drop_a_record},
    "trials again": {"tune.trials.journal": _forget_records},
    "exit code": {"trainers.command_line": _exit_zero},
    "exit code beside": {"trainers.lease": _take_any_lease},
    "one sentence": {"trainers.command_line": _say_nothing},
    "cause": {"trainers.command_line": _say_something_else},
    "traceback": {"trainers.command_line": _show_a_traceback},
    "left": {"trainers.loop.training": _leave_a_process},
    "left files": {"trainers.loop.training": _leave_a_file},
    "hang": {"trainers.loop.training": _hang_at_the_end},
    "status": {"trainers.loop.training": _claim_to_be_done},
}
"""By the check that must notice it (and a word where there are two)."""
