"""A process group of one rank: the collectives of a run on one GPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

from tests.gpu.runs import CUDA, Images, train
from tests.specs import curve
from trainers.devices.group import join_group, leave_group
from trainers.model.strategy import Replicated


@pytest.mark.gpu
@pytest.mark.parametrize(
    "backend",
    ["gloo", pytest.param("nccl", marks=pytest.mark.real_gpu("nccl"))],
)
def test_a_group_of_one_rank_trains_as_no_group(
    backend, tmp_path, monkeypatch
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    train(CUDA, tmp_path / "alone", Images(), deterministic=True)
    join_group(backend, HashStore(), rank=0, world_size=1, device_index=0)
    try:
        train(CUDA, tmp_path / "in a group", Images(), deterministic=True)
        ones = torch.ones(3, device=CUDA)
        dist.all_reduce(ones)
        gathered = [None]
        dist.all_gather_object(gathered, {"rank": 0})
        layer = nn.Linear(3, 2, device=CUDA)
        replicated = Replicated(layer, device_ids=[0])
        replicated(ones).sum().backward()
        gradient = layer.weight.grad
        del replicated
    finally:
        leave_group(failed=False)
    assert curve(tmp_path / "in a group") == curve(tmp_path / "alone")
    assert ones.tolist() == [1, 1, 1]
    assert gathered == [{"rank": 0}]
    assert gradient is not None
    assert gradient.tolist() == [[1, 1, 1], [1, 1, 1]]
