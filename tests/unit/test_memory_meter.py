"""The meter counts storages that are alive, whoever made them."""

from __future__ import annotations

import contextlib
import gc

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainers.step.memory_meter import MemoryMeter

BLOCK = 512


def test_a_storage_is_counted_once_and_while_it_lives() -> None:
    with MemoryMeter() as meter:
        tensor = torch.zeros(1024)
        views = [tensor[:10], tensor.view(32, 32), tensor.detach()]
        assert meter.live == 4096
        other = torch.ones(1)
        assert meter.live == 4096 + BLOCK, "as allocators round"
        del tensor
        assert meter.live == 4096 + BLOCK, "a view keeps it"
        del views, other
    gc.collect()
    assert meter.live == 0
    assert meter.peak == 4096 + BLOCK


def test_what_was_there_before_is_counted_when_it_is_told() -> None:
    module = nn.Linear(256, 256, bias=False)
    meter = MemoryMeter()
    meter.count(module.weight)
    meter.count(module.weight.T)
    with meter:
        module.weight.detach().add_(1)
    assert meter.live == meter.peak == 4 * 256 * 256


def test_a_storage_that_is_resized_is_as_large_as_it_is() -> None:
    with MemoryMeter() as meter:
        tensor = torch.zeros(1024)
        tensor.untyped_storage().resize_(0)
        assert meter.live == 0
        tensor.untyped_storage().resize_(8192)
        assert meter.live == 8192
    resize = torch.UntypedStorage.resize_
    assert "MemoryMeter" not in repr(resize.__qualname__), "torch's own again"
    tensor.untyped_storage().resize_(0)
    assert meter.live == 8192, "nothing is seen after its end"


def test_activations_are_those_of_the_module_that_made_them() -> None:
    model = nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 1))
    meter = MemoryMeter({model[0]: "first", model[1]: "second", model[2]: "third"})
    for parameter in model.parameters():
        meter.count(parameter)
    for _ in range(2):
        meter.restart()
        with meter:
            model.zero_grad()
            model(torch.zeros(64, 8)).sum().backward()
        assert meter.activations["first"] in (0, 4 * 64 * 1024), "its output is kept only where tanh does so"
        assert meter.activations["second"] == 4 * 64 * 1024
        assert meter.activations["third"] == 0, "a sum keeps nothing of it"
        assert set(meter.activations) <= {"first", "second", "third", ""}


def test_a_module_that_raises_is_left() -> None:
    class Raises(nn.Module):
        def forward(self) -> None:
            raise ValueError

    module = Raises()
    with MemoryMeter({module: "raises"}) as meter:
        with contextlib.suppress(ValueError):
            module()
        kept = torch.zeros(1024, requires_grad=True)
        (kept * 2).sum().backward()
    assert "raises" not in meter.activations


def test_fake_tensors_count_as_real_ones() -> None:
    def peak() -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Linear(256, 4))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with MemoryMeter() as meter:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.zeros(128, 32)).square().mean().backward()
                optimizer.step()
        return meter.peak

    real = peak()
    with FakeTensorMode():
        assert peak() == real
