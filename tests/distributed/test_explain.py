"""The profile of a run of two ranks, of which one is slower."""

import time
from dataclasses import asdict

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


def test_a_profile_of_two_ranks_names_the_slow_one_and_leaves_nothing(
    tmp_path,
):
    task = "tests.distributed.test_explain:SlowRank"
    spec = make(tmp_path, task=task, launcher="spawn", scaling={"num_workers": 2})
    found = run_spawn(ProfileJob(**asdict(spec), seconds=0.1))
    usual_s, slow_s = found.own_s
    assert slow_s > WAIT_S > usual_s
    assert {"all-reduce", "waiting for ranks"} <= found.parts.keys()
    assert name_causes(spec.config, None, found)[0].kind == "straggling rank"
    assert not spec.storage.exists("")
