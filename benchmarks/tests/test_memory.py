"""What is predicted of a step's memory is what torch's own trackers count."""

from __future__ import annotations

import pytest
import torch

from benchmarks.memory import SMALL, cases, one

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", SMALL)
def test_a_step_takes_what_was_predicted(name):
    work, sizes = SMALL[name]
    for changes in list(cases(sizes[-1], checkpoints=name != "cnn", strategy="ddp"))[
        ::3
    ]:
        assert one(work, changes, sizes[-1], 1, CPU)["ratio"] == pytest.approx(
            1, abs=0.1
        )


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.campaign)]
)
def test_so_it_does_on_two_ranks(strategy):
    work, sizes = SMALL["gpt"]
    changes = {
        "precision": "bf16",
        "activation_checkpointing": "none",
        "strategy": strategy,
    }
    row = one(work, {**changes, "microbatch_size": sizes[-1]}, sizes[-1], 2, CPU)
    assert row["ratio"] == pytest.approx(1, abs=0.1)
