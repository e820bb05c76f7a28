"""`ema` and `checkpoint.parameters: trained` on two ranks: replicas and shards
are as one worker, and resume.
"""

import pytest
import torch
from torch import nn

from tests.distributed.processes import run_processes
from tests.specs import ranked, train_on, whole_state
from tests.tasks import Blobs

STEPS = 12


class Whole(nn.Sequential):
    """None of its layers is a unit of fsdp: all are the root's."""


class Rooted(Blobs):
    def model(self):
        return Whole(*super().model())


class Based(Blobs):
    """The first layer is a frozen base."""

    def model(self):
        model = super().model()
        model[0].requires_grad_(False)
        return model


def run(rank, world_size, path, strategy, steps=STEPS, task=Rooted, **dotted):
    dotted |= {
        "global_batch_size": 24,
        "max_steps": steps,
        "evaluate.every_steps": 5,
        "ema.decay": 0.9,
    }
    dotted |= {"strategy": strategy, "microbatch_size": 5}
    made = task(samples=96, dtype="float64")
    return train_on(made, ranked(rank, world_size, path), **dotted).metrics


def train_all(rank, world_size, path):
    found = []
    for strategy in ("ddp", "fsdp"):
        run(rank, world_size, path / f"cut-{strategy}", strategy, steps=7)
        run(rank, world_size, path / f"cut-{strategy}", strategy)
        found.append(
            run(rank, world_size, path / f"whole-{strategy}", strategy)
        )
    trained = {"checkpoint.parameters": "trained"}
    for name, strategy, steps in (
        ("frozen-ddp", "ddp", STEPS),
        ("frozen-fsdp", "fsdp", STEPS),
        ("frozen-cut", "fsdp", 7),
        ("frozen-cut", "ddp", 9),
        ("frozen-cut", "fsdp", STEPS),
    ):
        run(rank, world_size, path / name, strategy, steps, Based, **trained)
    return found


def state(path):
    """The averages, and the model's own weights as `own.<name>`."""
    read = whole_state(path, STEPS)
    model = read["model"]
    return model | {
        f"own.{name}": one for name, one in read["ema"]["own"].items()
    }


def test_replicas_and_shards_have_the_averages_of_one_worker(tmp_path):
    alone = run(0, 1, tmp_path / "alone", "ddp")
    expected = state(tmp_path / "alone")
    assert not any(
        torch.equal(expected[name], expected[f"own.{name}"])
        for name in list(expected)[:4]
    )
    for metrics in run_processes(2, train_all, tmp_path)[0]:
        assert metrics == pytest.approx(alone, rel=1e-12)
    for strategy in ("ddp", "fsdp"):
        whole, cut = (
            state(tmp_path / f"{name}-{strategy}") for name in ("whole", "cut")
        )
        assert whole.keys() == cut.keys() == expected.keys()
        for name, tensor in whole.items():
            assert torch.equal(tensor, cut[name]), name
            torch.testing.assert_close(
                tensor, expected[name], rtol=1e-12, atol=1e-14
            )
    base, *others = (
        whole_state(tmp_path / f"frozen-{name}", STEPS)
        for name in ("ddp", "fsdp", "cut")
    )
    assert list(base["model"]) == ["2.weight", "2.bias"], (
        "the frozen part stays out"
    )
    assert list(base["frozen"]) == ["0.weight", "0.bias"]
    for found in others:
        assert found["frozen"] == base["frozen"]
        for one, other in (
            (found["model"], base["model"]),
            (found["ema"]["own"], base["ema"]["own"]),
        ):
            assert one.keys() == other.keys()
            for key, tensor in one.items():
                torch.testing.assert_close(
                    tensor, other[key], rtol=1e-10, atol=1e-12
                )
