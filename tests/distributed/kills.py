"""Run as: python -m tests.distributed.kills DIRECTORY. Kills a run many times
and prints, as JSON, what came of it.
"""

import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from tests.distributed.forked import run_forked
from tests.specs import evaluations, losses, make
from tests.tasks import Blobs
from trainers.loop import watchdog
from trainers.step.train_step import TrainStep

PLAN = "RECORDED_PLAN"
SAMPLES = 99
BATCH = 12
STEPS_PER_EPOCH = -(-SAMPLES // BATCH)
EPOCHS = 3
"""Enough for three kills: each comes within seven steps."""


class Recorded(Blobs):
    """Writes down which samples each rank trains in each step, and kills its
    own process before a given step.
    """

    def __init__(self):
        super().__init__(samples=SAMPLES, dtype="float64")
        plan = json.loads(
            os.environ[PLAN]
        )  # of one start: arguments are of the whole run
        self.record = Path(plan["record"])
        self.kill_rank = plan["kill_rank"]
        self.kill_after = plan["kill_after"]
        self.steps = 0
        self.rank = 0

    def dataset(self, split):
        data = super().dataset(split)
        return TensorDataset(*data.tensors, torch.arange(len(data)))

    def begin_step(self):
        """Called by the loop's step, which the parent has wrapped."""
        self.steps += 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if self.steps == self.kill_after and self.rank == self.kill_rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def forward(self, model, batch):
        if self.steps and model.training:
            with (self.record / f"rank-{self.rank}").open("a") as file:
                file.write(json.dumps([self.steps, batch[2].tolist()]) + "\n")
        return super().forward(model, batch)


def count_steps():
    """From now on every training step tells its task that it begins; the
    probe's passes do not.
    """
    original = TrainStep.__call__

    def counted(self, *args, **kwargs):
        cast("Recorded", self.forward.task).begin_step()
        original(self, *args, **kwargs)

    TrainStep.__call__ = counted


def spec(directory, name, **more):
    changes = {
        "task": "tests.distributed.kills:Recorded",
        "global_batch_size": BATCH,
        "checkpoint__every_steps": 3,
        "evaluate__every_steps": 9,
        "launcher": "spawn",
        "name": name,
        **more,
    }
    return make(directory, **changes)


def newest_step(run):
    """The step of the newest checkpoint that has its manifest; 0 without any."""
    names = [
        name
        for name in run.names("checkpoints")
        if run.exists(f"checkpoints/{name}/manifest.json")
    ]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def run_killed(directory, name, worlds, kills, epochs=EPOCHS, **changes):
    """One run, killed `kills` times, on each number of workers in turn; which
    samples counted in the end.
    """
    chance = random.Random(f"20261121 {name}")
    run = spec(directory, name, max_steps=epochs * STEPS_PER_EPOCH, **changes)
    counted = {}
    ends = []
    for attempt in range(kills + 1):
        world_size = worlds[attempt % len(worlds)]
        record = directory / f"{name}-{attempt}"
        record.mkdir()
        last = attempt == kills
        args = {
            "kill_rank": chance.randrange(world_size),
            "kill_after": chance.randint(1, 7),
        }
        plan = {
            "record": str(record),
            "kill_rank": -1,
            "kill_after": -1,
            **({} if last else args),
        }
        os.environ[PLAN] = json.dumps(plan)
        start = newest_step(run.storage)
        codes = run_forked(run, world_size, record / "rendezvous")
        ends.append(
            {
                "workers": world_size,
                "start": start,
                "codes": codes,
                **({} if last else args),
            }
        )
        steps = {}
        for rank in range(world_size):
            path = record / f"rank-{rank}"
            for line in path.read_text().splitlines() if path.exists() else ():
                step, samples = json.loads(line)
                steps.setdefault(start + step, []).extend(samples)
        for step in [known for known in counted if known > start]:
            del counted[
                step
            ]  # not in the checkpoint that this attempt started from
        counted |= steps
    per_epoch = [Counter() for _ in range(epochs)]
    for step, samples in counted.items():
        per_epoch[(step - 1) // STEPS_PER_EPOCH].update(samples)
    return {
        "ends": ends,
        "samples": [sorted(counted[step]) for step in sorted(counted)],
        "once": [
            sorted(epoch.elements()) == list(range(SAMPLES))
            for epoch in per_epoch
        ],
        "losses": losses(run),
        "evaluations": evaluations(run),
    }


def main(directory):
    count_steps()
    watchdog.CAUSE_S = 0.0  # there is no launcher to see who was first
    found = {
        "unbroken 1": run_killed(directory, "unbroken-1", [1], 0),
        "moved": run_killed(directory, "moved", [1, 2, 3], 3),
        "unbroken 2": run_killed(directory, "unbroken-2", [2], 0),
        "fixed 2": run_killed(directory, "fixed-2", [2], 2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
