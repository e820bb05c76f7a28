"""Fine-tuning as people write it, each beside a plain loop: equal losses, rates and ends; resumed to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import tests.unit.test_predict as predicted
from tests.unit.test_loop import Context, Power, assert_same_run, config, train
from tests.unit.test_recipes import curve, plain
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
