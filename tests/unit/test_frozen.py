"""`checkpoint.parameters: trained`: checkpoints without the frozen part;
resumed to the bit; another base refused.
"""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.specs import whole_state
from tests.unit.test_loop import (
    Context,
    Tiny,
    check_resume,
    config,
    curve,
    train,
)
from trainers.errors import CheckpointError, ConfigError
from trainers.loop.fit import fit

TRAINED = {
    "checkpoint": {"every_steps": 1, "parameters": "trained", "keep": 99}
}


class LowRank(nn.Module):
    """An update of rank 2, as LoRA has it."""

    def __init__(self, rows, columns):
        super().__init__()
        self.down = nn.Parameter(torch.randn(2, columns))
        self.up = nn.Parameter(torch.zeros(rows, 2))

    def forward(self, weight):
        return weight + self.up @ self.down


class Adapted(Tiny):
    """A base from elsewhere, frozen, with two adapters; BatchNorm's statistics
    move all the same.
    """

    def __init__(self, base=1, changes=""):
        super().__init__()
        self.base = base
        self.changes = changes

    def model(self):
        model = super().model()
        generator = torch.Generator().manual_seed(self.base)
        for parameter in model.parameters():
            parameter.requires_grad_(False).add_(
                torch.randn(parameter.shape, generator=generator)
            )
        for index in (0, 4):
            parametrize.register_parametrization(
                model[index], "weight", LowRank(*model[index].weight.shape)
            )
        return model

    def after_step(self, model, step):
        if step == 3 and self.changes == "by hand":
            model[0].bias.mul_(0.5)
        if step == 3 and self.changes == "unfrozen":
            model[0].bias.requires_grad_(True)


def state(path, step=15):
    return whole_state(path, step)


LEARNED = {
    f"{index}.parametrizations.weight.0.{name}"
    for index in (0, 4)
    for name in ("down", "up")
}
STATISTICS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_checkpoints_hold_what_is_trained_and_all_buffers(tmp_path):
    train(tmp_path / "all", Adapted(), checkpoint={"every_steps": 1})
    train(tmp_path / "trained", Adapted(), **TRAINED)
    assert curve(tmp_path / "trained") == curve(tmp_path / "all")
    whole = state(tmp_path / "all")
    part = state(tmp_path / "trained")
    assert part["model"].keys() == LEARNED | STATISTICS
    assert all(
        torch.equal(one, whole["model"][name])
        for name, one in part["model"].items()
    )
    assert (
        part["frozen"].keys() == whole["model"].keys() - part["model"].keys()
    )
    assert "frozen" not in whole


class Given(Adapted):
    """Its optimizer has the frozen part, too, as in many scripts."""

    def optimizer(self, model, config):
        return torch.optim.AdamW(model.parameters(), config.optimizer.lr)


@pytest.mark.parametrize(
    ("task", "more"),
    [
        (Adapted, {}),
        (Given, {"ema": {"decay": 0.9}}),
        (Adapted, {"precision": "bf16-pure"}),
    ],
)
def test_a_resume_is_bit_equal(more, task, tmp_path):
    check_resume(tmp_path, task, 7, **TRAINED, **more)


def test_another_base_is_refused_by_name(tmp_path):
    train(tmp_path, Adapted(), **TRAINED)
    longer = config(**TRAINED, epochs=4)
    with pytest.raises(
        CheckpointError,
        match=r"trained on a different base: the frozen `0\.bias` differs",
    ):
        fit(Adapted(base=2), longer, Context(tmp_path))
    with pytest.raises(
        CheckpointError,
        match=r"trained on a different base: the frozen `0\.bias`",
    ):
        fit(Tiny(), longer, Context(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"a different `checkpoint\.parameters`"
    ):
        fit(Adapted(), config(epochs=4), Context(tmp_path))
    assert fit(Adapted(), longer, Context(tmp_path)).steps == 20


@pytest.mark.parametrize("changes", ["by hand", "unfrozen"])
def test_what_changes_all_the_same_is_not_lost_in_silence(changes, tmp_path):
    with pytest.raises(
        ConfigError,
        match=re.escape(
            '`checkpoint.parameters: "trained"` leaves out parameters that model() froze, and `0.bias` has since been'
        ),
    ):
        train(tmp_path, Adapted(changes=changes), **TRAINED)
    assert sorted(
        path.name[-1] for path in (tmp_path / "checkpoints").iterdir()
    ) == [
        "1",
        "2",
    ]


class OnlyTrained(Adapted):
    def optimizer(self, model, config):
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, config.optimizer.lr)


class Loaded(Tiny):
    def model(self):
        return nn.Sequential(super().model().eval())


def test_a_block_that_trains_in_evaluation_mode_is_named(tmp_path, caplog):
    train(tmp_path, Loaded())
    assert "leaves `0` in evaluation mode" in caplog.text


def test_an_unfrozen_parameter_that_no_optimizer_has_is_named(
    tmp_path, caplog
):
    train(tmp_path, OnlyTrained(changes="unfrozen"))
    assert [
        r for r in caplog.messages if "no optimizer has" in r and "0.bias" in r
    ]
