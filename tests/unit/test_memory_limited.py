"""A device of so many bytes: which microbatch it takes is what the forecast says, and few run out of memory for it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.test_memory_forecast import forecaster
from trainers.devices.group import Group
from trainers.loop.memory_forecast import largest_microbatch
from trainers.loop.trained import make_trained
from trainers.step import microbatch
from trainers.step.memory_meter import MemoryMeter
from trainers.step.microbatch import Probe, choose_microbatch

CPU = torch.device("cpu")
SHARE = 4096


class Device(MemoryMeter):
    """Has no more than its capacity to give."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.ran_out = capacity, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if self.live > self.capacity:
            self.ran_out += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")
        return made

    def figures(self, device: torch.device) -> dict[str, int]:
        return {"allocated_bytes": self.live, "peak_bytes": self.peak}


def chosen(spec: Any, capacity: int, monkeypatch: pytest.MonkeyPatch, names_limit: bool) -> tuple[int, int]:
    """The microbatch that auto lands on, and how many were tried that ran out of memory."""
    group, task, device = Group(0, 1, CPU), spec.load_task(), Device(capacity)
    train = task.dataset("train")
    trained = make_trained(task, task.model(), spec.config, group)
    for tensor in (*trained.model.parameters(), *trained.model.buffers()):
        device.count(tensor)
    with monkeypatch.context() as patch:
        patch.setattr(microbatch, "memory_figures", device.figures)
        patch.setattr(microbatch, "reset_peak_memory", lambda _: device.restart())
        patch.setattr(microbatch, "room_bytes", lambda _: capacity - device.live if names_limit else None)
        patch.setattr("trainers.step.throwaway.Snapshot", _Unlimited)
        with device:
            size = choose_microbatch("auto", SHARE, Probe(trained.forward, trained.optimizer, train, group))
    return size, device.ran_out


class _Unlimited:
    """Copies in a memory of their own, as a GPU's are in the host's: here all that a probe changes may stay changed."""

    def __init__(self, *_: Any) -> None:
        pass

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    def restore(self) -> None:
        pass


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_the_largest_microbatch_is_the_predicted_one(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = 3 * 2**20
    sizes = {"global_batch_size": SHARE, "microbatch_size": "auto"}
    found, spec = forecaster(tmp_path, "Tied", activation_checkpointing=mode, **sizes)
    predicted = largest_microbatch(found.peak, SHARE, capacity)
    size, _ = chosen(spec, capacity, monkeypatch, names_limit=True)
    parts = -(-SHARE // predicted)
    assert size == -(-SHARE // parts), "the share in as few parts as the prediction says"


@pytest.mark.parametrize("mib", [2, 3, 5])
def test_sizes_that_cannot_fit_are_not_tried(
    tmp_path: Path, mib: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, spec = forecaster(tmp_path, "Tied", global_batch_size=SHARE)
    blind, blindly = chosen(spec, mib * 2**20, monkeypatch, names_limit=False)
    with caplog.at_level(logging.INFO):
        size, ran_out = chosen(spec, mib * 2**20, monkeypatch, names_limit=True)
    assert size == blind
    assert ran_out <= 1 < blindly
    assert "by what small ones take it cannot fit" in caplog.text


def test_a_small_one_that_runs_out_spares_the_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, spec = forecaster(tmp_path, "Tied", global_batch_size=SHARE)
    blind, blindly = chosen(spec, 2**20, monkeypatch, names_limit=False)
    size, ran_out = chosen(spec, 2**20, monkeypatch, names_limit=True)
    assert size == blind
    assert ran_out < blindly - 2


def test_a_share_that_fits_is_taken_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, spec = forecaster(tmp_path, "Tied", global_batch_size=SHARE)
    assert chosen(spec, 2**30, monkeypatch, names_limit=True) == (SHARE, 0)


def test_where_nothing_fits_it_is_said_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, spec = forecaster(tmp_path, "Tied", global_batch_size=SHARE)
    with pytest.raises(torch.OutOfMemoryError):
        chosen(spec, 2**17, monkeypatch, names_limit=True)
