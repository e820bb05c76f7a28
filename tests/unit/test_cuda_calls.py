"""What a worker calls of CUDA and NCCL, in which thread and order; seen without a GPU."""

import os
import threading
from types import SimpleNamespace

import pytest
import ray
import ray.train
import torch
from ray.train.v2._internal.util import construct_train_func

from tests.specs import make
from tests.tasks import Blobs
from trainers.context import RunContext
from trainers.devices import group as group_of_ranks
from trainers.errors import TooLargeError
from trainers.loop import _dry_run, build, fit
from trainers.on_ray import worker_group
from trainers.on_ray.worker_group import GroupConfig


@pytest.mark.parametrize(
    ("backend", "expected"), [("nccl", [("training", 3)]), ("gloo", [])]
)
def test_ray_trains_in_a_thread_that_is_bound(monkeypatch, backend, expected):
    """The current device is each thread's own, and Ray joins the group in another one."""
    bound = []
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda index: bound.append((threading.current_thread().name, index)),
    )
    monkeypatch.setattr(worker_group, "own_gpu", lambda: 3)
    trained = []
    function = construct_train_func(
        lambda: trained.append(len(bound)),
        None,
        GroupConfig(backend).train_func_context,
        "train_loop_per_worker",
    )
    thread = threading.Thread(target=function, name="training")
    thread.start()
    thread.join()
    assert bound == expected
    assert trained == [len(expected)]


@pytest.mark.parametrize(("assigned", "visible"), [([], ""), (["1"], "0,1")])
def test_a_worker_without_a_gpu_sees_none_before_torch_looks(
    monkeypatch, assigned, visible
):
    """Else `device: auto` is the node's first GPU for all workers of `use_gpu: false`."""
    seen = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(
        ray,
        "get_runtime_context",
        lambda: SimpleNamespace(get_accelerator_ids=lambda: {"GPU": assigned}),
    )
    of_worker = dict.fromkeys(
        (
            "world_rank",
            "world_size",
            "local_rank",
            "local_world_size",
            "node_rank",
        ),
        lambda: 1,
    )
    context_of_worker = SimpleNamespace(
        **{f"get_{name}": value for name, value in of_worker.items()}
    )
    monkeypatch.setattr(ray.train, "get_context", lambda: context_of_worker)
    monkeypatch.setattr(torch.distributed, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(worker_group, "own_gpu", lambda: 0)
    monkeypatch.setattr(
        group_of_ranks,
        "join_group",
        lambda *_: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]),
    )
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GLOO_SOCKET_IFNAME",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    worker_group._join("127.0.0.1", 1, 3, "gloo")
    assert seen == [visible]


def test_buckets_that_do_not_fit_lead_to_a_smaller_microbatch(
    tmp_path, monkeypatch
):
    """DDP makes them in its first backward pass, after the probe."""
    config = make(tmp_path, microbatch_size="auto").config
    told = []

    class Context(RunContext):
        def too_large(self, microbatch_size):
            told.append(microbatch_size)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    context = Context(None, "test")
    replica = build.build_replica(Blobs(), config, context)
    monkeypatch.setattr(type(replica.step.forward), "loss", full)
    with pytest.raises(TooLargeError):
        _dry_run.settle_buckets(
            replica, replica.model
        )  # a single rank is not wrapped
    assert told == [replica.microbatch_size]


@pytest.mark.parametrize("hang_timeout_s", [1800.0, 7200.0])
def test_collectives_wait_longer_than_the_watchdog(
    tmp_path, monkeypatch, hang_timeout_s
):
    """Else NCCL's abort is first, and the run ends as `node_lost` in place of `hung`."""
    waits = []

    def attempt(*_):
        assert waits, "before anything waits for other ranks"
        return "done"

    monkeypatch.setattr(
        torch.distributed, "set_timeout", waits.append, raising=False
    )
    monkeypatch.setattr(fit, "_attempt", attempt)
    config = make(tmp_path, failure__hang_timeout_s=hang_timeout_s).config
    assert (
        fit.fit(Blobs(), config, RunContext(None, "test", world_size=2))
        == "done"
    )
    assert waits[0].total_seconds() > max(
        hang_timeout_s, config.failure.of_phases_s
    )
