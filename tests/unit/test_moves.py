"""Batches on their way to a device."""

import dataclasses
from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from trainers.checkpoint.run_state import match_layout
from trainers.data.batch import tensors_of
from trainers.data.feed import Pinnable, copied
from trainers.model.precision import TABLE

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Sample:
    """A batch of a class of its own."""

    inputs: Tensor
    labels: Tensor
    name: str = "x"


class Recorded:
    """Copies that write down what happens when, and leave the batch unready
    until it is handed over.
    """

    def __init__(self, events):
        self.events = events
        self.pending = []

    def begin(self, batch):
        self.events.append(f"copy {batch}")
        self.pending.append(batch)
        return batch

    def hand_over(self, batch):
        # A wait covers everything that is in the copying stream: more than
        # this batch would be waited for in vain.
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
    """torch's own pinning passes dataclasses by, so their copies would wait
    for the device.
    """
    pinned = []

    def pin(tensor):
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    moved = torch.utils.data._utils.pin_memory.pin_memory(Pinnable(batch))
    before = tensors_of(batch)
    after = tensors_of(moved.batch)
    assert type(moved.batch) is type(batch)
    assert len(pinned) == len(before) > 0
    assert all(
        torch.equal(new, old) for new, old in zip(after, before, strict=True)
    )


# --- memory formats


def sgd(parameters):
    return SGD(parameters, lr=0.1, momentum=0.9, fused=True)


def adamw(parameters):
    return AdamW(parameters, lr=0.1, fused=True)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_moments_of_another_memory_format_are_taken_back_right(
    make, before, after
):
    """A fused step walks weight and moment in memory order: of two formats it
    would mix up the elements, silently.
    """
    inputs = torch.randn(
        2, 3, 9, 9, generator=torch.Generator().manual_seed(1)
    )

    def train(switch):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 8, 3)
        model = (
            TABLE["fp32"].with_layout(before, model, CPU).convert_model(model)
        )
        optimizer = make(model.parameters())
        for number in range(4):
            if switch and number == 2:
                kept = optimizer.state_dict()
                weights = model.state_dict()
                model = nn.Conv2d(3, 8, 3)
                model = (
                    TABLE["fp32"]
                    .with_layout(after, model, CPU)
                    .convert_model(model)
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
