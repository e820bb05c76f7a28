"""The best checkpoint: which one it is, that it outlives pruning and resume,
and that it is written when it is met.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.specs import read_json
from tests.unit.test_checkpoint import kept
from trainers.checkpoint.manifest import Best
from trainers.checkpoint.store import Checkpoints
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.devices.group import Group
from trainers.errors import CheckpointError
from trainers.launch.local import LocalContext
from trainers.loop.fit import fit
from trainers.storage import Storage
from trainers.task import Task

CPU = torch.device("cpu")


class Scripted(Task):
    """`val_score` is what the script says, evaluation by evaluation; the
    script is the task's own state.
    """

    def __init__(self, scores):
        self.scores = scores
        self.evaluations = 0

    def model(self):
        return nn.Linear(2, 1)

    def dataset(self, split):
        return TensorDataset(torch.ones(4, 2))

    def loss(self, outputs, batch):
        return outputs.square().mean()

    def metrics(self, outputs, batch):
        score = self.scores[self.evaluations]
        self.evaluations += 1
        return {"score": torch.full((4,), score)}

    def state_dict(self):
        return {"evaluations": self.evaluations}

    def load_state_dict(self, state):
        self.evaluations = state["evaluations"]


def config(steps, **checkpoint):
    tree = {
        "task": "task:Scripted",
        "max_steps": steps,
        "global_batch_size": 4,
        "microbatch_size": 4,
        "optimizer": {"name": "sgd", "lr": 0.1},
        "evaluate": {"every_steps": 2},
        "checkpoint": {
            "every_steps": 1000,
            "keep": 1,
            "best": "val_score",
            **checkpoint,
        },
        "device": "cpu",
    }
    return build(TrainConfig, tree, "test")


def train(path, scores, steps=None, **checkpoint):
    steps = 2 * len(scores) if steps is None else steps
    fit(
        Scripted(scores),
        config(steps, **checkpoint),
        LocalContext(Storage(path), "local"),
    )


def saved(path, step):
    return read_json(path / f"checkpoints/step-{step:012d}/manifest.json")


def opened(path, metric="val_score", smaller=False):
    return Checkpoints(
        Storage(path), Group(0, 1, CPU), 1, Best(metric, smaller)
    )


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([0.1, 0.5, 0.3, 0.2], 4),
        ([0.5, 0.5, 0.5, 0.5], 2),  # of equal ones the earliest
        ([0.1, 0.2, 0.3, 0.4], 8),
        ([float("nan"), 0.1, float("inf"), 0.0], 4),
    ],
)
def test_the_best_evaluation_is_kept_beside_the_newest(
    tmp_path, scores, best, in_background
):
    train(tmp_path, scores, **{"async": in_background})
    assert kept(tmp_path) == sorted({best, 8})
    archive = opened(tmp_path).archive
    found = archive.manifest(archive.choose("best"))
    assert found.step == best
    assert found.metrics["val_score"] == pytest.approx(scores[best // 2 - 1])


def test_without_a_metric_no_checkpoint_is_the_best(tmp_path):
    train(tmp_path, [0.5])
    archive = Checkpoints(Storage(tmp_path), Group(0, 1, CPU), 1, None).archive
    assert archive.choose("newest")
    with pytest.raises(CheckpointError):
        archive.choose("best")


def test_only_an_evaluated_step_can_be_the_best(tmp_path):
    """Checkpoints fall between evaluations, with metrics of an earlier step at
    hand: they must not count.
    """
    train(tmp_path, [0.5, 0.1, 0.1], every_steps=3)
    assert kept(tmp_path) == [2, 6]
    train(tmp_path / "all", [0.5, 0.1, 0.1], every_steps=3, keep=9)
    assert kept(tmp_path / "all") == [2, 3, 6]
    assert saved(tmp_path / "all", 3)["metrics"] == {}
    assert saved(tmp_path / "all", 6)["metrics"]["val_score"] == pytest.approx(
        0.1
    )


def test_a_resumed_run_keeps_the_best_and_its_value(tmp_path):
    """Its bar is the old best, not the first evaluation after the resume."""
    scores = [0.1, 0.6, 0.2, 0.5, 0.4, 0.3]
    train(tmp_path, scores, steps=6)
    assert kept(tmp_path) == [4, 6]
    train(tmp_path, scores, steps=12)
    assert kept(tmp_path) == [4, 12]
    train(tmp_path, [*scores, 0.7, 0.1], steps=16)
    assert kept(tmp_path) == [14, 16]


def test_a_damaged_best_gives_way_to_the_next_and_is_named(tmp_path, caplog):
    train(tmp_path, [0.1, 0.6, 0.5])
    where = tmp_path / "checkpoints/step-000000000004"
    (where / "state.pt").write_bytes((where / "state.pt").read_bytes()[:-1])
    assert opened(tmp_path).archive.choose("best") == "step-000000000006"
    assert str(where) in caplog.text


def test_what_a_run_that_is_done_again_left_behind_is_not_the_best(tmp_path):
    for step, score in ((3, 0.9), (1, 0.8)):
        state = {"position": {"step": step}}
        opened(tmp_path).save(step, state, {}, {"val_score": score})
    assert kept(tmp_path) == [1]


def test_a_checkpoint_is_found_by_its_step(tmp_path):
    train(tmp_path, [0.1, 0.6, 0.5])
    for which in ("step-4", "4", "step-000000000004"):
        assert opened(tmp_path).archive.choose(which) == "step-000000000004"
    with pytest.raises(CheckpointError):
        opened(tmp_path).archive.choose("step-5")
    (tmp_path / "checkpoints/step-000000000006/manifest.json").unlink()
    with pytest.raises(CheckpointError):
        opened(tmp_path).archive.choose("step-6")
