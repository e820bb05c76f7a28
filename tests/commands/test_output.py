"""What a command shows: a live line on a terminal, plain lines in a pipe,
little with --quiet, records with --json.
"""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.specs import BASE, REPOSITORY, read_json
from tests.tasks import Blobs
from tests.waits import until
from trainers.config.yaml import dump_yaml

DRAWN = re.compile(r"run  step \d+/\d+ \(\d+%\)  ETA \d+:\d\d:\d\d  ")
REDRAWN = re.compile("\r\x1b\\[2K(?:\x1b\\[1A\x1b\\[2K)*")
SHOW = "\x1b[?25h"
HIDE = "\x1b[?25l"


class Talking(Blobs):
    """Prints in every evaluation, and fails there where it is told to; finds
    its files from the command's directory, by Ray as without it.
    """

    def __init__(self, fails=False, seen=None):
        super().__init__(pause_s=0.02)
        self.fails = fails
        self.seen = seen

    def setup(self):
        assert Path("tests/commands/test_output.py").is_file(), Path.cwd()

    def on_evaluate(self, figures, step):
        print(f"own words at step {step}: " + "x" * 150)
        print(f"own warning at step {step}", file=sys.stderr)
        if self.seen:
            until(Path(self.seen).exists, "what has been printed")
        if self.fails:
            raise ValueError("the user's own")


def write(directory, **changes):
    task = {
        "task": "tests.commands.test_output:Talking",
        "max_steps": 60,
        "evaluate": {"every_steps": 20},
    }
    tree = {
        **BASE,
        **task,
        "device": "cpu",
        "storage_path": str(directory / "runs"),
        **changes,
    }
    (directory / "train.yaml").write_text(dump_yaml(tree))
    return str(directory / "train.yaml")


@dataclass(frozen=True)
class Seen:
    """What came to a terminal."""

    code: int
    text: str

    @property
    def lines(self):
        """What stays on the screen, or has been scrolled away, row by row."""
        rows = [""]
        for piece in re.split(
            "(\r\x1b\\[2K|\x1b\\[1A|\x1b\\[2K|\r\n|\n|\r)", self.text
        ):
            if piece == "\x1b[1A":
                rows.pop()
            elif "\x1b[2K" in piece:
                rows[-1] = ""
            elif "\n" in piece:
                rows.append("")
            elif piece != "\r":
                rows[-1] += piece
        return rows


def on_terminal(*args, number=None, at="", hear=str, **environment):
    """Run `python ARGS` on a terminal of its own; send it a signal once it has
    said `at`. `hear` is called with all that it has said.
    """
    settings = {
        key: one
        for key, one in os.environ.items()
        if key not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")
    }
    settings |= {"TERM": "xterm-256color", "PYTHONPATH": str(REPOSITORY)}
    settings |= environment
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(REPOSITORY)
        os.execve(sys.executable, [sys.executable, *args], settings)  # noqa: S606 (the shell is what it replaces)
    fcntl.ioctl(
        terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0)
    )
    text = b""

    def has_ended():
        nonlocal text, number
        if not select.select([terminal], [], [], 1)[0]:
            return False
        try:
            text += os.read(terminal, 65536)
        except OSError:  # nobody has it open any more
            return True
        if number is not None and at.encode() in text:
            os.kill(pid, number)
            number = None
        hear(text.decode(errors="replace"))
        return False

    until(has_ended, lambda: text.decode(), every_s=0)
    os.close(terminal)
    return Seen(
        os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text.decode()
    )


def is_clean(seen):
    """The region is gone, and the cursor is there."""
    assert not [
        line for line in seen.lines if DRAWN.search(line) or "starting" in line
    ], seen.lines
    assert seen.text.rfind(HIDE) <= seen.text.rfind(SHOW)


def test_on_a_terminal_a_line_is_drawn_and_all_else_goes_above_it(tmp_path):
    file = write(tmp_path, launcher="spawn", scaling={"num_workers": 2})
    seen = on_terminal("-m", "trainers", file)
    assert seen.code == 0, seen.text
    assert DRAWN.search(seen.text)
    assert any(
        "loss" in drawn and "samples/s" in drawn
        for drawn in REDRAWN.split(seen.text)
    )
    is_clean(seen)
    for step in (20, 40, 60):
        assert f"own words at step {step}: " + "x" * 150 in seen.lines
        assert f"own warning at step {step}" in seen.lines
        assert (
            sum(
                line.startswith(f"evaluated at step {step} in ")
                for line in seen.lines
            )
            == 1
        )
    assert not [line for line in seen.lines if line.startswith("step ")]
    assert any(line.startswith("done: 60 steps") for line in seen.lines)


@pytest.mark.full
def test_interrupted_it_leaves_the_terminal_in_order(tmp_path):
    seen = on_terminal(
        "-m",
        "trainers",
        write(tmp_path, max_steps=10**6),
        number=signal.SIGINT,
        at="own words at step 40",
    )
    assert seen.code == 0, seen.text
    assert "stopped: " in seen.text
    is_clean(seen)


def test_in_a_pipe_there_are_lines_and_nothing_moves_the_cursor(
    tmp_path, command
):
    done = command(
        "-m trainers", write(tmp_path), forked=True, env={"FORCE_COLOR": "1"}
    )
    assert done.code == 0, done.err
    assert "\x1b" not in done.out + done.err
    assert "\r" not in done.out + done.err
    assert (
        sum(line.startswith("step ") for line in done.out.splitlines()) == 60
    )


def test_quiet_says_the_result_in_a_line(tmp_path, command):
    file = write(tmp_path, task="tests.tasks:Blobs")
    done = command("-m trainers", file, "--quiet", forked=True)
    assert done.code == 0, done.err
    (line,) = done.out.splitlines()
    assert line.startswith("done: 60 steps")
    assert "val_loss" in line
    assert done.err == ""
    failed = command(
        "-m trainers", file, "--quiet --fresh --seed -1", forked=True
    )
    assert (failed.code, failed.out, len(failed.err.splitlines())) == (
        2,
        "",
        1,
    )


def records_of(done):
    """What came on standard output, of which each line must be an object of
    JSON's own grammar.
    """

    def refuse(constant):
        raise ValueError(constant)

    return [
        json.loads(line, parse_constant=refuse)
        for line in done.out.splitlines()
    ]


def test_json_is_all_that_comes_on_standard_output(tmp_path, command):
    file = write(tmp_path, launcher="spawn", scaling={"num_workers": 2})
    done = command("-m trainers", file, "--json", forked=True)
    assert done.code == 0, done.err
    first, *between, last = records_of(done)
    assert (first["record"], first["total_steps"], first["step"]) == (
        "start",
        60,
        0,
    )
    trained = [one for one in between if one["record"] == "train"]
    assert [one["step"] for one in trained] == list(range(1, 61))
    assert all(
        {"train_loss", "lr", "wall_time_s", "samples_per_s"} <= one.keys()
        for one in trained
    )
    assert [
        one["step"] for one in between if one["record"] == "evaluation"
    ] == [
        20,
        40,
        60,
    ]
    assert [
        one["step"] for one in between if one["record"] == "checkpoint"
    ] == [
        10,
        20,
        30,
        40,
        50,
        60,
    ]
    assert (last["record"], last["status"], last["steps"]) == (
        "result",
        "done",
        60,
    )
    assert "own words at step 20" in done.err
    assert "step 60/60" in done.err
    evaluated = command(
        "-m trainers evaluate",
        str(tmp_path / "runs" / "run"),
        "--json",
        forked=True,
    )
    (result,) = records_of(evaluated)
    assert (result["status"], result["metrics"]["val_loss"]) == (
        "done",
        last["metrics"]["val_loss"],
    )


def test_a_failure_is_a_record_too(tmp_path, command):
    done = command(
        "-m trainers",
        write(tmp_path, task_args={"fails": True}),
        "--json",
        forked=True,
    )
    assert done.code == 1
    *_, last = records_of(done)
    assert (last["record"], last["exit_code"]) == ("error", 1)
    assert "the user's own" in last["message"]
    assert f"error: {last['message']}" in done.err


@pytest.mark.full
def test_a_run_goes_on_when_nobody_reads_its_records(tmp_path):
    read, written = os.pipe()
    os.close(read)
    with (tmp_path / "err").open("w") as err:
        done = subprocess.run(
            [sys.executable, "-m", "trainers", write(tmp_path), "--json"],
            cwd=REPOSITORY,
            stdout=written,
            stderr=err,
        )
    os.close(written)
    assert done.returncode == 0, (tmp_path / "err").read_text()
    assert "accepts no more records" in (tmp_path / "err").read_text()
    assert (
        read_json(tmp_path / "runs" / "run" / "result.json")["status"]
        == "done"
    )
