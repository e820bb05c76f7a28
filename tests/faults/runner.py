"""Runs a case: the command with its faults, what is left of it, and the
documented recovery.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.faults import s3
from tests.faults.cases import Case
from tests.faults.hook import SECOND, Found, processes
from tests.faults.oracle import (
    Ended,
    Leftovers,
    Observed,
    Reference,
    first_new,
    read_metrics,
    read_records,
    read_samples,
    read_weights,
    violations,
)
from tests.faults.scenarios import REPOSITORY, Scenario

GRACE_S = 15.0
"""Within so many seconds of a command's end all of its processes are gone; the
next starts at once, beside them.
"""
GIVE_UP_S = 8.0
"""A command whose own process was stopped is killed after so long, as its user
would.
"""
_BASE_S = 90.0
_TIMES = 6.0
_DISK_BYTES = 48 << 20
_LOOK_S = 0.1
_MAX_AGAIN = 2
_MAX_REFUSED = 12
_AGAIN_S = 2.0


@dataclass(frozen=True)
class Row:
    """What came of a case; a line of the campaign's journal."""

    case: str
    fault: str
    scenario: str
    detail: str
    landed: bool
    held: bool
    violations: list[str]
    codes: list[int | None]
    recovery_s: float | None
    """From the fault to the next new step."""
    wall_s: float
    attempts: int = 1

    def line(self) -> str:
        """As the terminal shows it."""
        verdict = (
            "held" if self.held else "BROKEN" if self.landed else "not landed"
        )
        recovery = (
            f"{self.recovery_s:5.1f} s"
            if self.recovery_s is not None
            else "      -"
        )
        words = "".join(f"\n      {one[:600]}" for one in self.violations)
        return f"{self.case:>7} {verdict:10} {recovery} {self.wall_s:5.0f} s  {self.scenario:11} {self.detail}{words}"


def budget_s(reference: Reference) -> float:
    """How long a command may take before it counts as hung."""
    return _BASE_S + _TIMES * reference.wall_s


def run_case(case: Case, workspace: Path) -> Row:
    """Run a case to its end."""
    reference = find_reference(case.scenario, workspace)
    limit_s = budget_s(reference)
    began = time.monotonic()
    with _directory(case) as (directory, storage):
        command = case.scenario.command(directory, storage)
        beside = []
        first = _run(
            case,
            directory,
            command,
            1,
            limit_s,
            _during(case, directory, command, limit_s, beside),
        )
        landed = [
            _read(directory / f"landed-{index}")
            for index in range(len(case.faults))
        ]
        detail = "; ".join(
            f"{fault.name} at {fault.event} {fault.number}"
            for fault in case.faults
        )
        if None in landed:
            wall_s = time.monotonic() - began
            codes = [first.code]
            why = [path.read_text() for path in directory.glob("missed-*")] + [
                f"the command ended with {first.code}"
            ]
            return Row(
                case.name,
                case.title,
                case.scenario.name,
                detail,
                False,
                False,
                why,
                codes,
                None,
                wall_s,
            )
        ends = [first]
        (directory / "armed").unlink()
        (directory / "runs" / "ballast").unlink(missing_ok=True)
        again = refused = 0
        while (
            not _complete(case, directory, ends)
            and again < _MAX_AGAIN
            and ends[-1].code is not None
        ):
            end = _run(case, directory, command, len(ends) + 1, limit_s)
            if (
                end.code == 2 and refused < _MAX_REFUSED
            ):  # what is left of the first may still hold the run, and say so
                refused += 1
                time.sleep(_AGAIN_S)
                continue
            again += 1
            ends.append(end)
        for end in ends:
            end.left.await_end()
        facts = [one for one in landed if one is not None]
        found = violations(
            Observed(
                case,
                directory,
                reference,
                facts,
                ends,
                beside[0] if beside else None,
            )
        )
        since = first.ended if len(ends) > 1 else facts[0]["when"]
        new = first_new(directory, facts[0], since)
        recovery_s = None if new is None else new - facts[0]["when"]
        if found and os.environ.get("PACELINE_FAULTS_KEEP"):
            kept = workspace / "broken" / case.name
            shutil.copytree(
                directory,
                kept,
                dirs_exist_ok=True,
                ignore_dangling_symlinks=True,
                ignore=_no_sockets,
            )
    wall_s = time.monotonic() - began
    codes = [end.code for end in ends]
    return Row(
        case.name,
        case.title,
        case.scenario.name,
        detail,
        True,
        not found,
        found,
        codes,
        recovery_s,
        wall_s,
    )


def find_reference(scenario: Scenario, workspace: Path) -> Reference:
    """The unbroken run of a scenario: computed once for each state of the code."""
    file = (
        workspace
        / "references"
        / f"{scenario.name.replace(' ', '-')}-{_digest()}.pt"
    )
    if not file.exists():
        case = Case("reference", scenario, ())
        with _directory(case) as (directory, storage):
            end = _run(
                case, directory, scenario.command(directory, storage), 1, 900
            )
            if end.code != 0:
                raise RuntimeError(
                    f"{scenario.name} fails without a fault: {end.code}\n{end.out}\n{end.err}"
                )
            samples = {
                key: indices
                for process in read_samples(directory)
                for key, indices in process.items()
            }
            weights = (
                read_weights(directory, scenario)
                if scenario.kind == "run"
                else {}
            )
            assert weights is not None
            wall_s = end.ended - end.began
            found = Reference(
                samples, weights, read_metrics(directory, scenario), wall_s
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        torch.save(asdict(found), aside)
        aside.replace(file)
    return Reference(**torch.load(file, weights_only=True))


def _complete(case: Case, directory: Path, ends: list[Ended]) -> bool:
    """Whether nothing is left to be done: the last command says that it is done."""
    if ends[-1].code != 0:
        return False
    if case.scenario.kind != "run":  # a sweep that has an answer is over
        return True
    result = _read(directory / "runs" / "run" / "result.json")
    # `stopped` is to be gone on with; whatever else says 0 has to stand by it.
    return result is None or result.get("status") != "stopped"


def _run(
    case: Case,
    directory: Path,
    command: list[str],
    number: int,
    limit_s: float,
    during: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> Ended:
    """Run a command to its end, and look what is left of it."""
    (directory / "root").unlink(missing_ok=True)
    began = time.monotonic()
    with (
        (directory / f"out-{number}").open("wb") as out,
        (directory / f"err-{number}").open("wb") as err,
    ):
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=case.scenario.environment(directory),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    code = None
    while (
        code := process.poll()
    ) is None and time.monotonic() < began + limit_s:
        if during is not None:
            during(process)
        time.sleep(_LOOK_S)
    ended = time.monotonic()
    _end(process)
    left = Leftovers(
        _alive(case, directory), GRACE_S if code is not None else 0.0
    )
    if code is None:
        left.await_end()
    if case.scenario.on_s3:
        s3.fetch(
            yaml.safe_load(Path(command[-1]).read_text())["storage_path"],
            directory / "runs",
        )
    texts = [
        (directory / f"{name}-{number}").read_text(errors="replace")
        for name in ("out", "err")
    ]
    return Ended(
        code,
        *texts,
        began,
        ended,
        left,
        read_records(directory, case.scenario),
    )


def _alive(case: Case, directory: Path) -> list[Found]:
    own = os.getpid()
    return [
        one
        for one in processes(directory, case.scenario.root)
        if one.pid != own
    ]


def _end(process: subprocess.Popen[bytes]):
    if process.poll() is None:
        process.kill()
    process.wait()


def _during(
    case: Case,
    directory: Path,
    first: list[str],
    limit_s: float,
    beside: list[Ended],
) -> Callable[[subprocess.Popen[bytes]], None] | None:
    """What the runner itself does when a fault lands: gives up on a stopped
    command, or starts a second one.
    """
    stops = any(
        one.detail == "SIGSTOP" and one.target == case.scenario.root
        for one in case.faults
    )
    starts = next(
        (one for one in case.faults if one.act in ("start", "fresh")), None
    )
    if not stops and starts is None:
        return None

    def act(process: subprocess.Popen[bytes]):
        landed = _read(directory / "landed-0")
        if landed is None:
            return
        if stops and time.monotonic() > landed["when"] + GIVE_UP_S:
            process.kill()
        if starts is not None and not beside:
            command = [*first, *["--fresh"] * (starts.act == "fresh")]
            began = time.monotonic()
            environment = case.scenario.environment(directory) | {SECOND: "1"}
            done = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            with suppress(subprocess.TimeoutExpired):
                done.wait(limit_s)
            code = done.poll()
            _end(done)
            (directory / "beside-ended").touch()
            beside.append(
                Ended(
                    code,
                    *done.communicate(),
                    began,
                    time.monotonic(),
                    Leftovers([], 0.0),
                )
            )

    return act


@contextmanager
def _directory(case: Case) -> Iterator[tuple[Path, str]]:
    """A new directory for a case, with its plan; short, since Ray's sockets
    lie below it.

    Nothing of it is left.
    """
    directory = Path(tempfile.mkdtemp(prefix="plf-", dir="/tmp"))
    runs = directory / "runs"
    mounted = False
    try:
        for name in ("samples", "tmp", "r", "runs"):
            (directory / name).mkdir()
        if any(fault.act == "fill" for fault in case.faults):
            size = f"size={_DISK_BYTES}"
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(runs)],
                capture_output=True,
            )
            mounted = done.returncode == 0
            if not mounted:
                raise Unavailable(
                    "a full disk needs a small filesystem, and mounting one needs root"
                )
        plan = {
            "faults": [asdict(fault) for fault in case.faults],
            "root": case.scenario.root,
        }
        (directory / "plan.json").write_text(json.dumps(plan))
        (directory / "armed").touch()
        if case.scenario.on_s3 and not s3.installed():
            raise Unavailable(
                "there is no S3 server: pip install 'moto[server]'"
            )
        if not case.scenario.on_s3:
            yield directory, str(runs)
            return
        with s3.bucket(s3.of_case(directory, case.faults)) as (_, uri, _):
            yield directory, uri
    finally:
        Leftovers(_alive(case, directory), 0.0).await_end()
        if mounted:
            subprocess.run(["umount", "--lazy", str(runs)], check=True)
        shutil.rmtree(directory, ignore_errors=True)


class Unavailable(Exception):  # noqa: N818 (a reason, not an error)
    """This machine cannot do this to a process."""


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _digest() -> str:
    """Names the state of the code that a reference depends on."""
    found = hashlib.sha256(sys.version.encode())
    for package in ("trainers", "tune", "cluster", "tests/faults"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _no_sockets(directory: str, names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if not (Path(directory) / name).is_file()
        and not (Path(directory) / name).is_dir()
    ]
