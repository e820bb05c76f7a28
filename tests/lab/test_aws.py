"""`ray up cluster/aws.yaml` with hosts for instances: a sweep from zero to
three spot nodes, one of them taken back.

Needs root, and no network.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyarrow import fs

from tests.lab.aws import BUCKET, OnAws, instances
from tests.lab.hosts import CONTROL, REPOSITORY, lab_of
from tests.waits import until

pytestmark = [pytest.mark.full, pytest.mark.lab]

STEPS = 400
BATCH = 16
NOTICE_S = 45
RATES = [0.001, 0.002, 0.003, 0.004, 0.005, 0.006]
# What the test sees of trials, and how it holds them, lies where all hosts of
# a lab see it; EC2 has no such place, and neither the sweep nor the cluster
# uses it.
NOTES = "/srv/nfs/counted"
TASK = f"""
import socket, time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trainers.task import Task

HERE = Path("{NOTES}")

class Counted(Task):
    def model(self):
        return torch.nn.Linear(4, 1)

    def optimizer(self, model, config):
        self.rate = config.optimizer.lr
        return super().optimizer(model, config)

    def dataset(self, split):
        inputs = torch.rand({STEPS * BATCH}, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs.sum(1))

    def loss(self, outputs, batch):
        return F.mse_loss(outputs[:, 0], batch[1])

    def after_step(self, model, step):
        with (HERE / "steps").open("a") as file:
            print(socket.gethostname(), self.rate, step, file=file)
        while not (HERE / "go").exists():
            time.sleep(0.2)
            if not (HERE / "hold").exists():
                return
"""
SWEEP = f"""
name: counted
train:
  task: counted:Counted
  device: cpu
  max_steps: {STEPS}
  global_batch_size: {BATCH}
  microbatch_size: {BATCH}
  optimizer: {{name: adamw, lr: 0.001}}
  evaluate: {{every_steps: 100}}
  scaling: {{num_workers: 1, cpus_per_worker: 8}}
  failure: {{hang_timeout_s: 900}}
space: {{optimizer.lr: {RATES}}}
objective: {{metric: val_loss}}
lanes: 3
"""


@dataclass(frozen=True)
class Step:
    """A step of a trial, as its task has noted it."""

    host: str
    rate: float
    number: int


class Counted:
    """The sweep, submitted by a user whose directory holds the task and the file."""

    def __init__(self, cluster):
        self.cluster = cluster
        lab = cluster.lab
        self._notes = lab.shared / "counted"
        self._notes.mkdir()
        project = lab.home(CONTROL) / "project"
        project.mkdir()
        (project / "counted.py").write_text(TASK)
        (project / "sweep.yaml").write_text(SWEEP)
        command = ("python", "-m", "tune", "sweep.yaml")
        self.job = cluster.submit(
            *command, wait=False, directory="/root/project"
        )
        host, port = cluster.instances.ec2.backend
        keys = {
            "access_key": "test",
            "secret_key": "test",
            "scheme": "http",
            "region": "us-east-1",
        }
        self._s3 = fs.S3FileSystem(endpoint_override=f"{host}:{port}", **keys)

    def steps(self):
        """All that were made, in their order."""
        file = self._notes / "steps"
        lines = (
            [line.split() for line in file.read_text().splitlines()]
            if file.exists()
            else []
        )
        return [
            Step(host, float(rate), int(step)) for host, rate, step in lines
        ]

    def say(self, word):
        """`hold`: trials go on no further; `go`: all of them to their end, at once."""
        (self._notes / word).touch()

    def files(self, below=""):
        """The sweep's files in the bucket, by path, with their sizes."""
        base = f"{BUCKET}/paceline/counted"
        chosen = fs.FileSelector(
            f"{base}/{below}".rstrip("/"), recursive=True, allow_not_found=True
        )
        found = self._s3.get_file_info(chosen)
        return {
            one.path.removeprefix(f"{base}/"): one.size
            for one in found
            if one.is_file
        }

    def records(self):
        """What the journal says of the trials that have ended."""
        names = [
            name for name in self.files("trials") if name.endswith(".json")
        ]
        return [
            json.loads(
                self._s3.open_input_file(
                    f"{BUCKET}/paceline/counted/{name}"
                ).read()
            )
            for name in names
        ]

    def runs(self):
        """Whether the job goes on; fails with its log where it failed."""
        status = self.cluster.job(self.job)
        assert status in ("PENDING", "RUNNING", "SUCCEEDED"), self.cluster.log(
            self.job
        )[-6000:]
        return status != "SUCCEEDED"


@pytest.fixture
def made():
    pytest.importorskip("moto.server")
    with lab_of(0) as lab, instances(lab) as made:
        yield made


def policy(name):
    """What a policy in docs/aws allows."""
    document = json.loads(
        (REPOSITORY / "docs" / "aws" / f"{name}.json").read_text(
            encoding="utf-8"
        )
    )
    assert {statement["Effect"] for statement in document["Statement"]} == {
        "Allow"
    }
    return Counter(
        action
        for statement in document["Statement"]
        for action in statement["Action"]
    )


def types(made):
    return sorted(made.types().values())


def test_a_sweep_from_zero_outlives_a_notice_and_refused_spot(made):
    ec2 = made.ec2
    cluster = OnAws(made)
    cluster.up()
    assert types(made) == ["head"], "no worker without work"

    sweep = Counted(cluster)

    def are_amid():
        newest = {step.host: step.number for step in sweep.steps()}
        return (
            sweep.runs()
            and len(newest) == 3
            and all(10 < number < STEPS // 2 for number in newest.values())
        )

    until(are_amid, "three trials in mid-run, each on its own node")
    assert types(made) == ["gpu_spot"] * 3 + ["head"], "from zero"

    taken = next(
        instance
        for instance, kind in made.types().items()
        if kind == "gpu_spot"
    )
    host = made.hosts[taken]
    ec2.has_spot = False
    made.notify(taken, NOTICE_S)

    until(
        lambda: sweep.runs() and kept(sweep),
        "the state of its trial in the bucket",
        within_s=NOTICE_S - 5,
    )
    sweep.say("hold")
    [at] = kept(sweep)
    before = sweep.steps()
    last = [step for step in before if step.host == host][-1]
    assert last.number == at, "no step was made after the checkpoint"
    made.take_back(taken)

    def goes_on():
        return sweep.runs() and any(
            step.rate == last.rate and step.number > at
            for step in sweep.steps()
        )

    until(goes_on, "the trial's next step, on another node")
    assert types(made) == ["gpu_on_demand"] + ["gpu_spot"] * 2 + ["head"]
    assert ec2.refused > 0
    sweep.say("go")
    until(lambda: not sweep.runs(), "the sweep's end")

    made_by = defaultdict(list)
    for step in sweep.steps():
        made_by[step.rate].append((step.host, step.number))
    wrong = {
        rate: made
        for rate, made in made_by.items()
        if [number for _, number in made] != list(range(1, STEPS + 1))
    }
    log = cluster.log(sweep.job)[-6000:]
    assert not wrong, (
        f"each step of each trial once, and none before the notice again:\n{wrong}\n{log}"
    )
    assert sorted(made_by) == RATES
    assert len({host for host, _ in made_by[last.rate]}) == 2
    records = sweep.records()
    assert (
        sorted(record["config"]["optimizer.lr"] for record in records) == RATES
    )
    assert {record["status"] for record in records} == {"done"}
    assert {
        "report.html",
        "best.yaml",
        "results.parquet",
    } <= sweep.files().keys()
    assert not kept(sweep), "what the trial kept is deleted with its end"

    until(lambda: types(made) == ["head"], "the end of idle nodes", every_s=1)
    cluster.down()
    assert {found["State"]["Name"] for found in ec2.instances()} == {
        "terminated"
    }
    assert not made.hosts
    assert {who for who, _ in ec2.calls} == {"laptop", "head", "worker"}, (
        "no request without credentials"
    )
    assert policy("laptop") == ec2.needed("laptop")
    head = ec2.needed("head")
    worker = ec2.needed("worker")
    assert not policy("head") - head
    assert policy("bucket") == (head | worker) - policy("head")
    assert not worker - policy("bucket"), "workers call nothing but S3"


def kept(sweep):
    """The step of each whole state that a trial has kept."""
    manifests = [
        Path(name)
        for name in sweep.files("lanes")
        if name.endswith("manifest.json")
    ]
    return [
        int(manifest.parent.name.removeprefix("step-"))
        for manifest in manifests
    ]
