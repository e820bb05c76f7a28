"""How a run can end, what Paceline does about each ending, and the error classes.

A status is what `result.json`, `results.parquet` and the terminal show. Its
policy says how many restarts a run gets by default when it ends that way, and
what to tell the user. Text from elsewhere is shown and saved without secrets,
and with control characters escaped.

Environment read: the values of all variables whose names mark secrets
(RAY_AUTH_TOKEN, AWS_SECRET_ACCESS_KEY, ...).
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

Status = Literal[
    "done",
    "stopped",
    "out_of_memory",
    "out_of_host_memory",
    "diverged",
    "hung",
    "preempted",
    "node_lost",
    "error",
]
STATUSES: tuple[Status, ...] = get_args(Status)
_AGAIN = "run the same command again to resume from the newest checkpoint"
_DISK_FULL = (
    "No space left on device",
    "Disk quota exceeded",
    "Local disk is full",
    "the disk is full",
)
FIX = "; fix "
"""Part of messages that already say what to do, so that no advice is added."""
_HIDDEN = "***"
# A password may contain anything, even an unquoted `@` or `/`: it ends at the
# last `@` of the word.
_USER = re.compile(
    r"(://)[^\s/?#:'\"]{0,300}:[^\s'\"]{0,300}@|(\bhttps?://)[^\s/?#'\"@]{1,300}@",
    re.IGNORECASE,
)
_NAMED = re.compile(
    r"""((?:secret|password|passwd|signature|credentials?|authorization
    |(?:access|account|api|auth|private|secret)[_-]?key|(?:access|api|auth|refresh|security|session)[_-]?token
    |(?<![\w/-])(?:token|sig|pwd))
    ['"]?\s{0,9}[=:]\s{0,9}(?:(?:bearer|basic)\s)?)
    (?:"[^"\n]{0,999}"|'[^'\n]{0,999}'|[^\s'"&,;)}\]]+)""",
    re.IGNORECASE | re.VERBOSE,
)
SECRET_NAME = r"(?:KEY|KEY_ID|SECRET|TOKEN|PASSWORD|PASSWD)"  # noqa: S105 (no secret)
"""How the name of a secret variable ends, in small letters or capitals."""
_VARIABLE = re.compile(rf"{SECRET_NAME}$", re.IGNORECASE)
# A secret variable's value is hidden if it has at least so many characters:
# shorter values also occur in harmless words.
_SHORTEST = 8
_MOVING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_MOST_NAMED = 4  # how many parameters a sentence names


@dataclass(frozen=True)
class Policy:
    """What follows from a status: restarts by default (-1: no limit), and advice."""

    restarts: int
    advice: str


POLICIES: dict[Status, Policy] = {
    "done": Policy(0, ""),
    "stopped": Policy(0, _AGAIN),
    "out_of_memory": Policy(
        0,
        "set a smaller `microbatch_size`; the result of training stays the same",
    ),
    "out_of_host_memory": Policy(
        1, "lower `data.num_workers`, or set `data.resident: false`"
    ),
    "diverged": Policy(
        0,
        "lower `optimizer.lr`, set `clip_grad_norm`, or use precision bf16 instead of fp16",
    ),
    "hung": Policy(
        3,
        "see the stacks of all ranks in hangs/ of the run's directory, or raise the time limit named here",
    ),
    "preempted": Policy(-1, _AGAIN),
    "node_lost": Policy(-1, _AGAIN),
    "error": Policy(0, "the traceback names the line in the task"),
}


class PacelineError(Exception):
    """Base class of Paceline's errors; `status` is how the run ends."""

    status: Status = "error"
    exit_code = 1

    def __str__(self) -> str:
        return redact(super().__str__())

    @property
    def advice(self) -> str:
        """What the user can do about the error; empty if the message already says that."""
        if disk_is_full(self):
            return f"free space there or raise the quota, then {_AGAIN}"
        if self.status == "error":
            return ""
        return POLICIES[self.status].advice


class ConfigError(PacelineError, ValueError):
    """A user's value that cannot be used: field, value, rule and fix.

    `rule` is a predicate ("must be at least 1"), since the message reads
    "`field: value` rule; fix."; `value` is MISSING if there is none to show.
    """

    exit_code = 2

    def __init__(
        self,
        field: str,
        value: Any,
        rule: str,
        fix: str,
        source: str | None = None,
    ) -> None:
        super().__init__(field, value, rule, fix, source)
        self.field = field
        self.value = value
        self.rule = rule
        self.fix = fix
        self.source = source

    def __str__(self) -> str:
        where = f"{_cut(self.source, 1000)}: " if self.source else ""
        named = _cut(self.field)
        if self.value is not MISSING:
            separator = "=" if self.field.startswith("--") else ": "
            named += separator + show(self.value)
        end = "" if self.fix.endswith("?") else "."
        return printable(
            f"{where}`{named}` {_cut(self.rule, 1000)}; {_cut(self.fix, 1000)}{end}"
        )

    def at(self, source: str) -> ConfigError:
        """Return the same error with `source` as its origin."""
        return ConfigError(self.field, self.value, self.rule, self.fix, source)


class ConfigErrors(ConfigError):  # noqa: N818 (several of them)
    """Several ConfigErrors, shown one per line."""

    def __init__(self, errors: list[ConfigError]) -> None:
        super().__init__(*errors[0].args)
        self.errors = errors
        self.args = (errors,)  # pickle rebuilds the error from these

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


class StorageError(PacelineError):
    """Storage that cannot be read or written."""


class LeaseError(StorageError):
    """This process has lost the lease of a directory, and may no longer write there."""


class CheckpointError(PacelineError):
    """Data from storage is incomplete, damaged, or from another program or run."""


class ClusterError(PacelineError):
    """A Ray cluster that could not be started, joined, or trained on."""


class DivergedError(PacelineError):
    """The loss became NaN or infinite."""

    status: Status = "diverged"


class PreemptedError(PacelineError):
    """A node is about to be taken away.

    A checkpoint has been written, and this rank stops training.
    """

    status: Status = "preempted"


class TooLargeError(PacelineError):
    """A microbatch ran out of memory in training; the next start uses a smaller one."""

    status: Status = "out_of_memory"

    def __init__(self, microbatch_size: int, words: str) -> None:
        super().__init__(microbatch_size, words)
        self.microbatch_size = microbatch_size
        self.words = words

    def __str__(self) -> str:
        return redact(
            f"a microbatch of {self.microbatch_size} ran out of memory in mid-training ({self.words})"
        )


class RunFailedError(PacelineError):
    """A run that failed: status, message, and when (Unix time).

    `smaller` means that the next start uses a smaller microbatch, so a restart
    is not a mere retry. `follows` means that the failure looks like a
    consequence of another rank's failure (a broken collective, an endless
    wait).
    """

    def __init__(
        self,
        status: Status,
        message: str,
        when: float = 0.0,
        config: bool = False,
        smaller: bool = False,
        follows: bool = False,
    ) -> None:
        message = redact(message)
        super().__init__(status, message, when, config, smaller, follows)
        self.status = status
        self.message = message
        self.when = when
        self.config = config
        self.smaller = smaller
        self.follows = follows
        if config:
            self.exit_code = ConfigError.exit_code

    @staticmethod
    def first(errors: Sequence[RunFailedError]) -> RunFailedError:
        """Return the root cause among the failures of several ranks.

        A rank that ran out of memory and can use a smaller microbatch explains
        all other failures; next come ranks that died or hung, then ranks that
        raised an exception, and last the consequences of another rank's
        failure. For a hang, the message combines the messages of all ranks
        that hung or were ended.
        """
        cause = min(errors, key=lambda error: (error._distance, error.when))
        if cause.status != "hung":
            return cause
        words: dict[str, None] = {}
        for error in sorted(errors, key=lambda error: error._distance):
            was_ended = error.follows and error.status == "node_lost"
            if error.status == "hung" or was_ended:
                words[error.message] = None
        message = "; ".join(words)
        return RunFailedError(
            "hung", message, cause.when, follows=cause.follows
        )

    @property
    def _distance(self) -> int:
        """How far this kind of failure is likely to be from the root cause."""
        if self.smaller:
            return 0
        if self.follows:
            return {"hung": 3, "node_lost": 4}.get(self.status, 5)
        died = ("node_lost", "preempted", "hung", "out_of_host_memory")
        return 1 if self.status in died else 2

    @property
    def advice(self) -> str:
        """What the user can do about the failure."""
        if self.follows and self.status == "error":
            return "the rank that failed first says why; if none does, check the network between the nodes"
        if FIX in str(self):
            return ""
        return super().advice or POLICIES[self.status].advice

    def __str__(self) -> str:
        if self.config:
            return self.message
        return f"the run ended as `{self.status}`: {self.message}"


class _Missing(Enum):
    MISSING = "no value"


MISSING = _Missing.MISSING


def show(value: Any) -> str:
    """Return a value as a user would write it, cut to 160 characters."""
    text = f'"{value}"' if isinstance(value, str) else str(value)
    if isinstance(value, bool) or value is None:
        text = json.dumps(value)
    return _cut(redact(text[:10_000]))


def _cut(text: str, longest: int = 160) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."


def printable(text: str) -> str:
    """Return text as one line without secrets, with control characters escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in redact(text)
    )


def counted(number: float, noun: str, form: str = "") -> str:
    """Return a number with its noun: "1 epoch", "2.5 epochs"; `form` formats it."""
    shown = f"{number:{form}}"
    return f"{shown} {noun}{'s' * (shown != '1')}"


def in_digits(value: float) -> str:
    """Return a metric with 4 decimals; if tiny or huge, with 4 significant digits."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}"
    return f"{value:.4f}"


def did_you_mean(
    name: object,
    known: Iterable[str],
    otherwise: str,
    shown: Callable[[str], str] = str,
) -> str:
    """Return the fix for an unknown name: a similar known one, or `otherwise`."""
    near = nearest(str(name), known)
    return otherwise if near is None else f"did you mean `{shown(near)}`?"


def nearest(
    name: str, known: Iterable[str], cutoff: float = 0.6
) -> str | None:
    """Return the known name that is most similar to `name`; None if none is similar.

    Upper and lower case, and `-` and `_`, are treated as equal.
    """
    by_plain = {_plain(word): word for word in known}
    near = difflib.get_close_matches(
        _plain(name), by_plain, n=1, cutoff=cutoff
    )
    return by_plain[near[0]] if near else None


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; if empty, the error's type.

    If the first line ends in a colon, the second line is appended.
    """
    first, *rest = _lines(error)
    if first.endswith(":") and rest:
        first = f"{first} {rest[0].strip()}"
    return printable(first)


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message; if empty, the error's type."""
    return redact(_lines(error)[-1].strip())


def _lines(error: BaseException) -> list[str]:
    return str(error).strip().splitlines() or [type(error).__name__]


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and the exceptions that caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        context = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or context


def disk_is_full(error: BaseException) -> bool:
    """Whether an exception was caused by a full disk or an exceeded quota."""
    return any(
        getattr(link, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        or any(words in str(link) for words in _DISK_FULL)
        for link in chain(error)
    )


def shorten(names: Sequence[str]) -> str:
    """Return the first few names, as text for a message."""
    more = ""
    if len(names) > _MOST_NAMED:
        more = f" and {len(names) - _MOST_NAMED} more"
    return ", ".join(f"`{name}`" for name in names[:_MOST_NAMED]) + more


def redact(text: str) -> str:
    """Return `text` without secrets and with control characters escaped.

    Secrets are passwords in URIs, values named as secrets, and values of
    secret variables of the environment.
    """
    for value in sorted(_environment_secrets(), key=len, reverse=True):
        text = text.replace(value, _HIDDEN)
    text = _NAMED.sub(rf"\1{_HIDDEN}", _USER.sub(rf"\1\2{_HIDDEN}@", text))
    return escape_controls(text)


def escape_controls(text: str) -> str:
    """Return `text` with control characters escaped as in Python strings."""
    return _MOVING.sub(
        lambda found: found[0].encode("unicode_escape").decode(), text
    )


def holds_secret(uri: str) -> bool:
    """Return whether a URI has a password, or a parameter named like a secret."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # not a URI; opening it will report that
        return False
    return bool(parts.password) or redact(parts.query) != parts.query


def _environment_secrets() -> set[str]:
    names = [name for name in list(os.environ) if _VARIABLE.search(name)]
    # Another thread may remove a variable meanwhile, as when a cluster ends.
    found = [os.environ.get(name, "") for name in names]
    return {value for value in found if len(value) >= _SHORTEST}
