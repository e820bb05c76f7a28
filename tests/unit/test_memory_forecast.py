"""`python -m trainers memory`: steps of fake tensors say what real ones would take."""

from __future__ import annotations

import gc

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.specs import make, tree
from tests.tasks import Blobs
from trainers.__main__ import main
from trainers.devices.device import memory_figures
from trainers.devices.group import Group
from trainers.errors import ConfigError
from trainers.launch import memory_forecast
from trainers.launch.memory_forecast import (
    Forecaster,
    MemoryMeter,
    largest_microbatch,
    memory_page,
)
from trainers.loop.build import make_trained
from trainers.step.microbatch import Probe

CPU = torch.device("cpu")
WIDE = 8192
MOST = 2**24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, inputs):
        return self.linear(inputs).tanh().sin()


class Tied(Blobs):
    """Two layers of one weight, a frozen one, and blocks."""

    def model(self):
        blocks = nn.Sequential(*(Block() for _ in range(3)))
        first = nn.Linear(self.features, 64)
        second = nn.Linear(64, 64)
        last = nn.Linear(64, 64)
        last.weight = second.weight
        return nn.Sequential(
            first, second, blocks, last, nn.Linear(64, 4).requires_grad_(False)
        )


class Reads(Tied):
    """The model depends on values: it cannot be made without memory."""

    def model(self):
        model = super().model()
        if float(next(model.parameters()).detach().sum()) != 0:
            model.append(nn.Linear(4, 4))
        return model


class Ragged(Blobs):
    """Rows as long as the longest of their batch."""

    def model(self):
        return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 4))

    def worst_case_batch(self, dataset, size):
        _, labels = super().worst_case_batch(dataset, size)
        return torch.zeros(
            size, max(5 + 7 * index % 40 for index in range(size)), 1, dtype=self.dtype
        ), labels

    def forward(self, model, batch):
        return model(batch[0]).mean(1)


class Text(Blobs):
    """Samples are words, of which the transform makes numbers."""

    def dataset(self, split):
        return [("word " * (1 + index % 5), index % 4) for index in range(self.samples)]

    def transform(self, batch, training):
        texts, labels = batch
        return torch.tensor(
            [[float(len(text))] * self.features for text in texts]
        ), labels


class Graph:
    """What a library of graphs makes of its samples: no tuple, no mapping, so its own
    tensors are not counted.
    """

    def __init__(self, samples):
        self.nodes = torch.cat([torch.ones(2 + label, 12) for _, label in samples])
        self.graph = torch.cat(
            [
                torch.full((2 + label,), index)
                for index, (_, label) in enumerate(samples)
            ]
        )
        self.labels = torch.tensor([label for _, label in samples])


class Graphs(Text):
    """Nodes of all samples in one tensor, and their sum by sample."""

    def collate(self, samples):
        return Graph(samples)

    def transform(self, batch, training):
        return batch

    def forward(self, model, batch):
        outputs = model(batch.nodes)
        return outputs.new_zeros(len(batch.labels), 4).index_add(
            0, batch.graph, outputs
        )

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch.labels)


class Huge(Blobs):
    """A gigabyte of parameters."""

    def model(self):
        inner = [nn.Linear(WIDE, WIDE) for _ in range(4)]
        return nn.Sequential(nn.Linear(self.features, WIDE), *inner, nn.Linear(WIDE, 4))


class ByValue(Blobs):
    """A loss that looks at values."""

    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        return loss if float(loss.detach()) > 0 else loss * 2


def forecaster(tmp_path, task, **changes):
    spec = make(tmp_path, task=f"tests.unit.test_memory_forecast:{task}", **changes)
    return Forecaster(
        spec.load_task, spec.config, spec.load_task().dataset("train"), Group(0, 1, CPU)
    ), spec


def real(spec, size):
    """The same steps, taken."""
    group = Group(0, 1, CPU)
    task = spec.load_task()
    trained = make_trained(task, task.model(), spec.config, group)
    meter = MemoryMeter()
    averages = trained.ema.tensors if trained.ema else []
    for tensor in (*trained.model.parameters(), *trained.model.buffers(), *averages):
        meter.count(tensor)
    probe = Probe(trained.forward, trained.optimizer, task.dataset("train"), group)
    with meter:
        probe.take_steps(size, accumulates=size < spec.config.batch_size)
    return meter.peak


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("Tied", {"precision": "fp32", "ema__decay": 0.9}),
        ("Tied", {"precision": "bf16", "activation_checkpointing": "full"}),
        ("Tied", {"precision": "bf16-pure", "activation_checkpointing": "selective"}),
        ("Reads", {"precision": "bf16"}),
    ],
)
def test_fake_steps_take_what_real_ones_take(tmp_path, task, changes):
    found, spec = forecaster(
        tmp_path, task, global_batch_size=512, microbatch_size=512, **changes
    )
    for size in (16, 512):
        assert found(size).peak == pytest.approx(real(spec, size), rel=0.001)
    assert found(512) == found(512)


@pytest.mark.parametrize(
    ("task", "off"), [("Ragged", 0.02), ("Text", 0.02), ("Graphs", 0.15)]
)
def test_a_batch_whose_shape_is_not_by_its_samples_is_as_large_as_it_is(
    task, off, tmp_path
):
    found, spec = forecaster(tmp_path, task)
    for size in (1, 2, 24):
        assert found(size).peak == pytest.approx(real(spec, size), rel=off)


def test_checkpointing_takes_the_activations_that_it_says(tmp_path):
    changes = {"global_batch_size": 2048, "microbatch_size": 2048}
    kept, again = (
        forecaster(tmp_path, "Tied", activation_checkpointing=mode, **changes)[0](2048)
        for mode in ("none", "full")
    )
    assert kept.activations - again.activations == 3 * 2048 * 64 * 4, (
        "what tanh or sin keeps in each of three blocks"
    )
    assert kept.parameters == again.parameters


def test_it_takes_no_memory(tmp_path):
    before = memory_figures(CPU)["allocated_bytes"]
    found, _ = forecaster(tmp_path, "Huge")
    forecast = found(100_000)
    assert memory_figures(CPU)["peak_bytes"] - before < forecast.parameters // 2
    assert forecast.parameters > 2**30
    assert forecast.optimizer == pytest.approx(2 * forecast.parameters, rel=0.01)
    assert forecast.peak > 4 * forecast.parameters


@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1, max_size=4
    ),
    st.integers(1, 10**10),
    st.integers(1, 5000),
)
def test_the_largest_microbatch_fits_and_no_much_larger_one(moments, capacity, start):
    asked = []

    def peak(size):
        asked.append(size)
        return max(base + each * size for base, each in moments)

    found = largest_microbatch(peak, start, capacity, MOST)
    if found == 0:
        assert peak(1) > capacity
    else:
        assert peak(found) <= capacity
        assert found == MOST or peak(found + found // 50 + 2) > capacity
    assert len(asked) < 60


def test_the_page_says_what_each_precision_and_mode_takes(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        memory_forecast, "largest_microbatch", lambda peak, start, capacity, most: 1000
    )
    file = tmp_path / "train.yaml"
    changes = {"task": "tests.unit.test_memory_forecast:Tied", "precision": "bf16"}
    file.write_text(yaml.safe_dump(tree(tmp_path, **changes)))
    assert (
        main(
            [
                "memory",
                str(file),
                "--gpu",
                "H100 80GB",
                "--activation_checkpointing",
                "full",
            ]
        )
        == 0
    )
    rows = [line for line in capsys.readouterr().out.splitlines() if " MiB" in line]
    assert [line.endswith("1,000 (900 to 1,100)") for line in rows] == [True] * 9
    (own,) = [line for line in rows if line.startswith("*")]
    assert own.split()[1:5] == ["bf16,", "fp16,", "fp8", "full"]
    assert not (tmp_path / "runs").exists(), "nothing is written"


def test_samples_that_have_to_be_read_are_not_read_by_the_million(
    tmp_path,
):
    rows = [
        line
        for line in memory_page(make(tmp_path, task=f"{__name__}:Text"), "H100 80GB")
        if " MiB" in line
    ]
    assert [line.endswith("4,096 or more") for line in rows] == [True] * 3


def test_a_mode_that_finds_no_block_is_left_out_and_a_card_may_be_too_small(
    tmp_path,
):
    lines = list(memory_page(make(tmp_path), "tiny 0.5GB"))
    rows = [line for line in lines if " MiB" in line]
    assert [line.endswith("none: a single sample takes more") for line in rows] == [
        True
    ] * 3
    assert any(
        line.startswith("Without `activation_checkpointing: selective | full`")
        for line in lines
    )


@pytest.mark.parametrize(
    ("gpu", "changes", "field"),
    [
        ("A10G", {}, "--gpu"),
        ("A10G 24GB", {"task": "tests.unit.test_memory_forecast:ByValue"}, "task"),
        ("A10G 24GB", {"optimizer__name": "adamw8bit"}, "optimizer.name"),
    ],
)
def test_what_cannot_be_predicted_is_named(tmp_path, gpu, changes, field):
    with pytest.raises(ConfigError) as raised:
        list(memory_page(make(tmp_path, **changes), gpu))
    assert raised.value.field == field


def test_a_storage_is_counted_once_while_it_lives_and_as_large_as_it_is():
    with MemoryMeter() as meter:
        tensor = torch.zeros(1024)
        views = [tensor[:10], tensor.view(32, 32), tensor.detach()]
        assert meter.live == 4096
        small = torch.ones(1)
        assert meter.live == 4096 + 512, "as allocators round"
        del tensor, small
        assert meter.live == 4096, "a view keeps it"
        views[0].untyped_storage().resize_(8192)
        assert meter.live == 8192
        del views
    gc.collect()
    assert (meter.live, meter.peak) == (0, 8192)
