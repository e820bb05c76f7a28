"""The taxonomy: every way that a run can end, and what Paceline does about each.

A status is what `result.json`, `results.parquet` and the terminal show. Its policy says how many restarts
a run gets by default when it ends that way, and what to tell the user.
"""

from __future__ import annotations

import difflib
import json
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args

Status = Literal[
    "done", "stopped", "out_of_memory", "out_of_host_memory", "diverged", "hung", "preempted", "node_lost", "error"
]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Policy:
    """What follows a status: `restarts` is the default budget (-1: no limit), `advice` the fix that the user reads."""

    restarts: int
    advice: str


POLICIES: dict[Status, Policy] = {
    "done": Policy(0, ""),
    "stopped": Policy(0, "run the same command again to go on from the newest checkpoint"),
    "out_of_memory": Policy(0, "set a smaller `microbatch_size`; the result of training stays the same"),
    "out_of_host_memory": Policy(1, "lower `data.num_workers`, or set `data.resident: false`"),
    "diverged": Policy(0, "lower `optimizer.lr`, set `clip_grad_norm`, or use precision bf16 instead of fp16"),
    "hung": Policy(3, "see the stacks of all ranks that were saved with the run"),
    "preempted": Policy(-1, "the run goes on where the cluster has room again"),
    "node_lost": Policy(-1, "the run goes on where the cluster has room again"),
    "error": Policy(0, "the traceback names the line in the task"),
}


MEND = "; mend "
"""What a message has that says itself what to do."""


def advice(error: PacelineError) -> str:
    """Return what the user may do about an error: its policy's advice, unless the message says it."""
    return "" if MEND in str(error) else POLICIES[error.status].advice


class PacelineError(Exception):
    """Base of all errors that Paceline raises; `status` is how the run ends."""

    status: Status = "error"
    exit_code = 1


class ConfigError(PacelineError, ValueError):
    """A value that the user gave cannot be used: names field, value, rule and fix in one sentence.

    `rule` is a predicate ("must be at least 1"); `value` is MISSING where there is none to show.
    """

    exit_code = 2

    def __init__(self, field: str, value: Any, rule: str, fix: str, source: str | None = None) -> None:
        super().__init__(field, value, rule, fix, source)
        self.field, self.value, self.rule, self.fix, self.source = field, value, rule, fix, source

    def __str__(self) -> str:
        where = f"{self.source}: " if self.source else ""
        shown = "" if self.value is MISSING else f"is {show(self.value)}, but "
        end = "" if self.fix.endswith("?") else "."
        return f"{where}`{self.field}` {shown}{self.rule}; {self.fix}{end}"

    def at(self, source: str) -> ConfigError:
        """The same error, said to come from `source`."""
        return ConfigError(self.field, self.value, self.rule, self.fix, source)


class ConfigErrors(ConfigError):  # noqa: N818 (several of them)
    """More than one of them at once, a line each."""

    def __init__(self, errors: list[ConfigError]) -> None:
        first = errors[0]
        super().__init__(first.field, first.value, first.rule, first.fix, first.source)
        self.errors = errors
        self.args = (errors,)  # what pickle builds it from

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


class StorageError(PacelineError):
    """Storage that cannot be read or written."""


class CheckpointError(PacelineError):
    """A checkpoint that is incomplete, damaged or of another program."""


class DeviceMismatchError(PacelineError):
    """Tensors of one computation lie on different devices; names those that are not where they belong."""


class DivergedError(PacelineError):
    """The loss became NaN or infinite."""

    status: Status = "diverged"


class PreemptedError(PacelineError):
    """A node of the run is about to be taken away, and a checkpoint is written: the group may leave."""

    status: Status = "preempted"


class TooLargeError(PacelineError):
    """A microbatch ran out of memory in mid-training; the next start takes a smaller one."""

    status: Status = "out_of_memory"

    def __init__(self, microbatch_size: int, words: str) -> None:
        super().__init__(microbatch_size, words)
        self.microbatch_size, self.words = microbatch_size, words

    def __str__(self) -> str:
        return f"a microbatch of {self.microbatch_size} ran out of memory in mid-training ({self.words})"


class RunFailedError(PacelineError):
    """A run that ended: the status, the worker's message, and when (Unix time) it failed.

    `smaller`: the next start takes a smaller microbatch, so it is worth more than a retry.
    """

    def __init__(
        self, status: Status, message: str, when: float = 0.0, config: bool = False, smaller: bool = False
    ) -> None:
        super().__init__(status, message, when, config, smaller)
        self.status, self.message, self.when, self.config, self.smaller = status, message, when, config, smaller
        self.exit_code = ConfigError.exit_code if config else PacelineError.exit_code

    @staticmethod
    def of(error: BaseException, rank: int) -> RunFailedError:
        """A worker's exception as plain data: crosses processes whatever the exception holds."""
        if isinstance(error, RunFailedError):
            return error
        if isinstance(error, ConfigError):
            return RunFailedError("error", str(error), time.time(), config=True)
        frames = traceback.extract_tb(error.__traceback__)
        at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        message = f"rank {rank}: {type(error).__name__}: {first_line(error) if str(error) else ''}{at}"
        return RunFailedError(classify(error), message, time.time(), smaller=isinstance(error, TooLargeError))

    @staticmethod
    def first(errors: list[RunFailedError]) -> RunFailedError:
        """The cause among the failures of several ranks: a lost worker, else the earliest; others follow from it.

        A rank that ran out of memory and knows a smaller microbatch explains whatever the others met.
        """
        smaller = [error for error in errors if error.smaller]
        lost = [error for error in errors if error.status in ("node_lost", "preempted", "hung")]
        return min(smaller or lost or errors, key=lambda error: error.when)

    def __str__(self) -> str:
        return self.message if self.config else f"the run ended as `{self.status}`: {self.message}"


class _Missing(Enum):
    MISSING = "no value"


MISSING = _Missing.MISSING


def show(value: Any) -> str:
    """A value as a user would have written it, cut to 160 characters."""
    text = f'"{value}"' if isinstance(value, str) else str(value)
    if isinstance(value, bool) or value is None:
        text = json.dumps(value)
    return text if len(text) <= 160 else text[:157] + "..."


def did_you_mean(name: object, known: Iterable[str], otherwise: str, shown: Callable[[str], str] = str) -> str:
    """Return the fix for a name that is not known: the nearest of the `known` as `shown`, else `otherwise`."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean `{shown(near[0])}`?" if near else otherwise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name where the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# torch 2.15's own words for a failed host allocation (c10/core/impl/alloc_cpu.cpp).
_HOST_ALLOCATION = ("DefaultCPUAllocator", "can't allocate memory", "Cannot allocate memory")


def classify(error: BaseException) -> Status:
    """The status that an exception ends a run with; needs neither torch nor Ray to be imported."""
    if isinstance(error, PacelineError):
        return error.status
    names = {cls.__name__ for cls in type(error).__mro__}
    if "OutOfMemoryError" in names and type(error).__module__.startswith("torch"):
        return "out_of_memory"
    failed_on_host = isinstance(error, RuntimeError) and any(words in str(error) for words in _HOST_ALLOCATION)
    if isinstance(error, MemoryError) or "OutOfMemoryError" in names or failed_on_host:
        return "out_of_host_memory"
    if getattr(error, "preempted", False):
        return "preempted"
    if names & {"ActorDiedError", "NodeDiedError", "ActorUnavailableError", "WorkerCrashedError"}:
        return "node_lost"
    return "error"


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, the cause where it is a traceback; its class's name where empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
