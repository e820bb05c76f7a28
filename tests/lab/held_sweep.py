"""A sweep of eight trials on two lanes: two end, the next are held in mid-run, and all that begin are counted.

One trial may begin on both lanes: where Tune gives it the actor of another, its own may have submitted it by then, and
one of the two is cancelled.
"""

from __future__ import annotations

import subprocess

from tests.documents import blocks
from tests.lab.hosts import CONTROL, Lab, address_of
from tests.lab.on_premises import HEAD, OnPremises
from tests.waits import until

DIRECTORY = "/srv/nfs/held"
RATES = [0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008]
FIRST = {0.001, 0.002}
STEPS, BATCH = 40, 64
LANES = {"h1", "h2"}
TASK = f"""
import time
from pathlib import Path
from examples.digits.task import Digits

HERE = Path("{DIRECTORY}")

def note(what, rate):
    with (HERE / what).open("a") as file:
        file.write(f"{{rate}} {{time.time()}}\\n")

def hold(rate):
    while rate > {max(FIRST)} and not (HERE / "go").exists():
        time.sleep(0.1)

class Held(Digits):
    def optimizer(self, model, config):
        self.rate = config.optimizer.lr
        note("begun", self.rate)
        return super().optimizer(model, config)

    def transform(self, batch, training):
        hold(self.rate) if training else note("trained", self.rate)
        return super().transform(batch, training)
"""
SWEEP = f"""
name: held
train:
  task: held:Held
  max_steps: {STEPS}
  global_batch_size: {BATCH}
  microbatch_size: {BATCH}
  optimizer: {{name: adamw, lr: 0.001}}
  evaluate: {{every_steps: {STEPS}}}
  failure: {{hang_timeout_s: 900}}
space: {{optimizer.lr: {RATES}}}
objective: {{metric: val_loss}}
lanes: 2
"""
START, RESUME = f"python -m tune {DIRECTORY}/sweep.yaml", "python -m tune resume /srv/nfs/paceline/held"
RECORDS = "paceline/held/trials/*.json"


class HeldSweep:
    """The sweep on a cluster, in mid-run once it is made, and what others see of it."""

    def __init__(self, cluster: OnPremises, host: str = HEAD, command: str = START, records: str = RECORDS) -> None:
        """`host` is the driver's; `records` are the files below the shared directory, one for each ended trial."""
        self.cluster, self._records = cluster, records
        self.directory = cluster.lab.shared / "held"
        self.directory.mkdir()
        (self.directory / "held.py").write_text(TASK)
        (self.directory / "sweep.yaml").write_text(SWEEP)
        until(lambda: cluster.alive() == [HEAD, *sorted(LANES)], "all hosts", every_s=1)
        self.job = cluster.submit(*command.split(), wait=False, host=host)
        until(self._is_amid, "two ended trials, and both lanes in mid-run")
        self.amid = {rate for rate, _ in self.begun()} - FIRST
        """The learning rates of the trials that are held in mid-run."""

    def _is_amid(self) -> bool:
        assert self.cluster.job(self.job) in ("PENDING", "RUNNING"), self.cluster.log(self.job)[-6000:]
        return len(self.records()) == len(FIRST) and sum(rate not in FIRST for rate, _ in self.begun()) == len(LANES)

    def begun(self) -> list[tuple[float, float]]:
        """(learning rate, Unix time) of each beginning of a trial."""
        return self._noted("begun")

    def trained(self) -> set[float]:
        """The learning rates of trials that have done their last step."""
        return {rate for rate, _ in self._noted("trained")}

    def _noted(self, what: str) -> list[tuple[float, float]]:
        file = self.directory / what
        lines = file.read_text().splitlines() if file.exists() else []
        return [(float(rate), float(time_s)) for rate, time_s in map(str.split, lines)]

    def records(self) -> dict[str, bytes]:
        """What is kept of the trials that have ended."""
        return {file.name: file.read_bytes() for file in self.cluster.lab.shared.glob(self._records)}

    def go(self) -> None:
        """Let trials go on that are held, and all later ones."""
        (self.directory / "go").touch()

    def finish(self, job: str) -> str:
        """Wait for the good end of a job, and of all trials; returns what it has printed."""
        until(lambda: self.cluster.job(job) not in ("PENDING", "RUNNING"), f"the end of {job}", every_s=1)
        log = self.cluster.log(job)
        assert self.cluster.job(job) == "SUCCEEDED", log[-6000:]
        assert len(self.records()) == len(RATES), log[-6000:]
        return log

    def workers(self) -> set[tuple[str, int]]:
        """(host, process id) of the workers of lanes."""
        return {(host, pid) for kind, host, pid in self.cluster.actors() if kind == "RayTrainWorker"}


def start_redis(lab: Lab) -> None:
    """A Redis on `ctl`, with key and configuration as docs/clusters.md has them."""
    found = blocks("docs/clusters.md")
    [commands] = [block.commands for block in found if any("redis.pem" in command for command in block.commands)]
    [conf] = [block.text for block in found if "tls-port" in block.text]
    [patch] = [command for command in commands if command.startswith("patch ")]
    lab.run(CONTROL, "sh", "-ec", "\n".join(commands[: commands.index(patch)]))
    conf = conf.replace("192.168.0.13", address_of(CONTROL)).replace("/etc/redis/", "/root/.ray/")
    (lab.home(CONTROL) / "redis.conf").write_text(f"{conf}\ndir /root\n")
    lab.popen(CONTROL, "redis-server", "/root/redis.conf", stdout=subprocess.DEVNULL)
