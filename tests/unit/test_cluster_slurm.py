"""cluster/slurm.sbatch on a faked Slurm.

tests/lab/test_slurm.py runs it on a real one.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.specs import REPOSITORY
from tests.waits import until

FILE = REPOSITORY / "cluster" / "slurm.sbatch"
TEXT = FILE.read_text(encoding="utf-8")


FAKES = {
    # The options, which all have their value after `=`, then the command: on
    # this machine alone.
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "ray": 'echo "$@" >>"$FAKED/rays"; [[ "$1" == symmetric-run && ! -e "$FAKED/no_ray" ]] || exit 0\n'
    'while [ "$1" != -- ]; do shift; done; shift; "$@"; exit "${RAYS_OWN_CODE:-$?}"',
    "scontrol": 'echo "$@" >>"$FAKED/scontrol"',
}


@pytest.fixture
def faked(tmp_path, monkeypatch):
    """A directory in which the fakes write down what they were asked for; the
    script, with its storage there.
    """
    (tmp_path / "bin").mkdir()
    for name, body in FAKES.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "home" / ".ray").mkdir(parents=True)
    (tmp_path / "home" / ".ray" / "auth_token").write_text("0" * 64)
    job = str(10**8 + os.getpid())
    sizes = {"SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "2"}
    names = {
        "SLURM_JOB_ID": job,
        "SLURMD_NODENAME": "localhost",
        "HOME": str(tmp_path / "home"),
    }
    paths = {
        "FAKED": str(tmp_path),
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    }
    for name, value in (sizes | names | paths).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "job.sbatch").write_text(TEXT)
    return tmp_path


def start(faked, *command):
    arguments = ["bash", str(faked / "job.sbatch"), *command]
    return subprocess.Popen(
        arguments,
        cwd=faked,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_commands_exit_code_is_the_jobs(faked, monkeypatch):
    job = start(faked, "bash", "-c", 'test "$RAY_ADDRESS" && exit 7')
    assert (job.communicate()[0], job.returncode) == ("", 7)
    [asked] = (faked / "rays").read_text().splitlines()
    assert asked.startswith("symmetric-run --address ")
    assert " --min-nodes 1 --num-cpus=2 --num-gpus=0 -- " in asked
    # Ray itself may end with another code while it stops, and with 0 when it
    # did not start.
    monkeypatch.setenv("RAYS_OWN_CODE", "1")
    assert start(faked, "true").wait() == 0
    (faked / "no_ray").touch()
    assert start(faked, "true").wait() == 1
    assert not (faked / "scontrol").exists(), "nothing is put back by itself"
    assert not list(Path("/tmp").glob(f"paceline-{10**8 + os.getpid()}"))


def test_a_signal_stops_the_command_and_puts_the_job_back(faked):
    heeds = "import pathlib, signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); "
    job = start(
        faked,
        sys.executable,
        "-c",
        f"{heeds}pathlib.Path('up').touch(); time.sleep(3600)",
    )
    until((faked / "up").exists, "the command", every_s=0.02)
    job.send_signal(signal.SIGUSR1)
    assert (job.communicate()[0], job.returncode) == ("", 0)
    assert (faked / "scontrol").read_text().split() == [
        "requeue",
        str(10**8 + os.getpid()),
    ]
