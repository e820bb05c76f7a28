"""A loss of all samples of a step together: the random numbers, statistics and checkpoints of its two passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_loop import Context, Power, assert_same_run, config, train, weights
from tests.unit.test_recipes import Views, nt_xent
from trainers.errors import ConfigError
from trainers.loop.fit import fit
from trainers.task import Task

SETTINGS: dict[str, Any] = {"epochs": 2, "global_batch_size": 6, "lr_schedule": {"name": "constant"}}


class Normalised(Views):
    """BatchNorm, whose statistics belong to a microbatch."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).double()


def test_random_numbers_of_both_passes_are_the_same_and_a_resume_is_bit_equal(tmp_path: Path) -> None:
    """Where dropout drew anew in the second pass, the loss that is told would not be the one that is trained."""
    settings = config(**SETTINGS, microbatch_size=2)
    fit(Views(0.5), settings, Context(tmp_path / "whole"))
    with pytest.raises(Power):
        fit(Views(0.5), settings, Context(tmp_path / "cut", cut_at_step=5))
    fit(Views(0.5), settings, Context(tmp_path / "cut"))
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_the_gradient_is_that_of_the_passes_that_made_the_loss(tmp_path: Path) -> None:
    torch.manual_seed(3)
    task = Views(0.5)
    model = task.model()
    first, second = task.dataset("train").tensors
    order = torch.randperm(33, generator=torch.Generator().manual_seed(3))[:6]
    torch.manual_seed(3)
    outputs = [task.forward(model, (first[at], second[at])) for at in order.split(2)]
    nt_xent(*(torch.cat(parts) for parts in zip(*outputs, strict=True))).backward()
    wanted = {name: one.detach() - 0.1 * one.grad for name, one in model.named_parameters() if one.grad is not None}
    changes = {"optimizer": {"name": "sgd", "lr": 0.1}, "clip_grad_norm": None, "max_steps": 1}
    train(tmp_path, task, microbatch_size=2, global_batch_size=6, lr_schedule={"name": "constant"}, **changes)
    found = weights(tmp_path)
    assert wanted.keys() == found.keys()
    for name, one in wanted.items():
        torch.testing.assert_close(found[name], one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("microbatch", "passes"), [(6, 12), (3, 24)])
def test_statistics_count_each_microbatch_once(microbatch: int, passes: int, tmp_path: Path) -> None:
    """Two views: two passes of the layer for each microbatch of six steps; the last step of an epoch has 3 samples."""
    train(tmp_path, Normalised(), epochs=1, global_batch_size=6, microbatch_size=microbatch)
    last = 2 * (microbatch == 3)  # of three samples only one microbatch comes
    assert int(weights(tmp_path)["1.num_batches_tracked"]) == passes - last


def test_what_goes_by_a_mean_over_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the task defines joint_loss\(\)"):
        train(None, Views(), **SETTINGS, noise_scale=True)


def test_outputs_that_are_not_of_samples_are_refused() -> None:
    class Summed(Views):
        def forward(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            one, other = super().forward(model, batch)
            return one, other.mean(0)

        def joint_loss(self, outputs: Any) -> Tensor:
            return outputs[0].sum() + outputs[1].sum()

    with pytest.raises(ConfigError, match=r"must have a row for each of the 6 samples"):
        train(None, Summed(), **SETTINGS)


def test_a_task_without_any_loss_says_so() -> None:
    class Lossless(Task):
        pass

    with pytest.raises(TypeError, match=r"must define `loss\(\)`"):
        Lossless().loss(None, None)
