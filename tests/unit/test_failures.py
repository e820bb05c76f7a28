"""Each kind of failure has a budget of restarts of its own; the run ends with
the first failure beyond it.
"""

import sys

import pytest

from tests.specs import make
from tests.tasks import Blobs
from trainers.config.sections import FailureConfig
from trainers.errors import RunFailedError
from trainers.launch.local import run_local
from trainers.on_ray.worker_group import FailurePolicy, as_failure
from trainers.storage import Storage


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_kind_restarts_as_often_as_its_budget_says(tmp_path, budget):
    policy = FailurePolicy(
        FailureConfig(error=budget, out_of_host_memory=5),
        Storage(tmp_path),
    )
    for _ in range(budget):
        policy.after_exception(None, {0: failure("error")})
    policy.after_exception(
        None, {0: failure("out_of_host_memory")}
    )  # counts for itself
    with pytest.raises(RunFailedError, match="of rank 0"):
        policy.after_exception(None, {0: failure("error")})


def test_a_lost_node_has_no_limit_and_a_smaller_microbatch_costs_no_restart(
    tmp_path,
):
    policy = FailurePolicy(FailureConfig(), Storage(tmp_path))
    for _ in range(50):
        policy.after_exception(None, {0: failure("node_lost")})
        policy.after_exception(
            None, {0: failure("out_of_memory", smaller=True)}
        )


@pytest.mark.parametrize("ended", ["node_lost", "gloo"])
def test_a_group_that_its_watchdogs_ended_has_hung(tmp_path, ended):
    """To Ray a watchdog's exit is a worker's death; what the ranks saved names
    the culprit first.
    """
    storage = Storage(tmp_path)
    storage.write("hangs/0.txt", b"of an earlier start")
    policy = FailurePolicy(FailureConfig(hung=0), storage)
    policy.after_exception(None, {0: failure("node_lost")})
    storage.write(
        "hangs/1-rank-0.txt",
        b"rank 0 in the barrier after setup, waiting for other ranks (at a.py:1)\n\n",
    )
    storage.write("hangs/2-rank-1.txt", b"rank 1 in setup (at b.py:2)\n\n...")
    error = (
        failure("node_lost")
        if ended == "node_lost"
        else RunFailedError("error", "gloo", follows=True)
    )
    with pytest.raises(RunFailedError) as met:
        policy.after_exception(None, {0: error})
    assert met.value.status == "hung"
    assert met.value.message == (
        "rank 1 in setup (at b.py:2); rank 0 in the barrier after setup, waiting for other ranks (at a.py:1)"
    )


class WorkerHealthCheckFailedError(Exception):
    def __init__(self, failure):
        super().__init__("A worker health check failed.")
        self.health_check_failure = failure


class ActorDiedError(Exception):
    """With Ray's own words."""


DIED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: RayTrainWorker\n\tactor_id: 9c\n"
    "\tpid: 4711\n\tnamespace: n\n\tip: 10.0.0.7\nThe actor {}"
)


@pytest.mark.parametrize(
    ("words", "how"),
    [
        (
            "is dead because its worker process has died. Worker exit detail: connection error code 2. End of file.",
            "its worker process has died",
        ),
        ("died because its node has died. Node Id: 12", "its node has died"),
    ],
)
def test_a_dead_worker_of_rays_says_who_died_and_how(words, how):
    found = as_failure(
        1, WorkerHealthCheckFailedError(ActorDiedError(DIED.format(words)))
    )
    assert (found.status, found.follows) == ("node_lost", False)
    assert found.message.startswith("rank 1: The actor ")
    assert how in found.message


def test_of_a_dead_worker_and_a_broken_collective_the_death_is_the_cause(
    tmp_path,
):
    policy = FailurePolicy(FailureConfig(node_lost=0), Storage(tmp_path))
    gloo = RuntimeError(
        "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"
    )
    dead = WorkerHealthCheckFailedError(
        ActorDiedError(DIED.format("died because its node has died."))
    )
    with pytest.raises(RunFailedError) as met:
        policy.after_exception(None, {0: gloo, 1: dead})
    assert met.value.status == "node_lost"
    assert met.value.message.startswith(
        "rank 1: The actor died because its node"
    )


def failure(status, smaller=False):
    return RunFailedError(status, "of rank 0", 1.0, smaller=smaller)


class Leaves(Blobs):
    def loss(self, outputs, batch):
        sys.exit()


def test_a_task_that_leaves_the_process_has_failed(tmp_path):
    with pytest.raises(
        RuntimeError, match="ended the process with exit code None"
    ):
        run_local(make(tmp_path, task=f"{__name__}:Leaves"))
