"""The profile of a run of two ranks, of which one is slower."""

import time
from dataclasses import asdict

import pytest
import torch.distributed as dist

from tests.specs import make
from tests.tasks import Blobs
from trainers.explain import ProfileJob, name_causes
from trainers.launch.local import run_spawn

WAIT_S = 0.15


class SlowRank(Blobs):
    """Rank 1 takes longer for each step."""

    def loss(self, outputs, batch):
        """The task's, late on rank 1."""
        if dist.get_rank() == 1:
            time.sleep(WAIT_S)
        return super().loss(outputs, batch)


class SlowWeighing(SlowRank):
    """Ranks add up their weights in every step, before the first forward."""

    def weight(self, batch):
        """A sample counts as one."""
        return len(batch[0])


class SlowBypassing(SlowRank):
    """Gradients are averaged after the backward pass."""

    def model(self):
        """Keep it."""
        self.net = super().model()
        return self.net

    def forward(self, model, batch):
        """Call the kept one."""
        return self.net(batch[0])


class SlowPhases(SlowRank):
    """A step of its own, in phases."""

    def training_step(self, model, batch, phase):
        """The usual one."""
        return self.loss(model(batch[0]), batch)


@pytest.mark.parametrize("kind", [
    SlowRank,
    pytest.param(SlowWeighing, marks=pytest.mark.full),
    pytest.param(SlowBypassing, marks=pytest.mark.full),
    pytest.param(SlowPhases, marks=pytest.mark.full),
], ids=lambda kind: kind.__name__)  # fmt: skip
def test_a_profile_of_two_ranks_names_the_slow_one_and_leaves_nothing(
    tmp_path, kind
):
    task = f"tests.distributed.test_explain:{kind.__name__}"
    spec = make(
        tmp_path, task=task, launcher="spawn", scaling={"num_workers": 2}
    )
    found = run_spawn(ProfileJob(**asdict(spec), seconds=0.1))
    usual_s, slow_s = found.own_s
    assert slow_s > max(WAIT_S, usual_s)
    assert {"all-reduce", "waiting for ranks"} <= found.parts.keys()
    assert name_causes(spec.config, None, found)[0].kind == "straggling rank"
    assert not spec.storage.exists("")


def test_a_loader_process_reads_a_stream_under_spawn(tmp_path):
    """`--verify` tries one for a slow stream, and its workers are spawned."""
    spec = make(
        tmp_path,
        task="tests.stream_tasks:Streamed",
        task_args={"kind": "numbered"},
        max_steps=4,
        launcher="spawn",
        data={"num_workers": 1},
    )
    assert run_spawn(ProfileJob(**asdict(spec), seconds=0.1)).step_s > 0
