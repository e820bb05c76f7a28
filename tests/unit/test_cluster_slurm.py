"""cluster/slurm.sbatch: broken variants, each with its one finding, and the script on a
faked Slurm.

tests/lab/test_slurm.py runs it on a real one.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.__main__ import main
from cluster.files.slurm import slurm_findings
from tests.specs import REPOSITORY
from tests.waits import until

FILE = REPOSITORY / "cluster" / "slurm.sbatch"
TEXT = FILE.read_text(encoding="utf-8")
SIGNAL = "#SBATCH --signal=B:USR1@120"
STORAGE = "PACELINE_STORAGE=/shared/MY-GROUP/paceline"
CPUS = '--cpus-per-task="$SLURM_CPUS_PER_TASK" \\\n'

# The text before, the text in its place, and the field of what is found.
BROKEN = {
    "tasks_on_a_node": ("per-node=1", "per-node=8", "--ntasks-per-node"),
    "one_cpu": (CPUS, "\\\n", "srun"),
    "not_told": (SIGNAL, "", "--signal"),
    "tells_ray": (SIGNAL, "#SBATCH --signal=USR1@120", "--signal"),
    "tells_what_is_not_heeded": (SIGNAL, "#SBATCH --signal=B:TERM@120", "--signal"),
    "not_heeded": ("trap stop USR1", "", "--signal"),
    "in_the_foreground": ('"$@" &\n', '"$@"\n', "symmetric-run"),
    "not_waited_for": ("do wait $tasks; done", "do break; done", "symmetric-run"),
    "own_disk": (STORAGE, "PACELINE_STORAGE=/tmp/$USER", "the script"),
    "relative_storage": (STORAGE, "PACELINE_STORAGE=results", "the script"),
    "windows_line_ends": ("\n", "\r\n", "the file"),
    "no_storage": (f"export {STORAGE}", "", "the script"),
    "no_token": ("export RAY_AUTH_MODE=token", "", "the script"),
    "key_in_the_file": (
        "ulimit",
        "export AWS_SECRET_ACCESS_KEY=abc; ulimit",
        "a cloud key",
    ),
    "not_waited_for_nodes": (' --min-nodes "$SLURM_JOB_NUM_NODES"', "", "--min-nodes"),
    "one_head_each": (
        '--address "$address"',
        '--address "127.0.0.1:$port"',
        "--address",
    ),
    "a_ray_of_its_own": ("RAY_ADDRESS=", "ADDRESS=", "RAY_ADDRESS"),
}


@pytest.mark.parametrize(("old", "new", "field"), BROKEN.values(), ids=BROKEN)
def test_each_trap_has_its_finding(old, new, field, tmp_path):
    file = tmp_path / "job.sbatch"
    assert old in TEXT
    file.write_text(TEXT.replace(old, new), encoding="utf-8", newline="")
    [finding] = slurm_findings(file)
    assert finding.field == field
    assert finding.rule
    assert finding.fix


def test_validate_prints_them(tmp_path, capsys):
    assert main(["validate", str(FILE), "--strict"]) == 0
    assert capsys.readouterr().out == f"{FILE}: in order (slurm)\n"
    file = tmp_path / "job"  # known by its content
    file.write_text(TEXT.replace("=/shared/MY-GROUP", "=/tmp"), encoding="utf-8")
    assert main(["validate", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {file}: `the script` is ")
    assert main(["validate", str(tmp_path / "none.sbatch")]) == 2


def test_a_script_without_ray_is_not_asked_for_what_only_ray_needs(tmp_path):
    file = tmp_path / "job.sh"
    file.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\nsrun torchrun -m trainers a.yaml\n"
    )
    assert list(slurm_findings(file)) == []


FAKES = {
    # The options, which all have their value after `=`, then the command: on this
    # machine alone.
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "ray": 'echo "$@" >>"$FAKED/rays"; [[ "$1" == symmetric-run && ! -e "$FAKED/no_ray" ]] || exit 0\n'
    'while [ "$1" != -- ]; do shift; done; shift; "$@"; exit "${RAYS_OWN_CODE:-$?}"',
    "scontrol": 'echo "$@" >>"$FAKED/scontrol"',
}


@pytest.fixture
def faked(tmp_path, monkeypatch):
    """A directory in which the fakes write down what they were asked for; the script,
    with its storage there.
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
    paths = {"FAKED": str(tmp_path), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
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
    # Ray itself may end with another code while it stops, and with 0 when it did not
    # start.
    monkeypatch.setenv("RAYS_OWN_CODE", "1")
    assert start(faked, "true").wait() == 0
    (faked / "no_ray").touch()
    assert start(faked, "true").wait() == 1
    assert not (faked / "scontrol").exists(), "nothing is put back by itself"
    assert not list(Path("/tmp").glob(f"paceline-{10**8 + os.getpid()}"))


def test_a_signal_stops_the_command_and_puts_the_job_back(faked):
    heeds = (
        "import pathlib, signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); "
    )
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
