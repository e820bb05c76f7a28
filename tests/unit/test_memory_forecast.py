"""`python -m trainers memory`: steps of fake tensors say what real ones would take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.specs import make, tree
from tests.tasks import Blobs
from trainers.__main__ import main
from trainers.devices.device import memory_figures
from trainers.devices.group import Group
from trainers.errors import ConfigError
from trainers.launch.memory_page import memory_page
from trainers.loop.memory_forecast import Forecaster, largest_microbatch
from trainers.loop.trained import make_trained
from trainers.step.memory_meter import MemoryMeter
from trainers.step.microbatch import Probe

CPU = torch.device("cpu")
WIDE = 8192


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs).tanh().sin()


class Tied(Blobs):
    """Two layers of one weight, a frozen one, and blocks."""

    def model(self) -> nn.Module:
        blocks = nn.Sequential(*(Block() for _ in range(3)))
        first, second, last = nn.Linear(self.features, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        last.weight = second.weight
        return nn.Sequential(first, second, blocks, last, nn.Linear(64, 4).requires_grad_(False))


class Reads(Tied):
    """The model depends on values: it cannot be made without memory."""

    def model(self) -> nn.Module:
        model = super().model()
        if float(next(model.parameters()).detach().sum()) != 0:
            model.append(nn.Linear(4, 4))
        return model


class Listed(Blobs):
    """The largest batch has a tensor for each sample."""

    def worst_case_batch(self, dataset: Any, size: int) -> Any:
        features, labels = super().worst_case_batch(dataset, size)
        return [one.clone() for one in features], labels

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return model(torch.stack(list(batch[0])))


class Ragged(Blobs):
    """Rows as long as the longest of their batch."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 4))

    def worst_case_batch(self, dataset: Any, size: int) -> Any:
        _, labels = super().worst_case_batch(dataset, size)
        return torch.zeros(size, max(5 + 7 * index % 40 for index in range(size)), 1, dtype=self.dtype), labels

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).mean(1)


class Huge(Blobs):
    """A gigabyte of parameters."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.features, WIDE), *(nn.Linear(WIDE, WIDE) for _ in range(4)), nn.Linear(WIDE, 4)
        )


class ByValue(Blobs):
    """A loss that looks at values."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = super().loss(outputs, batch)
        return loss if float(loss.detach()) > 0 else loss * 2


def forecaster(tmp_path: Path, task: str, **changes: Any) -> tuple[Forecaster, Any]:
    spec = make(tmp_path, task=f"tests.unit.test_memory_forecast:{task}", **changes)
    train = spec.load_task().dataset("train")
    return Forecaster(spec.load_task, spec.config, train, Group(0, 1, CPU)), spec


def real(spec: Any, size: int) -> int:
    """The same steps, taken."""
    group, task = Group(0, 1, CPU), spec.load_task()
    train = task.dataset("train")
    trained = make_trained(task, task.model(), spec.config, group)
    meter = MemoryMeter()
    for tensor in (*trained.model.parameters(), *trained.model.buffers()):
        meter.count(tensor)
    with meter:
        Probe(trained.forward, trained.optimizer, train, group).take_steps(
            size, accumulates=size < spec.config.batch_size
        )
    return meter.peak


@pytest.mark.parametrize(
    ("task", "precision", "mode"),
    [
        ("Tied", "fp32", "none"),
        ("Tied", "bf16", "full"),
        ("Tied", "bf16-pure", "selective"),
        ("Reads", "bf16", "none"),
    ],
)
def test_fake_steps_take_what_real_ones_take(tmp_path: Path, task: str, precision: str, mode: str) -> None:
    found, spec = forecaster(
        tmp_path, task, precision=precision, activation_checkpointing=mode, global_batch_size=512, microbatch_size=512
    )
    for size in (16, 512):
        taken = real(spec, size)
        assert found.peak(size) == pytest.approx(taken, rel=0.001)
    first, again = found(512), found(512)
    assert (first.peak, first.activations) == (again.peak, again.activations)


def test_checkpointing_takes_the_activations_that_it_says(tmp_path: Path) -> None:
    sizes = {"global_batch_size": 2048, "microbatch_size": 2048}
    of = {
        mode: forecaster(tmp_path, "Tied", activation_checkpointing=mode, **sizes)[0](2048) for mode in ("none", "full")
    }
    before, after = (sum(one.activations.values()) for one in of.values())
    assert before - after == 3 * 2048 * 64 * 4, "what tanh or sin keeps in each of three blocks"
    assert of["none"].parameters == of["full"].parameters
    assert of["none"].gradients == of["none"].parameters - 4 * (64 * 4 + 4) - _slack(of["none"].parameters)


def _slack(parameters: int) -> int:
    """What the allocator rounds up, of the parameters of Tied."""
    model = Tied().model()
    return parameters - sum(one.nbytes for one in model.parameters())


@pytest.mark.parametrize("task", ["Listed", "Ragged"])
@pytest.mark.parametrize("size", [1, 2, 24])
def test_a_batch_whose_shape_is_not_by_its_samples_is_as_large_as_it_is(tmp_path: Path, task: str, size: int) -> None:
    found, spec = forecaster(tmp_path, task)
    assert found.peak(size) == pytest.approx(real(spec, size), rel=0.02)


def test_it_takes_no_memory(tmp_path: Path) -> None:
    before = memory_figures(CPU)["allocated_bytes"]
    found, _ = forecaster(tmp_path, "Huge")
    forecast = found(100_000)
    assert memory_figures(CPU)["peak_bytes"] - before < forecast.parameters // 2
    assert forecast.parameters > 2**30
    assert forecast.optimizer == pytest.approx(2 * forecast.parameters, rel=0.01)
    assert forecast.peak > 4 * forecast.parameters


def test_a_moving_average_is_counted(tmp_path: Path) -> None:
    plain, _ = forecaster(tmp_path, "Tied")
    averaged, _ = forecaster(tmp_path, "Tied", ema__decay=0.9)
    assert averaged(8).parameters > 1.8 * plain(8).parameters


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1, max_size=4),
    st.integers(1, 10**10),
    st.integers(1, 5000),
)
def test_the_largest_microbatch_fits_and_no_much_larger_one(
    moments: list[tuple[int, int]], capacity: int, start: int
) -> None:
    asked: list[int] = []

    def peak(size: int) -> int:
        asked.append(size)
        return max(base + each * size for base, each in moments)

    found = largest_microbatch(peak, start, capacity)
    if found == 0:
        assert peak(1) > capacity
    else:
        assert peak(found) <= capacity
        assert found * 4 > 2**24 or peak(found + found // 50 + 2) > capacity
    assert len(asked) < 60


def test_the_page_says_what_each_precision_and_mode_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainers.launch.memory_page.largest_microbatch", lambda peak, start, capacity: 1000)
    file = tmp_path / "train.yaml"
    changes = {"task": "tests.unit.test_memory_forecast:Tied", "precision": "bf16"}
    file.write_text(yaml.safe_dump(tree(tmp_path, **changes)))
    assert main(["memory", str(file), "--gpu", "H100 80GB", "--activation_checkpointing", "full"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if " MiB" in line and "fp" in line]
    assert [line.endswith("1,000 (900 to 1,100)") for line in rows] == [True] * 9
    (own,) = [line for line in rows if line.startswith("*")]
    assert "bf16, fp16" in own
    assert "full" in own
    assert "largest microbatch on H100 80GB" in lines[1]
    assert any(line.strip().startswith("3 x") or "loss and batch" in line for line in lines)
    assert lines[-1].startswith("Predicted, not measured")
    assert not (tmp_path / "runs").exists(), "nothing is written"

    assert main(["memory", str(file), "--gpu", "H100"]) == 2
    assert "does not say how much memory it has" in capsys.readouterr().err


def test_a_mode_that_finds_no_block_is_left_out(tmp_path: Path) -> None:
    spec = make(tmp_path)
    lines = list(memory_page(spec, "A10G 24GB"))
    assert not any("selective  " in line for line in lines)
    assert any(
        line.startswith("Without `activation_checkpointing: selective | full`, which finds no block") for line in lines
    )


def test_a_card_that_is_too_small_has_no_microbatch(tmp_path: Path) -> None:
    spec = make(tmp_path, task="tests.unit.test_memory_forecast:Huge", activation_checkpointing="none")
    assert any("none: a single sample takes more" in line for line in memory_page(spec, "tiny 1GB"))


def test_a_loss_that_goes_by_values_cannot_be_predicted(tmp_path: Path) -> None:
    spec = make(tmp_path, task="tests.unit.test_memory_forecast:ByValue")
    with pytest.raises(ConfigError, match="goes by the values of tensors"):
        list(memory_page(spec, "A10G 24GB"))
