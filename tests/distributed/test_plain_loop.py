"""What a plain PyTorch loop trains is trained as there on any number of ranks,
and after a resume.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.distributed.processes import run_processes
from tests.plain_loop import (
    KINDS,
    OPTIMIZERS,
    STEPS,
    Case,
    Drawn,
    Plain,
    configured,
    in_a_plain_loop,
    in_the_loop,
)
from trainers.errors import ConfigError

HINTS = get_type_hints(Case)
CASES = st.builds(
    Case,
    net=st.sampled_from(get_args(HINTS["net"])),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    weigh=st.sampled_from(get_args(HINTS["weigh"])),
    samples=st.integers(5, 40),
    batch=st.integers(1, 16),
    microbatch=st.integers(1, 16),
    clip=st.sampled_from([None, 0.1]),
)
EXAMPLES = max(2, settings.default.max_examples // 25)


def train_kinds(rank, world_size, path):
    for end in (6, STEPS):
        config = configured(max_steps=end, microbatch_size=2)
        found = [
            in_the_loop(make(), config, path / kind, rank, world_size)
            for kind, make in KINDS.items()
        ]
    return found


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(3, marks=pytest.mark.campaign)]
)
def test_every_kind_is_trained_as_by_a_plain_loop(world_size, tmp_path):
    ranks = run_processes(world_size, train_kinds, tmp_path)
    for number, (kind, make) in enumerate(KINDS.items()):
        expected = in_a_plain_loop(make(), configured())
        for found in ranks:
            same = partial("{}: {}".format, kind)
            torch.testing.assert_close(
                found[number], expected, rtol=1e-9, atol=1e-11, msg=same
            )


def train_cases(rank, world_size, path, cases):
    places = enumerate(cases)
    return [
        in_the_loop(
            Drawn(case), case.config(), path / str(place), rank, world_size
        )
        for place, case in places
    ]


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 3), st.lists(CASES, min_size=5, max_size=5))
def test_any_small_model_is_trained_as_by_a_plain_loop(world_size, cases):
    with tempfile.TemporaryDirectory() as directory:
        ranks = run_processes(world_size, train_cases, Path(directory), cases)
    for place, case in enumerate(cases):
        tolerance = 1e-6 if case.single else 1e-8
        expected = in_a_plain_loop(Drawn(case), case.config())
        for found in ranks:
            same = partial("{}: {}".format, case)
            torch.testing.assert_close(
                found[place],
                expected,
                rtol=tolerance,
                atol=tolerance,
                msg=same,
            )


class Apart(Plain):
    """Each rank changes a weight by itself."""

    def after_step(self, model, step):
        if step == 3:
            model[2].bias += 0.01 * dist.get_rank()


class LeftOut(Plain):
    """From a step on, no batch uses the second layer."""

    def model(self):
        return Halves()

    def after_step(self, model, step):
        model.whole = step < 4


class Halves(nn.Module):
    whole = True

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 2).double()
        self.second = nn.Linear(6, 2).double()

    def forward(self, inputs):
        return self.first(inputs) + (self.second(inputs) if self.whole else 0)


def refused(rank, world_size, path):
    rules = []
    for task in (Apart(), LeftOut()):
        with pytest.raises(ConfigError) as error:
            in_the_loop(
                task,
                configured(),
                path / type(task).__name__,
                rank,
                world_size,
            )
        rules.append(error.value.rule)
    return rules


def test_what_ranks_cannot_do_together_is_refused_by_name(tmp_path):
    for apart, left_out in run_processes(2, refused, tmp_path):
        assert "`2.bias`" in apart
        assert "`second.weight`, `second.bias`" in left_out
    assert not [*tmp_path.glob("*/checkpoints")]
