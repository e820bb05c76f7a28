"""Batches on CUDA: the same ones by every way, while the stream that copies
runs ahead; layouts.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.gpu.runs import CUDA, Images, make, train
from tests.specs import curve
from tests.tasks import Blobs
from trainers.config.sections import DataConfig
from trainers.data import feed as moves
from trainers.data.batch import tensors_of
from trainers.task import Task, task_feed

CPU = torch.device("cpu")
ROWS, WIDTH, BATCH = (
    96,
    250_000,
    8,
)  # 8 MB a batch: its copy takes longer than the launch of a kernel


@dataclass
class Sample:
    """A batch of a class of its own, which torch's pinning passes by."""

    inputs: Tensor
    labels: Tensor


class Rows(Dataset[Any]):
    """One sample at a time, each of its own values."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return torch.full((WIDTH,), float(index)), torch.tensor(index)


class Nested(Task):
    def collate(self, samples):
        inputs, labels = super().collate(samples)
        return {
            "pair": Sample(inputs, labels),
            "more": [inputs[:, :10].clone()],
        }


def order():
    return list(
        torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).split(
            BATCH
        )
    )


WAYS = {
    "pinned, two processes": DataConfig(num_workers=2, resident=False),
    "pinned, in this process": DataConfig(resident=False),
    "not pinned, one process": DataConfig(
        num_workers=1, resident=False, pin_memory=False
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", [Task(), Nested()], ids=["tuple", "nested"])
def test_batches_are_right_though_the_device_is_late(task, way, monkeypatch):
    """The computing stream is held up, so that a copy which did not wait, or
    memory freed too soon, shows.
    """
    pinned = []
    begin = moves.Copies.begin

    def spy(self, batch):
        pinned.extend(tensor.is_pinned() for tensor in tensors_of(batch))
        return begin(self, batch)

    monkeypatch.setattr(moves.Copies, "begin", spy)
    feed = task_feed(Rows(), task, WAYS[way], CUDA, sharers=1, seed=0)
    sums = []
    for _ in range(2):
        for batch in feed.batches(order(), training=True):
            torch.cuda._sleep(20_000_000)  # about ten milliseconds
            tensors = tensors_of(batch)
            assert all(tensor.device == CUDA for tensor in tensors)
            sums.append(
                torch.stack(
                    [tensors[0].double().sum(), tensors[1].double().sum()]
                )
            )
            del batch, tensors
    feed.close()
    expected = [
        [float(rows.sum()) * WIDTH, float(rows.sum())] for rows in order()
    ] * 2
    assert torch.stack(sums).tolist() == expected
    assert all(pinned) is way.startswith("pinned")


def test_resident_and_loaded_runs_have_one_loss_curve(device, tmp_path):
    ways = {
        "resident": {},
        "loaded": {"data__resident": False},
        "workers": {"data__num_workers": 2},
    }
    curves = []
    for name, options in ways.items():
        train(device, tmp_path / name, deterministic=True, **options)
        curves.append(curve(tmp_path / name))
    assert len(curves[0]) == 30
    assert curves[0] == curves[1] == curves[2]


def layouts(parts):
    return [
        parameter
        for parameter in parts.model.parameters()
        if parameter.ndim == 4
    ]


@pytest.mark.gpu
def test_convolutions_train_channels_last_by_default():
    parts, _ = make(CUDA, Images())
    assert parts.spec.channels_last
    assert all(
        weight.is_contiguous(memory_format=torch.channels_last)
        for weight in layouts(parts)
    )
    seen = []
    first = next(
        module
        for module in parts.model.modules()
        if isinstance(module, nn.Conv2d)
    )
    first.register_forward_pre_hook(
        lambda _, inputs: seen.append(
            inputs[0].is_contiguous(memory_format=torch.channels_last)
        )
    )
    for batch in parts.train_feed.batches([torch.arange(8)], training=True):
        parts.step(iter([batch]), [8], 8, idle=False)
    parts.close()
    assert seen == [True]
    parts, _ = make(CUDA, Blobs())
    assert not parts.spec.channels_last
    parts.close()


def test_a_run_goes_on_in_another_memory_format(device, tmp_path):
    """Weights and moments of a checkpoint keep their own format; a fused step
    would mix up elements of two.
    """
    task = Images(random=False)
    options = {
        "max_steps": 30,
        "deterministic": True,
        "checkpoint__every_steps": 10,
    }
    train(device, tmp_path / "whole", task, channels_last=False, **options)
    assert (
        train(
            device,
            tmp_path / "cut",
            task,
            looks=1,
            channels_last=True,
            **options,
        ).status
        == "stopped"
    )
    assert (
        train(
            device, tmp_path / "cut", task, channels_last=False, **options
        ).status
        == "done"
    )
    assert curve(tmp_path / "cut") == pytest.approx(
        curve(tmp_path / "whole"), rel=2e-2
    )
