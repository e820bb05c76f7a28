"""Samplers of a task's own: the same order on every rank and after a resume,
and what cannot keep that is refused.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.unit.test_loop import (
    SAMPLES,
    Context,
    Power,
    Tiny,
    assert_same_run,
    check_resume,
    config,
    train,
)
from trainers.data.sampler import Drawn
from trainers.errors import CheckpointError, ConfigError
from trainers.loop.fit import fit

CPU = torch.device("cpu")
WEIGHTS = torch.arange(1.0, SAMPLES + 1)


@dataclass
class By:
    """A sampler that draws as `draw` says."""

    draw: Any

    def __iter__(self):
        return iter(self.draw())


class Epochs:
    """A curriculum: it looks at the epoch that it was told."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(
            [(self.epoch + number) % SAMPLES for number in range(SAMPLES)]
        )


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS.tolist(), 30),
    "weighted with a generator": lambda: WeightedRandomSampler(
        WEIGHTS.tolist(), 30, generator=torch.Generator().manual_seed(4)
    ),
    "by epoch": Epochs,
    "numpy": lambda: By(lambda: np.random.permutation(SAMPLES)),
    "python": lambda: By(lambda: random.sample(range(SAMPLES), 17)),
}


class Sampled(Tiny):
    """Notes the samples of each step by a column that only counts."""

    def __init__(self, sampler=None):
        super().__init__()
        self.given = sampler
        self.trained = [[0][:0]]

    def dataset(self, split):
        inputs, labels = super().dataset(split).tensors
        return TensorDataset(inputs, labels, torch.arange(len(labels)))

    def sampler(self, dataset, config):
        return self.given

    def transform(self, batch, training):
        if training:
            self.trained.append(batch[2].tolist())
        return super().transform(batch[:2], training)


def trained(sampler, path=None, **changes):
    task = Sampled(sampler)
    train(path, task, **changes)
    return [index for batch in task.trained for index in batch]


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_order_is_a_function_of_seed_and_epoch(name):
    def orders(epochs, seed=3):
        drawn = Drawn(SAMPLERS[name](), SAMPLES, seed, CPU)
        return [drawn(epoch).tolist() for epoch in epochs]

    random.seed(11), np.random.seed(11), torch.manual_seed(11)
    before = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(11), np.random.seed(11), torch.manual_seed(11)
    first = orders(range(4))
    assert (
        random.random(),
        np.random.rand(),
        torch.rand(()).item(),
    ) == before, "the caller's random state"
    assert orders([3, 0, 2, 1]) == [first[3], first[0], first[2], first[1]]
    assert len({tuple(order) for order in first}) == 4
    assert (orders([0], seed=4) != [first[0]]) == (name != "by epoch")


@pytest.mark.parametrize("name", ["weighted with a generator", "by epoch"])
def test_a_run_cut_at_any_step_goes_on_with_the_same_samples_and_losses(
    name, tmp_path
):
    reference = Sampled(SAMPLERS[name]())
    train(tmp_path / "whole", reference, epochs=2)
    every = [index for batch in reference.trained for index in batch]
    for cut in (1, 7):
        path = tmp_path / str(cut)
        again = Sampled(SAMPLERS[name]())
        with pytest.raises(Power):
            fit(
                Sampled(SAMPLERS[name]()),
                config(epochs=2),
                Context(path, cut_at_step=cut),
            )
        train(path, again, epochs=2)
        assert_same_run(path, tmp_path / "whole")
        rest = [index for batch in again.trained for index in batch]
        assert rest == every[-len(rest) :]
        assert 0 < len(rest) < len(every)


class Curriculum(Sampled):
    """Each evaluation makes the next epoch's samples others."""

    def __init__(self):
        super().__init__(
            By(lambda: torch.randperm(SAMPLES - self.seen)[:10].tolist())
        )

    def on_evaluate(self, metrics, step):
        self.seen += 1


def test_a_curriculum_goes_on(tmp_path, caplog):
    check_resume(tmp_path / "epochs", Curriculum, 4)
    assert "left out" not in caplog.text
    changes = {"max_steps": 6, "evaluate": {"every_steps": 1}}
    check_resume(tmp_path / "steps", Curriculum, 5, **changes)
    assert "000005 is left out: it has another order" in caplog.text


class Growing(Epochs):
    def __iter__(self):
        return iter(range(self.epoch + 5))


def own_numpy():
    generator = np.random.default_rng(0)
    return By(lambda: generator.permutation(SAMPLES))


REFUSED = {
    "batches": BatchSampler(
        SequentialSampler(range(SAMPLES)), 5, drop_last=False
    ),
    "no whole number": By(lambda: [0.5]),
    "nothing": By(list),
    "beyond the end": By(lambda: [0, SAMPLES]),
    "below the start": By(lambda: [-1]),
    "another order when asked again": own_numpy(),
    "more in each epoch": Growing(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_keeps_no_order_is_refused(name):
    with pytest.raises(ConfigError, match="sampler"):
        trained(REFUSED[name], epochs=2)


@pytest.mark.parametrize(("then", "now"), [
    ({"sampler": range(SAMPLES)}, {}),
    ({}, {"sampler": range(SAMPLES)}),
    ({"sampler": WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)},
     {"sampler": WeightedRandomSampler(WEIGHTS.tolist(), SAMPLES)}),
])  # fmt: skip
def test_a_run_does_not_go_on_in_another_order(then, now, tmp_path):
    def go(epochs, sampler=None, **changes):
        train(tmp_path, Sampled(sampler), epochs=epochs, **changes)

    go(1, **then)
    with pytest.raises(
        (ConfigError, CheckpointError), match="order of samples"
    ):
        go(2, **now)
    go(2, **then)
