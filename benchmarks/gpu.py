"""Run the GPU tests and benchmarks in parts; each call runs some that are left.

Run as: python -m benchmarks.gpu [--minutes 7.5] [--again PART] [--small]
[--keep]

A call runs the parts that have no result yet for this card and this commit, as
many as fit into `--minutes`. After each part, the call rewrites a page. The page
says which tests and thresholds held, which did not (with the line to look at),
and what was not tested. With `--keep`, the page is in benchmarks/results.
Without a GPU, or with `--small`, the parts run in miniature. docs/gpu.md lists
the packages that they need.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.measure import KEPT
from tests import fake_cuda
from trainers.versions import environment

REPOSITORY = Path(__file__).parents[1]
STATE = REPOSITORY / "build" / "gpu"
_TAIL = 40  # lines of a benchmark's output that the page shows
_GRACE_S = 30.0
"""How long a part that has exceeded its time may take to write its results and end."""
_VERDICT = re.compile(r"^(held|MISSED): (.+)$", re.MULTILINE)
"""A verdict, as `benchmarks.measure.verdict` prints it."""
_PASSED = re.compile(r"PASSED (\S+::\S+)|(\S+::\S+) PASSED")
"""A passed test, as pytest prints it, with xdist or without."""
_LOOK_AT = re.compile(r"^(\S+\.py:\d+): \S", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """One process, which runs tests or a benchmark."""

    name: str
    arguments: tuple[str, ...]
    minutes: float
    """The part's time limit. A part begins only if the call has that much time left."""

    @property
    def is_test(self) -> bool:
        """Whether the part runs tests; pytest then writes a verdict for each of them."""
        return self.arguments[0] == "pytest"

    def wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """Return the process's exit code, or None if it exceeds the part's time limit."""
        try:
            return process.wait(self.minutes * 60)
        except subprocess.TimeoutExpired:
            return None


_TESTS = ("pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider")
_SPOILS = "tests/gpu/test_failed_capture_gpu.py"
"""Tests that may break their own process, and the processes beside it."""

PARTS = [
    Part("tests", (*_TESTS, "-n", "8", f"--ignore={_SPOILS}", "tests/gpu"), 3),
    Part("peers", ("benchmarks.peers", "--minutes", "3.5"), 4),
    Part("starts", ("benchmarks.starts",), 2),
    Part("sweep", ("benchmarks.starts", "--sweep"), 3),
    Part(
        "ladder",
        ("benchmarks.ladder", "--seconds", "5", "--minutes", "4.5"),
        5,
    ),
    Part("failed_capture", (*_TESTS, _SPOILS), 1),
]
"""The parts, in the order in which they run: the most informative ones come first."""


@dataclass
class Outcome:
    """What is known about a part that has run."""

    seconds: float
    held: list[str] = field(default_factory=list)
    broken: list[tuple[str, str, str]] = field(default_factory=list)
    """For each test or threshold that did not hold: name, message, line to look at."""
    unseen: list[tuple[str, str]] = field(default_factory=list)
    """For each test that was skipped: name and reason."""
    output: str = ""


def read_junit(text: str, seconds: float) -> Outcome:
    """Return pytest's verdicts, read from its XML report."""
    outcome = Outcome(seconds)
    for case in ET.fromstring(text).iter("testcase"):  # noqa: S314 (our own file)
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        bad = (
            case.find("failure")
            if case.find("failure") is not None
            else case.find("error")
        )
        skipped = case.find("skipped")
        if bad is not None:
            places = _LOOK_AT.findall(bad.text or "")
            said = (bad.get("message") or "").strip().splitlines() or [
                "no words"
            ]
            outcome.broken.append(
                (name, said[0][:300], places[-1] if places else name)
            )
        elif skipped is not None:
            outcome.unseen.append(
                (name, (skipped.get("message") or "").strip())
            )
        else:
            outcome.held.append(name)
    return outcome


def execute(part: Part, directory: Path, small: bool = False) -> Outcome:
    """Run a part to its end, or until its time limit."""
    junit = directory / f"{part.name}.xml"
    junit.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        *part.arguments,
        *([f"--junitxml={junit}"] if part.is_test else ["--small"] * small),
    ]
    print(f"\n== {' '.join(command[1:])}", flush=True)
    began = time.monotonic()
    log = directory / f"{part.name}.log"
    # A shell lets background processes ignore interrupts, and a part would
    # inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        signal.signal(signal.SIGINT, before)
        try:
            code = part.wait(process)
        finally:
            text = log.read_text(errors="replace")
            _end(process)
    seconds = time.monotonic() - began
    where = str(log.relative_to(REPOSITORY))
    output = "\n".join(text.splitlines()[-_TAIL:])
    outcome = Outcome(seconds)
    if junit.exists():
        outcome = read_junit(junit.read_text(), seconds)
    if code is None:
        # In pytest's report, an interrupted test looks like one that passed.
        passed = {"".join(names) for names in _PASSED.findall(text)}
        outcome.held = [name for name in outcome.held if name in passed]
    for word, words in _VERDICT.findall(text):
        if word == "held":
            outcome.held.append(words)
        else:
            outcome.broken.append((part.name, words, where))
    how = ""
    if code is None:
        how = f"it did not end within {part.minutes:g} minutes"
    elif code and not (part.is_test and outcome.broken):
        how = f"it ended with exit code {code}"
    if how:
        last = (output.splitlines() or ["it said nothing"])[-1]
        outcome.broken.append((part.name, f"{how}: {last}", where))
    outcome.output = "" if part.is_test and not outcome.broken else output
    return outcome


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part's process, if it still runs, and all that it has started.

    The process is interrupted first, so that pytest can write its report.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def page(
    about: dict[str, str],
    found: dict[str, Outcome],
    parts: Sequence[Part] = PARTS,
) -> str:
    """Return the page: everything that is known so far, as Markdown."""
    lines = [f"# What {about.get('gpu', 'the CPU, in miniature')} showed", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += [
        "",
        "| part | held | did not | not seen | s |",
        "|---|---|---|---|---|",
    ]
    for part in parts:
        one = found.get(part.name)
        cells = (
            [
                len(one.held),
                len(one.broken),
                len(one.unseen),
                f"{one.seconds:.0f}",
            ]
            if one
            else ["not run yet", *[""] * 3]
        )
        lines.append(f"| {part.name} | {' | '.join(map(str, cells))} |")
    ran = [found[part.name] for part in parts if part.name in found]
    lines += ["", "## Did not hold", ""]
    lines += [
        f"- `{name}`: {said} (look at {where})"
        for one in ran
        for name, said, where in one.broken
    ] or ["Nothing."]
    reasons = Counter(reason for one in ran for _, reason in one.unseen)
    lines += ["", "## Not seen", ""]
    lines += [
        f"- {count} tests: {reason}" for reason, count in reasons.most_common()
    ] or ["Nothing."]
    for part in parts:
        if part.name in found and found[part.name].output:
            lines += [
                "",
                f"## {part.name}",
                "",
                "```text",
                found[part.name].output,
                "```",
            ]
    return "\n".join(lines) + "\n"


def main(
    argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS
) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, default=7.5, help="limit of this call"
    )
    parser.add_argument(
        "--again",
        action="append",
        default=[],
        metavar="PART",
        choices=[part.name for part in parts],
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="benchmarks in miniature, as on a CPU",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="write the page to benchmarks/results",
    )
    given = parser.parse_args(argv)
    began = time.monotonic()
    about = _about()
    card = re.sub(r"\W+", "-", about.get("gpu", "cpu")).lower()
    if given.small:
        card += "-small"
        about["size"] = "in miniature"
    directory = STATE / f"{card}-{about.get('git_commit', 'no-commit')[:12]}"
    directory.mkdir(parents=True, exist_ok=True)
    found = {
        part.name: kept
        for part in parts
        if part.name not in given.again and (kept := _kept(directory, part))
    }
    late = []
    path = directory / "page.md"
    if given.keep:
        KEPT.mkdir(parents=True, exist_ok=True)
        path = KEPT / f"gpu-{time.strftime('%Y-%m-%d')}-{card}.md"
    for part in parts:
        if part.name in found:
            continue
        if time.monotonic() - began + part.minutes * 60 > given.minutes * 60:
            late.append(part.name)
            continue
        found[part.name] = execute(part, directory, given.small)
        (directory / f"{part.name}.json").write_text(
            json.dumps(asdict(found[part.name]), indent=2) + "\n"
        )
        path.write_text(page(about, found, parts))
    text = page(about, found, parts)
    path.write_text(text)
    print(f"\n{text}\nkept in {path}")
    if late:
        print(
            f"left for the next call: {', '.join(late)} (the longest takes {max(p.minutes for p in parts):g} minutes)"
        )
    return 1 if any(one.broken for one in found.values()) else 0


def _about() -> dict[str, str]:
    """Return what the page says about the machine and the versions, by name."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = environment(device)
    if fake_cuda.IS_ON:
        about["gpu"] = "the fake CUDA"
    elif device.type == "cuda":
        query = [
            "nvidia-smi",
            "--query-gpu=driver_version",
            "--format=csv,noheader",
        ]
        try:
            about["driver"] = subprocess.run(
                query, capture_output=True, text=True, check=True
            ).stdout.split("\n")[0]
        except (OSError, subprocess.CalledProcessError):
            about["driver"] = "unknown"
    return about


def _kept(directory: Path, part: Part) -> Outcome | None:
    file = directory / f"{part.name}.json"
    if not file.exists():
        return None
    kept = Outcome(**json.loads(file.read_text()))
    kept.broken = [(name, said, where) for name, said, where in kept.broken]
    kept.unseen = [(name, reason) for name, reason in kept.unseen]
    return kept


if __name__ == "__main__":
    raise SystemExit(main())
