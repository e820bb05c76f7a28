"""All of it on S3, over a bad connection: a sweep that is killed, its report,
and the run of its best.yaml, killed too.

Environment read: PACELINE_S3_SEEDS, of the connection, as 1,2,3 (default 1).
"""

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import pytest
from pyarrow import fs
from torch import nn

from tests.faults import s3
from tests.lane_tasks import Signed
from tests.specs import BASE, REPOSITORY, logged, whole_state
from tests.unit.test_row_shards import same
from tests.waits import HANG_S, until
from trainers.checkpoint.store import Archive
from trainers.config.yaml import dump_yaml
from trainers.storage import Storage
from tune.trials.journal import Journal

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not s3.installed(),
        reason="there is no S3 server: pip install 'moto[server]'",
    ),
]
SEEDS = [
    int(seed) for seed in os.environ.get("PACELINE_S3_SEEDS", "1").split(",")
]
SHARE = 0.04
TRIALS = 6
STEPS = 12
WIDTH = 1600
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
RUN = {
    "name": "trained",
    "launcher": "spawn",
    "scaling.num_workers": 2,
    "strategy": "fsdp",
    "max_steps": STEPS,
    "checkpoint.every_steps": 4,
    "log_every_steps": 1,
    "device": "cpu",
}


class Wide(Signed):
    """With checkpoints that go up in parts: each of two ranks writes 15 MB of rows."""

    def model(self):
        self.sign()
        return nn.Sequential(
            nn.Linear(self.features, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 4),
        )


@dataclass(frozen=True)
class Place:
    """A bucket, seen over the bad connection and directly."""

    proxy: s3.Proxy
    noisy: str
    direct: str

    def spoiled(self):
        """How many requests were spoiled, by kind."""
        found = dict.fromkeys(s3.KINDS, 0)
        for (kind, _), count in self.proxy.spoiled.items():
            found[kind] += count
        return found


@pytest.fixture(params=SEEDS)
def place(request, monkeypatch):
    for key, value in KEYS.items():
        monkeypatch.setenv(key, value)
    with s3.bucket(s3.noise(request.param, SHARE)) as (proxy, noisy, direct):
        yield Place(proxy, noisy, direct)
        print(
            f"seed {request.param}: {proxy.requests} requests, spoiled {dict(proxy.spoiled)}"
        )


@contextmanager
def killed(*args, once):
    """Run `python ARGS` until something is so, and kill it then."""
    settings = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("RAY_ADDRESS", "TUNE_"))
    }
    process = subprocess.Popen(
        [sys.executable, *args],
        cwd=REPOSITORY,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(once, "the moment", process=process, every_s=0.1)
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        _, alive = psutil.wait_procs(
            family, timeout=HANG_S
        )  # a worker may go on for a moment, with the next trial
    assert not alive
    yield


def train_killed(location, place, tmp_path, command):
    """Train what a file says on S3, killed once, and on this machine without a
    fault: both are the same to the bit.
    """
    options = [
        part for key, value in RUN.items() for part in (f"--{key}", str(value))
    ]
    run = Storage(place.direct).child("trained")
    reference = Storage(tmp_path / "unbroken" / "trained")
    args = "-m", "trainers", location, *options

    def is_amid():
        archive = Archive(run)
        return sum(archive.is_complete(name) for name in archive.names()) >= 2

    with killed(*args, "--storage_path", place.noisy, once=is_amid):
        kept = Archive(run).newest()
    done = command(*args, "--storage_path", place.noisy, forked=True)
    assert done.code == 0, done.out + done.err
    assert "resumed at step" in done.out
    unbroken = command(
        *args, "--storage_path", str(tmp_path / "unbroken"), forked=True
    )
    assert unbroken.code == 0, unbroken.out + unbroken.err

    def curve(of):
        return [
            (one["step"], one["train_loss"])
            for one in logged(of.uri, "train_loss")
        ]

    assert [step for step, _ in curve(run)] == list(range(1, STEPS + 1)), (
        "every step once"
    )
    assert curve(run) == curve(reference)
    assert Archive(run).newest() == f"step-{STEPS:012d}" != kept
    Archive(run).verify(f"step-{STEPS:012d}")
    assert Archive(run).manifest(f"step-{STEPS:012d}").is_sharded
    ours, theirs = (whole_state(one.uri, STEPS) for one in (run, reference))
    for part in ("model", "optimizer"):
        same(ours[part], theirs[part])
    found = run.filesystem.get_file_info(
        fs.FileSelector(run.path, recursive=True)
    )
    assert not [
        info.path
        for info in found
        if info.path.endswith((".tmp", "lease.json"))
    ]


@pytest.mark.campaign
@pytest.mark.ray
def test_a_killed_sweep_and_the_run_of_its_answer_go_on(
    place, tmp_path, command
):
    ran = tmp_path / "ran"
    file = tmp_path / "sweep.yaml"
    keys = {
        key: value
        for key, value in BASE.items()
        if key not in ("launcher", "checkpoint", "evaluate")
    }
    task = {
        "task": "tests.commands.test_s3:Wide",
        "task_args": {"file": str(ran), "pause_s": 0.02},
    }
    tree = {
        "name": "sweep",
        "storage_path": place.noisy,
        "train": {**keys, **task, "evaluate": {"every_steps": 15}},
        "space": {"seed": list(range(TRIALS))},
        "objective": {"metric": "val_loss"},
        "lanes": 1,
    }
    file.write_text(dump_yaml(tree))
    sweep = Storage(place.direct).child("sweep")
    noisy = Storage(place.noisy).child("sweep")

    def texts():
        return {
            name: sweep.read(f"trials/{name}")
            for name in sweep.names("trials")
            if name.endswith(".json")
        }

    with killed(
        "-m", "tune", str(file), once=lambda: len(sweep.names("trials")) >= 2
    ):
        finished = texts()
        before = ran.read_text().split()
    done = command("-m tune resume", noisy.uri)
    assert done.code == 0, done.out + done.err
    records = Journal(sweep).records()
    assert {record.config["seed"] for record in records} == set(
        range(TRIALS)
    ), "none is lost"
    assert [record.status for record in records] == ["done"] * TRIALS
    assert finished.items() <= texts().items(), "a record is never changed"
    kept = {
        record.config["seed"]
        for record in records
        if f"{record.id}.json" in finished
    }
    again = [int(seed) for seed in ran.read_text().split()[len(before) :]]
    assert sorted(again) == sorted(set(range(TRIALS)) - kept), (
        "only what had not finished runs, and once"
    )
    for name in (
        "report.html",
        "results.parquet",
        "best.yaml",
        "summary.json",
    ):
        assert sweep.read(name)
    assert not sweep.exists("lease.json")
    train_killed(noisy.locate("best.yaml"), place, tmp_path, command)
    assert all(place.spoiled().values()), place.spoiled()
