"""The page of `make gpu`: parts that go on where they stopped, and what each
verdict becomes on it.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu
from benchmarks.gpu import PARTS, Part, main, page, read_junit
from benchmarks.measure import verdict
from tests.waits import until

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_step_gpu" name="test_one[cuda]" time="0.1" />
<testcase classname="tests.gpu.test_step_gpu" name="test_two"
  time="0.1"><failure message="AssertionError: assert 3 == 4&#10;  more">def test_two():
&gt;       assert f() == 4
E       assert 3 == 4

tests/gpu/test_step_gpu.py:12:
trainers/step/train_step.py:80: AssertionError</failure></testcase>
<testcase classname="tests.gpu.test_step_gpu" name="test_three"><error message="failed on setup">
tests/gpu/conftest.py:3: RuntimeError</error></testcase>
<testcase classname="tests.gpu.test_step_gpu" name="test_four"><skipped message="no CUDA device">x</skipped></testcase>
</testsuite></testsuites>"""


@dataclass(frozen=True)
class Late(Part):
    """A part whose minutes are over once it has made a file."""

    begun: Path

    def wait(self, process):
        what = f"{self.begun.name} of {self.name}"
        until(self.begun.exists, what, process=process)


def script(tmp_path, name, text, minutes=1.0):
    (tmp_path / f"{name}.py").write_text(text)
    return Part(name, (name,), minutes)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "STATE", tmp_path / "state")
    monkeypatch.setattr(gpu, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(gpu, "REPOSITORY", tmp_path)
    return tmp_path


def test_verdicts_of_pytest():
    found = read_junit(JUNIT, 1.0)
    assert found.held == ["tests/gpu/test_step_gpu.py::test_one[cuda]"]
    assert found.broken == [
        (
            "tests/gpu/test_step_gpu.py::test_two",
            "AssertionError: assert 3 == 4",
            "trainers/step/train_step.py:80",
        ),
        (
            "tests/gpu/test_step_gpu.py::test_three",
            "failed on setup",
            "tests/gpu/conftest.py:3",
        ),
    ]
    assert found.unseen == [
        ("tests/gpu/test_step_gpu.py::test_four", "no CUDA device")
    ]
    text = page({"gpu": "NVIDIA H200", "torch": "2.11"}, {"tests": found})
    assert text.startswith(
        "# What NVIDIA H200 showed\n\n- gpu: NVIDIA H200\n- torch: 2.11\n"
    )
    assert "| tests | 1 | 2 | 1 | 1 |" in text
    assert "| ladder | not run yet" in text
    assert (
        "- `tests/gpu/test_step_gpu.py::test_two`: AssertionError: assert 3 == 4 (look at trainers/"
        in text
    )
    assert "- 1 tests: no CUDA device" in text


def test_a_call_goes_on_where_the_one_before_it_stopped(directory, capfd):
    once = "open('ran', 'a').write(__name__ and 'x'); print('its figures')"
    parts = [
        script(directory, "one", once),
        script(directory, "two", "print('two')", minutes=3.0),
    ]
    assert main(["--minutes", "2"], parts) == 0
    assert "left for the next call: two" in capfd.readouterr().out
    assert main(["--minutes", "4", "--keep"], parts) == 0
    out = capfd.readouterr().out
    assert "its figures" in out
    assert (directory / "ran").read_text() == "x", (
        "what has a result is not run again"
    )
    [kept] = (directory / "kept").iterdir()
    assert kept.read_text() in out
    assert main(["--again", "one"], parts) == 0
    assert (directory / "ran").read_text() == "xx"


def test_a_part_that_fails_or_does_not_end_is_on_the_page(directory, capfd):
    text = "print('so far', flush=True); open('begun', 'w'); import time; time.sleep(600)"
    script(directory, "hangs", text)
    parts = [
        script(directory, "raises", "raise ValueError('no peak is known')"),
        Late("hangs", ("hangs",), 0.02, directory / "begun"),
    ]
    assert main([], parts) == 1
    out = capfd.readouterr().out
    assert re.search(
        r"- `raises`: it ended with exit code 1: ValueError: no peak is known \(look at state/\S+\.log",
        out,
    )
    assert "- `hangs`: it did not end within 0.02 minutes: so far" in out


def is_running(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_part_that_is_late_is_heard_and_ends_with_all_that_it_has_started(
    directory, capfd
):
    """Each of these says something, and then waits for longer than it has."""
    tests = directory / "test_slow.py"
    tests.write_text(
        "import pathlib, time\n"
        "def test_first(): pass\n"
        "def test_second(): pathlib.Path('begun').touch(); time.sleep(600)\n"
    )
    text = (
        "import pathlib, subprocess, time\n"
        "print(subprocess.Popen(['sleep', '600']).pid)\n"
        "print('held: the first of two', flush=True)\n"
        "pathlib.Path('started').touch(); time.sleep(600)\n"
    )
    script(directory, "starter", text)
    pytest_own = ("pytest", "-v", "-p", "no:cacheprovider", tests.name)
    parts = [
        Late("tests", pytest_own, 0.5, directory / "begun"),
        Late("starter", ("starter",), 0.5, directory / "started"),
    ]
    assert main([], parts) == 1
    page = capfd.readouterr().out
    assert "- `starter`: it did not end within 0.5 minutes" in page
    assert "- `tests`: it did not end within 0.5 minutes" in page
    assert "| starter | 1 | 1 | 0 |" in page
    assert "| tests | 1 | 1 | 0 |" in page
    [log] = (directory / "state").glob("*/starter.log")
    child = int(log.read_text().split()[0])
    until(
        lambda: not is_running(child), "the end of what the part had started"
    )


def test_a_crash_after_a_verdict_is_on_the_page(directory, capfd):
    parts = [
        script(
            directory,
            "peers",
            "print('MISSED: slow: 1 (at least 2)', flush=True); 1 / 0",
        )
    ]
    assert main([], parts) == 1
    page = capfd.readouterr().out
    assert "- `peers`: slow: 1 (at least 2)" in page
    assert "- `peers`: it ended with exit code 1: ZeroDivisionError" in page


def test_miniatures_have_a_page_of_their_own(directory, capfd):
    parts = [script(directory, "peers", "import sys; print(sys.argv[1:])")]
    assert main([], parts) == 0
    assert "\n[]\n" in capfd.readouterr().out
    assert main(["--small"], parts) == 0
    assert "\n['--small']\n" in capfd.readouterr().out


def test_a_threshold_that_is_missed_is_on_the_page(directory, capfd):
    verdict("twice as fast", 2.5, least=2)
    verdict("at once", 2.5, most=2)
    verdict("of a miniature", 2.5, most=2, small=True)
    said = capfd.readouterr().out
    assert main([], [script(directory, "peers", f"print({said!r})")]) == 1
    page = capfd.readouterr().out
    assert "| peers | 1 | 1 | 0 |" in page
    assert "- `peers`: at once: 2.5 (at most 2) (look at state/" in page


def test_a_call_of_ten_minutes_holds_each_part():
    assert all(part.minutes < 8 for part in PARTS)
    assert PARTS[0].name == "tests"
    assert PARTS[-1].name == "failed_capture", (
        "it may spoil its process, and those beside it"
    )
