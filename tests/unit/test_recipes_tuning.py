"""Fine-tuning as people write it, each beside a plain loop: equal losses, rates and ends; resumed to the bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

import tests.unit.test_predict as predicted
from tests.unit.test_loop import Context, Power, assert_same_run, config, evaluations, train, weights
from tests.unit.test_loop import curve as logged
from tests.unit.test_recipes import BATCH, SEED, SETTINGS, curve, descend, order, plain
from trainers import TrainConfig
from trainers.data.sampler import StepSampler
from trainers.inference.saved_run import export
from trainers.loop.fit import fit
from trainers.task import Task

pytestmark = pytest.mark.full


def labelled(rows: int, split: str) -> TensorDataset:
    inputs = torch.randn(rows, 5, generator=torch.Generator().manual_seed(len(split)), dtype=torch.float64)
    return TensorDataset(inputs, inputs.argmax(1) % 3)


class Classes(Task):
    """Three classes of 33 rows."""

    def dataset(self, split: str) -> TensorDataset:
        return labelled(33, split)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])


class LowRank(nn.Module):
    """A frozen layer and an update of rank 2 (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + 2.0 * self.up(self.down(inputs))  # type: ignore[no-any-return]


class Adapted(Classes):
    def model(self) -> nn.Module:
        return nn.Sequential(LowRank(nn.Linear(5, 16)), nn.Tanh(), LowRank(nn.Linear(16, 3))).double()


@pytest.mark.parametrize("microbatch", [1, 4, 6])
def test_low_rank_factors_by_hand(microbatch: int, tmp_path: Path) -> None:
    task = Adapted()
    rows, labels = task.dataset("train").tensors

    def optimizer(model: nn.Module) -> Optimizer:
        return SGD([one for one in model.parameters() if one.requires_grad], 0.2)

    wanted = plain(task, optimizer, lambda model, at: F.cross_entropy(model(rows[at]), labels[at]))
    checkpoint = {"every_steps": 1, "parameters": "trained"}
    assert curve(task, tmp_path, microbatch, checkpoint=checkpoint) == pytest.approx(wanted, rel=1e-12)
    state = torch.load(sorted(tmp_path.glob("checkpoints/*/state.pt"))[-1], weights_only=True)
    assert state["model"].keys() == {f"{layer}.{name}.weight" for layer in (0, 2) for name in ("down", "up")}


class WithPeft(predicted.Kept):
    """PEFT's own wrapper: adapters with dropout on both layers."""

    def model(self) -> nn.Module:
        import peft

        adapters = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["0", "4"], lora_dropout=0.1)
        return peft.get_peft_model(super().model(), adapters)  # type: ignore[no-any-return]


def test_a_model_of_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters alone are kept, a resume is bit-equal, and the commands take the base from the task."""
    pytest.importorskip("peft")
    kept = {"global_batch_size": 64, "checkpoint": {"every_steps": 2, "parameters": "trained"}}
    train(tmp_path / "whole", WithPeft(), **kept)
    with pytest.raises(Power):
        fit(WithPeft(), config(**kept), Context(tmp_path / "cut", cut_at_step=6))
    train(tmp_path / "cut", WithPeft(), **kept)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    monkeypatch.setattr(predicted, "Kept", WithPeft)
    spec = predicted.train(tmp_path / "run", checkpoint__parameters="trained")
    last = predicted.evaluations(spec)[-1]
    assert predicted.work(Path(spec.uri)).metrics == {name: one for name, one in last.items() if name[:4] == "val_"}
    predicted.work(Path(spec.uri), out=str(tmp_path / "out.parquet"))
    export(spec.uri, str(tmp_path / "out.safetensors"))
    exported = safetensors.torch.load_file(tmp_path / "out.safetensors")
    learned = {name for name in exported if "running" not in name and "tracked" not in name}
    assert len(learned) == 4
    assert all("lora_" in name for name in learned)


class Backbone(nn.Module):
    """A pretrained part with BatchNorm and a new head, as torchvision's tutorial on transfer learning has it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.backbone = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU()).requires_grad_(False)
        self.backbone[1].running_mean.normal_()
        self.head = nn.Linear(16, 3)
        self.double()

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        if self.how == "train":
            self.backbone.eval()
        return self

    def forward(self, rows: Tensor) -> Tensor:
        if self.how == "forward":
            self.backbone.eval()
        return self.head(self.backbone(rows))  # type: ignore[no-any-return]


class Transfer(Classes):
    def __init__(self, how: str) -> None:
        self.how = how

    def model(self) -> nn.Module:
        return Backbone(self.how)

    def optimizer(self, model: Any, config: TrainConfig) -> Optimizer:
        return SGD(model.head.parameters(), config.optimizer.lr, momentum=0.9)

    def schedule(self, optimizer: Optimizer, config: TrainConfig) -> StepLR:
        return StepLR(optimizer, step_size=1, gamma=0.1)


@pytest.mark.parametrize("how", ["forward", "train", "as it is"])
def test_transfer_learning(how: str, tmp_path: Path) -> None:
    """BatchNorm's statistics stay where the backbone is put into evaluation mode, and else move as in a plain loop."""
    task = Transfer(how)
    rows, labels = task.dataset("train").tensors
    torch.manual_seed(SEED)
    model = Backbone(how).train()
    optimizer = SGD(model.head.parameters(), 0.2, momentum=0.9)
    schedule, losses, rates = StepLR(optimizer, step_size=1, gamma=0.1), [], []
    for number, at in enumerate(order(task), 1):
        rates.append(optimizer.param_groups[0]["lr"])
        losses.append(descend(optimizer, F.cross_entropy(model(rows[at]), labels[at])))
        if number % 6 == 0:
            schedule.step()
            model.eval()
            with torch.no_grad():
                inputs, wanted = task.dataset("val").tensors
                val_loss = F.cross_entropy(model(inputs), wanted).item()
            model.train()
    train(tmp_path, task, **SETTINGS | {"lr_schedule": {"every": "epoch"}, "microbatch_size": BATCH})
    assert [loss for _, _, loss in logged(tmp_path)] == pytest.approx(losses, rel=1e-12)
    assert [rate for _, rate, _ in logged(tmp_path)] == pytest.approx(rates, rel=1e-12)
    assert evaluations(tmp_path)[-1][1] == pytest.approx(val_loss, rel=1e-12)
    mean = weights(tmp_path)["backbone.1.running_mean"]
    torch.manual_seed(SEED)
    assert torch.equal(mean, Backbone(how).backbone[1].running_mean) == (how != "as it is")


class Overfitting(Classes):
    """Labels without a pattern: the validation loss soon rises."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 3)).double()

    def dataset(self, split: str) -> TensorDataset:
        inputs = super().dataset(split).tensors[0]
        return TensorDataset(inputs, torch.randint(3, (33,), generator=torch.Generator().manual_seed(len(split))))


PLATEAU = {
    "epochs": 30,
    "global_batch_size": BATCH,
    "microbatch_size": BATCH,
    "seed": SEED,
    "optimizer": {"name": "sgd", "lr": 0.5},
    "lr_schedule": {"name": "ReduceLROnPlateau", "args": {"factor": 0.3, "patience": 1}},
    "early_stopping": {"metric": "val_loss", "patience": 4},
    "clip_grad_norm": None,
}


def until_it_stops(task: Task) -> tuple[list[float], list[float], list[float]]:
    """A plain loop: losses and rates of its steps, and the validation loss of its epochs."""
    rows, labels = task.dataset("train").tensors  # type: ignore[union-attr]
    inputs, wanted = task.dataset("val").tensors  # type: ignore[union-attr]
    torch.manual_seed(SEED)
    model = task.model()
    optimizer = SGD(model.parameters(), 0.5)
    plateau = ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
    losses, rates, found, best, waited = [], [], [], math.inf, 0
    for epoch in range(30):
        sampler = StepSampler(rows, 1, 0, seed=SEED, global_batch_size=BATCH)
        sampler.set_epoch(epoch)
        for step in range(sampler.steps_per_epoch):
            at = sampler.share(step)
            rates.append(optimizer.param_groups[0]["lr"])
            losses.append(descend(optimizer, F.cross_entropy(model(rows[at]), labels[at])))
        with torch.no_grad():
            found.append(F.cross_entropy(model(inputs), wanted).item())
        plateau.step(found[-1])
        best, waited = (found[-1], 0) if found[-1] < best else (best, waited + 1)
        if waited == 4:
            break
    return losses, rates, found


def test_plateau_and_early_stopping(tmp_path: Path) -> None:
    losses, rates, found = until_it_stops(Overfitting())
    assert 4 < len(found) < 20
    assert len(set(rates)) > 1
    result = train(tmp_path / "whole", Overfitting(), **PLATEAU)
    assert (result.status, result.steps) == ("done", len(losses))
    assert [loss for _, _, loss in logged(tmp_path / "whole")] == pytest.approx(losses, rel=1e-12)
    assert [rate for _, rate, _ in logged(tmp_path / "whole")] == pytest.approx(rates, rel=1e-12)
    assert [value for _, value in evaluations(tmp_path / "whole")] == pytest.approx(found, rel=1e-12)
    with pytest.raises(Power):  # two evaluations before the last one
        fit(Overfitting(), config(**PLATEAU), Context(tmp_path / "cut", cut_at_step=len(losses) - 10))
    train(tmp_path / "cut", Overfitting(), **PLATEAU)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
