"""What must be true after a fault: each check returns what is wrong, in words;
no words, and the case has held.

It reads what is on storage by itself (JSON, torch.load), and takes nothing
from the product but its word.
"""

import contextlib
import json
import os
import pickle
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.faults.cases import Case
from tests.faults.hook import Found
from tests.faults.scenarios import INTERVAL, TRIALS, Scenario

ORPHAN_S = 5.0
"""Workers end within so many seconds of their driver."""
_TRACEBACK = "Traceback (most recent call last)"
# torchrun's agent ends in a traceback of its own, whatever its workers say.
_AGENTS = re.compile(
    rf"{re.escape(_TRACEBACK)}:?\n(?:(?!{re.escape(_TRACEBACK)}).)*?\n(?:torch\.distributed\.elastic\S*|KeyboardInterrupt)",
    re.DOTALL,
)
Samples = dict[tuple[int, int, int], list[int]]
"""Indices by trial, step and rank."""


class Leftovers:
    """The processes that outlive their command by more than `grace_s`; they
    are killed then.
    """

    def __init__(self, alive: Sequence[Found], grace_s: float):
        self._alive = alive
        self._grace_s = grace_s
        self.found = []
        self._thread = threading.Thread(target=self._watch, name="leftovers")
        self._thread.start()

    def await_end(self):
        """Return when none of them is there any more."""
        self._thread.join()

    def _watch(self):
        deadline = time.monotonic() + self._grace_s
        while (
            left := [one for one in self._alive if one.is_alive()]
        ) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.found = left
        for one in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        while (
            any(one.is_alive() for one in left)
            and time.monotonic() < deadline + 10
        ):
            time.sleep(0.1)


@dataclass(frozen=True)
class Ended:
    """A command that has ended, or was ended when its budget was used up."""

    code: int | None
    """None: it hung."""
    out: str
    err: str
    began: float
    ended: float
    left: Leftovers
    records: dict[str, str] = field(default_factory=dict)
    """The journal of a sweep at that moment."""

    @property
    def sentences(self) -> list[str]:
        """What it says went wrong."""
        return [
            line
            for line in self.err.splitlines()
            if line.startswith("error: ")
        ]


@dataclass(frozen=True)
class Reference:
    """The unbroken run."""

    samples: Samples
    weights: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of each trial of a sweep, by its configuration."""
    wall_s: float = 0.0


@dataclass(frozen=True)
class Observed:
    """A case that is over."""

    case: Case
    directory: Path
    reference: Reference
    landed: list[dict[str, Any]]
    ends: list[Ended]
    """The first command's, and those of the recovery."""
    beside: Ended | None = None
    """A second start while the first one ran."""


def violations(seen: Observed) -> list[str]:
    """Everything that is wrong, each with the name of its check."""
    return [
        f"{name}: {words}"
        for name, check in CHECKS.items()
        for words in check(seen)
    ]


def no_hang(seen: Observed) -> Iterator[str]:
    """Every command ended within its budget."""
    for number, end in enumerate(seen.ends):
        if end.code is None:
            yield f"command {number + 1} did not end within {end.ended - end.began:.0f} s"


def right_code(seen: Observed) -> Iterator[str]:
    """The exit codes are the documented ones, and the recovery ends well."""
    first, *later = seen.ends
    if first.code is not None and first.code not in seen.case.expected.codes:
        yield f"exit code {first.code}, not one of {sorted(seen.case.expected.codes)}"
    if later and later[-1].code not in (0, None):
        yield f"the same command again ended with {later[-1].code}: {_tail(later[-1])}"
    if seen.beside is not None and seen.beside.code in (0, None):
        yield f"a second start beside the first ended with {seen.beside.code}"


def one_sentence(seen: Observed) -> Iterator[str]:
    """A command that failed says so in one sentence on standard error; under
    torchrun each of its workers.
    """
    most = (
        seen.case.scenario.world
        if seen.case.scenario.root == "torchrun"
        else 1
    )
    for end in [*seen.ends, *([seen.beside] if seen.beside else [])]:
        many = end.code == 2  # a configuration may have several mistakes
        if (
            end.code is None
            or end.code <= 0
            or end.code in (130, 143)
            or _is_agents(seen, end)
        ):
            continue
        if not end.sentences or (len(end.sentences) > most and not many):
            yield f"{len(end.sentences)} sentences on standard error: {_tail(end)}"


def no_traceback(seen: Observed) -> Iterator[str]:
    """No traceback but that of the user's own exception."""
    for number, end in enumerate(seen.ends):
        if number == 0 and seen.case.expected.traceback:
            continue
        text = f"{end.out}\n{end.err}"
        if seen.case.scenario.root == "torchrun":
            text = _AGENTS.sub("", text)
        if _TRACEBACK in text:
            at = text.index(_TRACEBACK)
            yield f"command {number + 1} shows a traceback: ...{text[at:][:600]}"


def true_cause(seen: Observed) -> Iterator[str]:
    """A command that failed names the cause."""
    first = seen.ends[0]
    words = seen.case.expected.words
    if (
        not words
        or first.code is None
        or first.code <= 0
        or first.code in (130, 143)
    ):
        return
    said = "\n".join(first.sentences)
    if seen.case.scenario.root == "torchrun":
        said = first.out + first.err
    if not re.search(words, said):
        yield f"nothing says {words!r}: {said or _tail(first)}"


def right_status(seen: Observed) -> Iterator[str]:
    """What says that it is done is done; the run ends as done."""
    if seen.case.scenario.kind != "run":
        return
    file = seen.directory / "runs" / "run" / "result.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    if (result.get("status"), result.get("steps")) != (
        "done",
        seen.case.scenario.steps,
    ):
        yield f"result.json says {result.get('status')} after {result.get('steps')} steps"
    bad = {
        key: value
        for key, value in result.items()
        if key.endswith("_time_s") and not 0 <= value < 86400
    }
    if bad:
        yield f"impossible times: {bad}"


def equal_weights(seen: Observed) -> Iterator[str]:
    """The weights are those of the unbroken run, to the bit."""
    if seen.case.scenario.kind != "run":
        return
    found = read_weights(seen.directory, seen.case.scenario)
    if found is None:
        yield f"there are no weights of step {seen.case.scenario.steps}"
        return
    for name, value in seen.reference.weights.items():
        theirs = found.get(name)
        if theirs is None or theirs.shape != value.shape:
            yield f"{name} is not there"
        elif seen.case.expected.close:
            if not torch.allclose(theirs, value, rtol=1e-6, atol=1e-8):
                yield f"{name} differs by {float((theirs - value).abs().max()):.2g}"
        elif not torch.equal(theirs, value):
            yield f"{name} differs by {float((theirs - value).abs().max()):.2g}"


def exact_samples(seen: Observed) -> Iterator[str]:
    """Every step was trained on its samples, whoever trained it."""
    done = set()
    for process in read_samples(seen.directory):
        last = next(reversed(process), None)
        for key, indices in process.items():
            wanted = seen.reference.samples.get(key)
            # What a kill cut off in mid-step is the beginning of it.
            if indices == wanted:
                done.add(key)
            elif (
                wanted is None
                or indices != wanted[: len(indices)]
                or key != last
            ):
                yield f"trial {key[0]} step {key[1]} rank {key[2]} trained {indices}, not {wanted}"
                return
    lost = set(seen.reference.samples) - done
    if seen.case.scenario.kind == "run" and lost:
        yield f"{len(lost)} steps were never trained, the first {min(lost)}"


def little_redone(seen: Observed) -> Iterator[str]:
    """At most a checkpoint's interval is done again, for each fault."""
    expected = seen.case.expected
    scenario = seen.case.scenario
    if scenario.kind != "run" or not expected.redo:
        return
    times = defaultdict(int)
    for process in read_samples(seen.directory):
        for key in process:
            times[key] += 1
    again = sum(count - 1 for key, count in times.items() if key[2] == 0)
    most = INTERVAL * len(seen.case.faults) * (2 if len(seen.ends) > 2 else 1)
    if again > most:
        yield f"{again} steps were done again, at most {most} may be"


def trials_kept(seen: Observed) -> Iterator[str]:
    """No finished trial is lost, changed or run again, and each ends as in the
    unbroken sweep.
    """
    scenario = seen.case.scenario
    expected = seen.case.expected
    if scenario.kind == "run":
        return
    last = seen.ends[-1].records
    for end in seen.ends[:-1]:
        for name, text in end.records.items():
            if expected.redo and last.get(name) != text:
                yield f"the record {name} is {'lost' if name not in last else 'another'}"
    records = {
        _config_of(json.loads(text)): json.loads(text)
        for text in last.values()
    }
    if len(last) != TRIALS:
        yield f"{len(last)} of {TRIALS} trials have a record"
    ended = {
        json.loads(text)["config"].get("task_args.trial"): end
        for end in seen.ends[:1]
        for text in end.records.values()
    }
    if expected.redo:
        again = {
            key[0]
            for process in read_samples(
                seen.directory, after=seen.ends[0].ended
            )
            for key in process
            if key[0] in ended
        }
        if again:
            yield f"trials {sorted(again)} had ended, and ran again"
    odd = {
        name: one for name, one in records.items() if one["status"] != "done"
    }
    for name, one in odd.items():
        if one["status"] not in expected.statuses:
            yield f"trial {name} is {one['status']} ({one.get('message', '')})"
        elif expected.words and not re.search(
            expected.words, f"{one.get('message')}{one.get('traceback')}"
        ):
            yield f"trial {name} does not say {expected.words!r}: {one.get('message')}"
    if len(odd) > len(seen.case.faults):
        yield f"{len(odd)} trials did not end well after {len(seen.case.faults)} faults"
    for name, metrics in seen.reference.metrics.items():
        found = records.get(name, {"status": "lost", "metrics": {}})
        if (
            found["status"] == "done"
            and comparable(found["metrics"]) != metrics
            and not expected.close
        ):
            yield f"trial {name} ended at {comparable(found['metrics'])}, not {metrics}"


def nothing_left(seen: Observed) -> Iterator[str]:
    """No process outlives its command, and no file its run."""
    for number, end in enumerate(seen.ends):
        if left := end.left.found:
            counts = ", ".join(
                sorted({f"{one.role} ({one.command[:60]})" for one in left})
            )
            yield f"command {number + 1} left {len(left)} processes: {counts}"
        late = last_step(seen.directory, end)
        if late > ORPHAN_S:
            yield f"workers of command {number + 1} trained on for {late:.1f} s after it"
    # Where a driver is killed after its workers have ended, nobody is left to
    # clear up.
    root = seen.case.scenario.root
    deadly = ("SIGKILL", "SIGSTOP")
    is_left = any(
        fault.target == root and fault.detail in deadly
        for fault in seen.case.faults
    )
    files = [path.name for path in (seen.directory / "tmp").glob("paceline*")]
    files = [
        name
        for name in files
        if not (is_left and name.startswith("paceline-spawn-"))
    ]
    files += [
        str(path.relative_to(seen.directory))
        for path in (seen.directory / "runs").rglob("*.tmp")
    ]
    if files:
        yield f"files were left: {', '.join(sorted(files)[:5])}"


CHECKS = {
    "hang": no_hang,
    "exit code": right_code,
    "one sentence": one_sentence,
    "traceback": no_traceback,
    "cause": true_cause,
    "status": right_status,
    "weights": equal_weights,
    "samples": exact_samples,
    "redone": little_redone,
    "trials": trials_kept,
    "left": nothing_left,
}


def read_weights(
    directory: Path, scenario: Scenario
) -> dict[str, Tensor] | None:
    """The model of the last step, as the files on storage have it."""
    file = (
        directory
        / "runs"
        / "run"
        / "checkpoints"
        / f"step-{scenario.steps:012d}"
        / "state.pt"
    )
    try:
        model = torch.load(file, map_location="cpu", weights_only=True)[
            "model"
        ]
    except (
        EOFError,
        OSError,
        RuntimeError,
        pickle.UnpicklingError,
    ):  # it was cut off
        return None
    return model


def read_samples(directory: Path, after: float = 0.0) -> list[Samples]:
    """What each process trained; a line that a kill cut off is left out.

    A trial that a process ran twice is two.
    """
    found = []
    for file in sorted((directory / "samples").iterdir()):
        current = {}
        before = (-1, -1)
        for text in file.read_text().split("\n")[:-1]:
            line = json.loads(text)
            at = (line["trial"], line["step"])
            twice = set(line["indices"]) & set(
                current.get((*at, line["rank"]), ())
            )
            if at[0] == before[0] and (at[1] < before[1] or twice):
                found.append(current)
                current = {}
            before = at
            if line["when"] >= after:
                current.setdefault((*at, line["rank"]), []).extend(
                    line["indices"]
                )
        found.append(current)
    return found


def read_records(directory: Path, scenario: Scenario) -> dict[str, str]:
    """The journal of a sweep, as it is on storage."""
    if scenario.kind == "run":
        return {}
    where = directory / "runs" / "run" / "trials"
    return {
        path.name: path.read_text() for path in sorted(where.glob("*.json"))
    }


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    """What two runs of a trial have in common."""
    return {
        name: value
        for name, value in metrics.items()
        if name in ("val_loss", "val_accuracy", "train_loss")
    }


def read_metrics(
    directory: Path, scenario: Scenario
) -> dict[str, dict[str, float]]:
    """The figures of each trial by its configuration."""
    found = [
        json.loads(text) for text in read_records(directory, scenario).values()
    ]
    return {_config_of(one): comparable(one["metrics"]) for one in found}


def last_step(directory: Path, end: Ended) -> float:
    """For how long processes of a command trained on after its end, s."""
    times = [0.0]
    for file in (directory / "samples").iterdir():
        whens = [
            json.loads(text)["when"]
            for text in file.read_text().split("\n")[:-1]
        ]
        if whens and end.began <= whens[0] < end.ended:
            times.append(whens[-1] - end.ended)
    return max(times)


def first_new(
    directory: Path, landed: dict[str, Any], since: float
) -> float | None:
    """When the first step began that nobody had begun before, and that is not
    the one amid which the fault came; of the trial that it has hit.

    After a recovery, which began at `since`, by a process of its own.
    """
    last = 0
    new = []
    for file in (directory / "samples").iterdir():
        lines = [
            json.loads(text) for text in file.read_text().split("\n")[:-1]
        ]
        is_old = bool(lines) and lines[0]["when"] <= since != landed["when"]
        for line in lines:
            if line["trial"] != landed["trial"]:
                continue
            if is_old or line["when"] <= since:
                last = max(last, line["step"])
            else:
                new.append((line["when"], line["step"]))
    return min((when for when, step in new if step > last + 1), default=None)


def _config_of(record: dict[str, Any]) -> str:
    return json.dumps(record["config"], sort_keys=True)


def _is_agents(seen: Observed, end: Ended) -> bool:
    """Whether torchrun's own agent is all that can speak: it was sent a
    signal, or every worker was killed.
    """
    killed = [
        fault
        for fault in seen.case.faults
        if fault.target == "worker" and fault.detail == "SIGKILL"
    ]
    if seen.case.scenario.root != "torchrun":
        return False
    return (
        "SignalException" in end.err or len(killed) == seen.case.scenario.world
    )


def _tail(end: Ended) -> str:
    lines = [
        line
        for line in (end.out + "\n" + end.err).splitlines()
        if line.strip()
    ]
    return " | ".join(lines[-3:])[-400:]
