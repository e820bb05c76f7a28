"""A new user's shell: the first script runs, and nothing of theirs is changed."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.waits import HANG_S

pytestmark = pytest.mark.ray

NOTHING = re.compile("(?!)")
RAYS = re.compile(
    r"\((TrainController|PlacementGroupCleaner|RayTrainWorker) pid="
)
"""Lines of the actors of Ray's own trainer. One of them fails where two
clusters share a machine, as here, or where the dashboard is slow.
"""


def stranger(home, *command, excused=NOTHING):
    """Run Python with nothing in its environment but PATH and a new HOME;
    returns what it printed, in which only lines that match `excused` may have
    a traceback.
    """
    # Of its own: Ray joins whatever cluster it finds in the one of the suite,
    # where other scripts run beside this.
    with tempfile.TemporaryDirectory(
        prefix="s", dir=os.environ["TMPDIR"], ignore_cleanup_errors=True
    ) as temporary:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=REPOSITORY,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "PYTHONPATH": str(REPOSITORY),
                "TMPDIR": temporary,
            },
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    said = (done.stdout + done.stderr).splitlines()
    traced = [
        line
        for line in said
        if "Traceback" in line and not excused.search(line)
    ]
    assert not traced, "\n".join(said)
    return done.stdout


MARKS = {"ours-first": pytest.mark.full, "init-first": pytest.mark.campaign}


@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(how, marks=mark) for how, mark in MARKS.items()),
        "no-init",
    ],
)
def test_the_drop_in_runs_whatever_comes_first(how, tmp_path):
    script = str(Path(__file__).with_name("first_script.py"))
    assert "DOUBLES [2, 4] []" in stranger(tmp_path, script, how, excused=RAYS)


@pytest.mark.full
def test_a_first_training_says_nothing_of_ray_s_own_helpers(tmp_path):
    """By the default launcher, and over before Ray's dashboard would be there."""
    small = ("--max_steps", "20", "--storage_path", str(tmp_path))
    out = stranger(
        tmp_path, "-m", "trainers", "examples/digits/train.yaml", *small
    )
    assert "done: 20 steps" in out
    assert "PlacementGroupCleaner" not in out
    assert "State Transition" not in out
    again = stranger(
        tmp_path, "-m", "trainers", "examples/digits/train.yaml", *small
    )
    assert "is complete already" in again
    assert "TrainController" not in again, "no cluster was started for it"
