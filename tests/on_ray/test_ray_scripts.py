"""Scripts in the form of Ray's documentation, before and after the one import: the same results."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.on_ray.ray_scripts import EPOCHS, SCRIPTS, new_model, new_optimizer, train_epoch
from tests.on_ray.test_first_script import stranger

pytestmark = pytest.mark.ray

PLAIN = Path(__file__).with_name("ray_scripts.py").read_text()
IMPORTS = "from ray.train.torch import TorchTrainer\nfrom ray.tune import Tuner\n"


def write(directory: Path, changed: bool) -> Path:
    assert PLAIN.count(IMPORTS) == 1
    script = directory / "script.py"
    script.write_text(PLAIN.replace(IMPORTS, "from tune.ray import TorchTrainer, Tuner\n") if changed else PLAIN)
    return script


def trials(out: str) -> dict[str, list[dict[str, Any]]]:
    lines = [line.split(" ", 2) for line in out.splitlines() if line.startswith("TRIALS ")]
    return {kind: json.loads(text) for _, kind, text in lines}


@pytest.mark.campaign
@pytest.mark.parametrize("kind", list(SCRIPTS))
def test_one_import_changes_no_result(kind: str, tmp_path: Path) -> None:
    found = []
    for how in ("before", "after"):
        (directory := tmp_path / how).mkdir()
        script = write(directory, changed=how == "after")
        found.append(trials(stranger(directory, str(script), str(directory / "storage"), kind))[kind])
    before, after = found
    for trial in [*before, *after] if kind == "pbt" else []:
        del trial["rows"]  # Ray loses those of trials that it lets pause: more of them, the sooner they go on
    assert before == after


class ByHand:
    """A trial in plain PyTorch."""

    def __init__(self, lr: float) -> None:
        self.lr, self.epoch = lr, 0
        self.model = new_model()
        self.optimizer = new_optimizer(self.model, lr)

    def train(self, epochs: int = 1) -> list[float]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        losses = [train_epoch(self.model, self.optimizer, self.epoch + one) for one in range(epochs)]
        self.epoch += epochs
        return losses

    def clone(self, other: ByHand) -> None:
        self.lr = other.lr / 2
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))

    def weights(self) -> list[float]:
        return [number for _, one in sorted(self.model.state_dict().items()) for number in one.flatten().tolist()]


def losses(trial: dict[str, Any]) -> list[float]:
    return [row["loss"] for row in trial["rows"]]


@pytest.mark.campaign
def test_sweeps_that_stop_pause_and_go_on_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    kinds = ("asha", "pbt", "restore")
    found = trials(stranger(tmp_path, str(write(tmp_path, changed=True)), str(tmp_path / "storage"), *kinds))

    stopped = {0.001, 0.01}  # the third and the fourth: worse after an epoch than half of those before
    for trial in found["asha"]:
        epochs = 1 if trial["lr"] in stopped else EPOCHS
        assert losses(trial) == ByHand(trial["lr"]).train(epochs), trial["lr"]

    population = [ByHand(0.2), ByHand(0.001)]
    for _ in range(4):
        ended = [one.train()[0] for one in population]
        best = ended.index(min(ended))
        population[1 - best].clone(population[best])
    for trial, by_hand in zip(found["pbt"], population, strict=True):
        assert (trial["lr"], trial["weights"]) == (by_hand.lr, by_hand.weights())

    for trial in found["restore"]:
        by_hand = ByHand(trial["lr"])
        assert losses(trial) == by_hand.train(EPOCHS)
        assert trial["weights"] == by_hand.weights()
