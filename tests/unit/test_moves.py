"""Batches on their way to a device, and the sentence that names a tensor which stayed
behind.

The `meta` device stands for the other one: torch refuses to mix it with a CPU as it
refuses CUDA.
"""

import dataclasses
from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset

from trainers.causes import failure_of
from trainers.checkpoint.run_state import match_layout
from trainers.config.sections import DataConfig
from trainers.data.feed import Pinnable, copied
from trainers.devices.group import Group
from trainers.errors import DeviceMismatchError
from trainers.model.precision import TABLE
from trainers.step.evaluation import evaluate
from trainers.step.forward import ForwardPass, named_tensors
from trainers.step.microbatch import Probe, choose_microbatch
from trainers.task import Task, task_feed

CPU = torch.device("cpu")
META = torch.device("meta")
Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Sample:
    """A batch of a class of its own."""

    inputs: Tensor
    labels: Tensor
    name: str = "x"


class Recorded:
    """Copies that write down what happens when, and leave the batch unready until it is
    handed over.
    """

    def __init__(self, events):
        self.events = events
        self.pending = []

    def begin(self, batch):
        self.events.append(f"copy {batch}")
        self.pending.append(batch)
        return batch

    def hand_over(self, batch):
        # A wait covers everything that is in the copying stream: more than this batch
        # would be waited for in vain.
        assert self.pending == [batch]
        self.pending.clear()
        self.events.append(f"wait {batch}")
        return batch


def traced(ahead, count=3):
    events = []

    def load():
        for number in range(count):
            events.append(f"load {number}")
            yield number

    for batch in copied(load(), Recorded(events), ahead):
        events.append(f"step {batch}")
    return events


def test_the_next_copy_begins_before_the_step_at_hand():
    expected = "load 0, copy 0, wait 0, load 1, copy 1, step 0, wait 1, load 2, copy 2, step 1, wait 2, step 2"
    assert ", ".join(traced(ahead=True)) == expected


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(2), torch.zeros(2)),
        [torch.ones(2), {"x": torch.ones(1)}],
        Pair(torch.ones(2), "word"),
        Sample(torch.ones(2), torch.zeros(2)),
        torch.ones(3),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_pinning_keeps_every_nesting(batch, monkeypatch):
    """torch's own pinning passes dataclasses by, so their copies would wait for the
    device.
    """
    pinned = []

    def pin(tensor):
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    moved = torch.utils.data._utils.pin_memory.pin_memory(Pinnable(batch))
    before = list(named_tensors(batch, "batch"))
    after = list(named_tensors(moved.batch, "batch"))
    assert type(moved.batch) is type(batch)
    assert len(pinned) == len(before) > 0
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(
        torch.equal(new, old) for (_, new), (_, old) in zip(after, before, strict=True)
    )


# --- tensors left behind


class Plain(nn.Module):
    """Its mask is a plain attribute: `to()` does not move it."""

    def __init__(self, where):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.masks = [torch.ones(2, device=where)]

    def forward(self, inputs):
        return self.layer(inputs) * self.masks[0]


class Buffered(Plain):
    def __init__(self, where):
        super().__init__(CPU)
        self.register_buffer("scale", torch.ones(2, device=where))

    def forward(self, inputs):
        return self.layer(inputs) * self.scale


class Weighted(Task):
    """Class weights of a loss, the usual tensor that nobody moves."""

    def __init__(self, where=CPU, made=CPU):
        self.balance = {"classes": torch.ones(2, device=where)}
        self.made = made

    def loss(self, outputs, batch):
        labels = (
            batch.labels if isinstance(batch, (Sample, Holder)) else batch["labels"]
        )
        made = torch.ones(len(labels), device=self.made)
        per_sample = nn.functional.cross_entropy(
            outputs, labels, weight=self.balance["classes"], reduction="none"
        )
        return (per_sample * made).mean()

    def forward(self, model, batch):
        return model(
            batch.inputs if isinstance(batch, (Sample, Holder)) else batch["inputs"]
        )


class Holder:
    """No nesting that is moved: a class without fields."""

    def __init__(self, inputs, labels):
        self.inputs = inputs
        self.labels = labels


def good():
    return {"inputs": torch.ones(4, 3), "labels": torch.zeros(4, dtype=torch.int64)}


def cases():
    far = {name: tensor.to(META) for name, tensor in good().items()}
    return {
        "batch": (
            Weighted(),
            Plain(CPU),
            good() | {"inputs": far["inputs"]},
            "`batch['inputs']` on meta cannot",
        ),
        "dataclass": (
            Weighted(),
            Plain(CPU),
            Sample(far["inputs"], good()["labels"]),
            "`batch.inputs` on meta",
        ),
        "object": (
            Weighted(),
            Plain(CPU),
            Holder(far["inputs"], good()["labels"]),
            "`batch.inputs` on meta",
        ),
        "parameter": (
            Weighted(),
            Plain(CPU).to(META),
            good(),
            "`model.layer.weight` on meta",
        ),
        "buffer": (Weighted(), Buffered(META), good(), "`model.scale` on meta"),
        "attribute": (
            Weighted(),
            nn.Sequential(Plain(META)),
            good(),
            "`0.masks[0]` on meta",
        ),
        "task": (
            Weighted(META),
            Plain(CPU),
            good(),
            "`Weighted.balance['classes']` on meta",
        ),
        "made in loss": (
            Weighted(made=META),
            Plain(CPU),
            good(),
            "forward() or loss() makes a tensor",
        ),
    }


FIXES = {
    "attribute": "register_buffer()",
    "task": "where they are used",
    "object": "dataclasses",
    "made in loss": "device=",
}


@pytest.mark.parametrize("case", list(cases()))
def test_a_tensor_on_another_device_is_named_with_both_devices(case):
    task, model, batch, words = cases()[case]
    forward = ForwardPass(model, task, TABLE["fp32"], CPU)
    with pytest.raises(DeviceMismatchError) as raised:
        forward.loss(batch)
    text = str(raised.value)
    assert words in text
    assert "cpu" in text
    assert FIXES.get(case, "") in text
    assert len(text.splitlines()) == 1
    failed = failure_of(raised.value, rank=1)
    assert failed.status == "error"
    assert words in failed.message


def test_the_probe_and_evaluation_name_it_too():
    class Far(Weighted):
        def transform(self, batch, training):
            return {"inputs": batch[0].to(META), "labels": batch[1]}

    data = TensorDataset(torch.ones(6, 3), torch.zeros(6, dtype=torch.int64))
    model = Plain(CPU)
    group = Group(0, 1, CPU)
    task = Far()
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    with pytest.raises(DeviceMismatchError, match=r"batch\['inputs'\]"):
        choose_microbatch(
            "auto",
            4,
            Probe(ForwardPass(model, task, TABLE["fp32"], CPU), optimizer, data, group),
        )
    feed = task_feed(data, task, DataConfig(), CPU, sharers=1, seed=0)
    with pytest.raises(DeviceMismatchError, match=r"batch\['inputs'\]"):
        evaluate(ForwardPass(model, task, TABLE["fp32"], CPU), feed, 4, group)


# --- memory formats


def sgd(parameters):
    return SGD(parameters, lr=0.1, momentum=0.9, fused=True)


def adamw(parameters):
    return AdamW(parameters, lr=0.1, fused=True)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_moments_of_another_memory_format_are_taken_back_right(make, before, after):
    """A fused step walks weight and moment in memory order: of two formats it would mix
    up the elements, silently.
    """
    inputs = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(1))

    def train(switch):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 8, 3)
        model = TABLE["fp32"].with_layout(before, model, CPU).convert_model(model)
        optimizer = make(model.parameters())
        for number in range(4):
            if switch and number == 2:
                kept = optimizer.state_dict()
                weights = model.state_dict()
                model = nn.Conv2d(3, 8, 3)
                model = (
                    TABLE["fp32"].with_layout(after, model, CPU).convert_model(model)
                )
                model.load_state_dict(weights)
                optimizer = make(model.parameters())
                optimizer.load_state_dict(kept)
                match_layout(optimizer)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        return model.weight.detach().contiguous()

    torch.testing.assert_close(
        train(switch=True), train(switch=False), rtol=1e-5, atol=1e-6
    )
