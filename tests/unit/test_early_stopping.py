"""Early stopping: after which evaluation a run ends, that it is done then, and that it stays so."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.specs import make
from tests.unit.test_checkpoint_best import Scripted
from tests.unit.test_loop import Context, Power, curve
from tests.unit.test_no_validation import Unseen
from trainers.checkpoint.validation import check_state
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.sections import EarlyStoppingConfig
from trainers.errors import ConfigError
from trainers.launch.run_directory import prepare_storage
from trainers.loop.early_stopping import EarlyStopping
from trainers.loop.fit import fit
from trainers.measure.result import RunResult


def config(steps: int, **stopping: Any) -> TrainConfig:
    tree: dict[str, Any] = {
        "task": "task:Scripted",
        "max_steps": steps,
        "global_batch_size": 4,
        "microbatch_size": 4,
        "log_every_steps": 1,
        "optimizer": {"name": "sgd", "lr": 0.1},
        "evaluate": {"every_steps": 2},
        "checkpoint": {"every_steps": 2, "keep": 9},
        "early_stopping": {"metric": "val_score", "patience": 2, **stopping},
        "device": "cpu",
    }
    return build(TrainConfig, tree, "test")


def train(path: Path, scores: list[float], steps: int | None = None, **stopping: Any) -> RunResult:
    steps = 2 * len(scores) if steps is None else steps
    return fit(Scripted([*scores, *[0.0] * 9]), config(steps, **stopping), Context(path))


@pytest.mark.parametrize(
    ("stopping", "values", "ends_after"),
    [
        ({}, [0.1, 0.2, 0.15, 0.2], 4),
        ({}, [0.1, 0.2, 0.15, 0.3, 0.1, 0.1], 6),
        ({"mode": "min"}, [0.1, 0.2, 0.15], 3),
        ({"patience": 1}, [0.1, 0.1], 2),
        ({"min_delta": 0.25}, [0.0, 0.25, 0.25], 3),
        ({"min_delta": 0.25}, [0.0, 0.5, 0.5, 0.5], 4),
        ({}, [math.nan, math.inf], 2),
        ({}, [0.1, 0.2, 0.3, 0.4], None),
        ({"metric": "val_error"}, [0.1, 0.2, 0.3], 3),
    ],
)
def test_when_a_run_ends(stopping: dict[str, Any], values: list[float], ends_after: int | None) -> None:
    chosen = EarlyStoppingConfig(**{"metric": "val_score", "patience": 2, **stopping})
    counted = EarlyStopping(chosen)
    for number, value in enumerate(values, 1):
        counted.take(number * 5, {str(chosen.metric): value})
        assert (counted.words is not None) is (number == ends_after)


def test_it_is_done_with_a_word_and_stays_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        result = train(tmp_path, [0.1, 0.5, 0.4, 0.3, 0.9], 100)
    words = "stopped early: val_score has not improved in 2 evaluations (its best is 0.5 of step 4)"
    assert (result.status, result.steps, result.message) == ("done", 8, words)
    assert RunResult.from_json((tmp_path / "result.json").read_bytes()).message == words
    assert caplog.text.count(words) == 1
    assert sorted((tmp_path / "checkpoints").iterdir())[-1].name == f"step-{8:012d}"
    again = train(tmp_path, [0.1, 0.5, 0.4, 0.3, 0.9], 200)
    assert (again.status, again.steps, again.message) == ("done", 8, words), "longer, it has stopped as well"
    patient = train(tmp_path, [0.1, 0.5, 0.4, 0.3, 0.9], 12, patience=3)
    assert (patient.status, patient.steps, patient.message) == ("done", 12, ""), "with more patience it goes on"
    assert [step for step, _, _ in curve(tmp_path)] == list(range(1, 13))


@pytest.mark.parametrize("at", [2, 4, 6])
def test_a_resume_counts_on(at: int, tmp_path: Path) -> None:
    scores = [0.1, 0.5, 0.4, 0.3, 0.9]
    with pytest.raises(Power):
        fit(Scripted(scores), config(100), Context(tmp_path, cut_at_step=at))
    result = train(tmp_path, scores, 100)
    assert (result.steps, "its best is 0.5 of step 4" in result.message) == (8, True)


def test_a_command_does_not_start_it_again(tmp_path: Path) -> None:
    changes = {"max_steps": 8, "evaluate__every_steps": 2}
    stopping = {"early_stopping": {"metric": "val_accuracy", "patience": 1, "min_delta": 2.0}}
    spec = make(tmp_path, **changes, **stopping)
    prepare_storage(spec, fresh=False)
    result = fit(spec.load_task(), spec.config, Context(Path(spec.storage.path)))
    assert (result.status, result.steps) == ("done", 4)
    assert prepare_storage(spec, fresh=False) == result
    assert json.loads((Path(spec.storage.path) / "result.json").read_bytes())["message"].startswith("stopped early")
    assert prepare_storage(make(tmp_path, **changes), fresh=False) is None, "without it the run is not complete"


def test_another_metric_begins_to_count_anew(tmp_path: Path) -> None:
    train(tmp_path, [0.1, 0.5, 0.4], 6)
    state = saved_position(tmp_path, 6)
    assert state == {"metric": "val_score", "best": 0.5, "best_step": 4, "waited": 1}
    other = EarlyStopping(EarlyStoppingConfig(metric="val_loss", patience=1))
    other.load_state_dict(state)
    assert (other.best, other.waited) == (None, 0)
    off = EarlyStopping(EarlyStoppingConfig())
    off.load_state_dict(state)
    assert (off.words, off.state_dict()) == (None, {})


def test_a_position_of_an_older_version_has_none(tmp_path: Path) -> None:
    train(tmp_path, [0.1, 0.5, 0.4], 6)
    state = torch.load(tmp_path / f"checkpoints/step-{6:012d}/state.pt", weights_only=True)
    del state["position"]["stopping"]
    assert check_state(state, f"step-{6:012d}").stopping == {}


def saved_position(path: Path, step: int) -> dict[str, Any]:
    state = torch.load(path / f"checkpoints/step-{step:012d}/state.pt", weights_only=True)
    found: dict[str, Any] = state["position"]["stopping"]
    return found


@pytest.mark.parametrize(
    ("stopping", "said"),
    [
        ({"metric": "val_scor"}, r"`early_stopping\.metric` is \"val_scor\".*use one of val_loss, val_score"),
        ({"patience": None}, r"`early_stopping\.patience`.*is required with a metric"),
        ({"metric": None}, r"`early_stopping\.patience` is 2.*without a metric"),
    ],
)
def test_mistakes(stopping: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        train(tmp_path, [0.1], **stopping)


def test_without_a_validation_split_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`early_stopping\.metric` is \"val_score\".*gives none"):
        fit(Unseen(), config(4), Context(None))
