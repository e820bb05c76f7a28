"""cluster/slurm.sbatch on a real Slurm of two hosts: told before its time
limit, requeued, and gone on with.
"""

import re
import shutil
from pathlib import Path

import pytest

from tests.lab.hosts import (
    CONTROL,
    REPOSITORY,
    address_of,
    lab_of,
    logged_steps,
)
from tests.waits import until

pytestmark = [pytest.mark.full, pytest.mark.lab]

NODES = ["h0", "h1"]
HOME = "/srv/nfs/slurm"
SLURM_CONF = f"SLURM_CONF={HOME}/slurm.conf"
# Jobs are held together by their parents: there are no cgroups here. A job
# comes back after cred_expire, else 120 s.
CONF = f"""
ClusterName=lab
SlurmctldHost={CONTROL}({address_of(CONTROL)})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=cred_expire=10
StateSaveLocation={HOME}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={HOME}/slurmctld.log
SlurmdLogFile={HOME}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2
SlurmdParameters=config_overrides
KillWait=5
"""
MUNGED = f"""
umask 077
mkdir -p /run/munge /root/munge
chmod 755 /run/munge
cp {HOME}/munge.key /root/munge/key
cd /root/munge
munged --force --key-file=$PWD/key --log-file=$PWD/log --seed-file=$PWD/seed --pid-file=/run/munged.pid
"""
TASK = """
import os, time
from examples.digits.task import Digits

class Unhurried(Digits):
    def transform(self, batch, training):
        if training and "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(0.3)
        return super().transform(batch, training)
"""
TRAIN = """
task: own:Unhurried
name: own
max_steps: 500
global_batch_size: 64
optimizer: {name: adamw, lr: 0.002}
log_every_steps: 1
evaluate: {every_steps: 500}
checkpoint: {every_steps: 500}
scaling: {num_workers: 2}
"""
"""A run that has no checkpoint of its own before its end: minutes in the first
try, seconds in the next.
"""


class Slurm:
    """A slurmctld on `ctl`, a slurmd on each host, and what a user types."""

    def __init__(self, lab):
        self.lab = lab
        self.home = lab.shared / "slurm"
        (self.home / "state").mkdir(parents=True)
        nodes = "".join(
            f"NodeName={name} NodeAddr={address_of(name)} CPUs=1 RealMemory=4000\n"
            for name in NODES
        )
        (self.home / "slurm.conf").write_text(
            f"{CONF}{nodes}PartitionName=main Nodes=ALL Default=YES State=UP\n"
        )
        (self.home / "munge.key").write_bytes(b"lab " * 16)
        for name in (CONTROL, *NODES):
            lab.run(name, "sh", "-ec", MUNGED)
            # On a site's nodes the home is one; here each has its own.
            (lab.home(name) / ".ray").mkdir(mode=0o700)
            (lab.home(name) / ".ray" / "auth_token").write_text("0" * 64)
        self.type("slurmctld")
        for name in NODES:
            lab.run(name, "env", SLURM_CONF, "slurmd", "-N", name)
        until(
            lambda: (
                self.type("sinfo", "--noheader", "--format=%T").split()
                == ["idle"]
            ),
            "idle nodes",
        )

    def type(self, *command):
        """A command of the user's, in the repository."""
        return self.lab.run(
            CONTROL, "env", SLURM_CONF, *command, cwd=str(REPOSITORY)
        ).stdout

    def submit(self, *command):
        """The shipped file with its documented edits, and options that fit
        hosts of one CPU; the job's id.
        """
        text = (REPOSITORY / "cluster" / "slurm.sbatch").read_text(
            encoding="utf-8"
        )
        text = text.replace("/shared/MY-GROUP/", "/srv/nfs/").replace(
            "#SBATCH --gpus-per-node=1\n", ""
        )
        # Hosts share one machine's memory.
        text = text.replace(
            "ray symmetric-run ",
            "ray symmetric-run --object-store-memory=200000000 ",
        )
        (self.home / "job.sbatch").write_text(text)
        options = ("--cpus-per-task=1", f"--output={HOME}/%x-%j.log")
        return self.type(
            "sbatch", "--parsable", *options, f"{HOME}/job.sbatch", *command
        ).strip()

    def limit(self, job, minutes):
        """Change a job's time limit."""
        self.type("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    def state(self, job):
        """What Slurm says of a job: JobState, Restarts, ExitCode, ..."""
        return dict(
            re.findall(
                r"(\w+)=(\S+)", self.type("scontrol", "show", "job", job)
            )
        )

    def log(self, job):
        """What a job has printed, in all of its tries."""
        file = self.home / f"paceline-{job}.log"
        return file.read_text() if file.exists() else ""

    def wait(self, job, condition, what):
        """Until something is so, or the job has failed; with what it has
        printed where it is not so.
        """
        try:
            until(
                lambda: (
                    condition()
                    or self.state(job)["JobState"] in ("FAILED", "TIMEOUT")
                ),
                what,
                every_s=1,
            )
            assert condition(), what
        except AssertionError:
            print(
                *(line[:300] for line in self.log(job).splitlines()[-80:]),
                sep="\n",
            )
            raise


@pytest.fixture
def slurm():
    absent = [
        name
        for name in ("munged", "slurmctld", "slurmd", "sbatch")
        if shutil.which(name) is None
    ]
    if absent:
        pytest.skip(
            f"not installed: {', '.join(absent)} (apt-get install munge slurmctld slurmd slurm-client)"
        )
    with lab_of(len(NODES)) as lab:
        yield Slurm(lab)


def test_a_run_goes_on_in_the_next_time_limit_and_loses_no_step(slurm):
    own = slurm.lab.shared / "own"
    own.mkdir()
    (own / "own.py").write_text(TASK)
    (own / "train.yaml").write_text(TRAIN)
    job = slurm.submit("python", "-m", "trainers", "/srv/nfs/own/train.yaml")
    slurm.wait(
        job, lambda: "worker group of size 2" in slurm.log(job), "both workers"
    )
    hours, minutes, seconds = map(int, slurm.state(job)["RunTime"].split(":"))
    # 90 to 150 s from now; --signal is for 120 s before it, and Slurm looks
    # every 30 s.
    slurm.limit(job, 60 * hours + minutes + (seconds >= 30) + 2)
    slurm.wait(job, lambda: "asked to stop" in slurm.log(job), "the signal")
    slurm.wait(
        job, lambda: slurm.state(job)["JobState"] == "PENDING", "the requeue"
    )
    slurm.limit(job, 60)
    slurm.wait(
        job,
        lambda: slurm.state(job)["JobState"] not in ("PENDING", "RUNNING"),
        "the end",
    )
    ended = slurm.state(job)
    log = slurm.log(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == (
        "COMPLETED",
        "0:0",
        "1",
    ), log[-6000:]
    [kept] = map(int, re.findall(r"stopped: (\d+) steps", log))
    assert re.findall(r"resumed at step (\d+) ", log) == [str(kept)], log[
        -6000:
    ]
    assert 0 < kept < 500
    run = slurm.lab.shared / "paceline" / "own"
    steps = logged_steps(run)
    assert steps == list(range(1, 501)), (
        "each step once, in both tries together"
    )
    assert {
        ip
        for ip, rank in re.findall(
            r"\(ip=([\d.]+), pid=\d+\) world_rank=(\d)", log
        )
    } == set(map(address_of, NODES))
    for name in NODES:
        assert slurm.lab.run(name, "ls", "/tmp").stdout.split() == [
            *_own_files()
        ], "Ray's files are gone"
        left = slurm.lab.run(name, "ps", "-eo", "args").stdout
        assert not re.search(r"raylet|gcs_server|ray::|symmetric-run", left), (
            left
        )


def _own_files():
    """What a host shows below /tmp of this machine: the repository, where it
    lies there.
    """
    return [REPOSITORY.parts[2]] if Path("/tmp") in REPOSITORY.parents else []
