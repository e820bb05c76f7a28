"""A batch that grows by measurement: the run is that of the schedule that was found, and comparing leaves no trace."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.specs import losses, make
from tests.unit.test_loop import SAMPLES, Context, Power, Tiny, assert_same_run, curve
from tests.unit.test_loop import config as tiny_config
from trainers.checkpoint.run_state import Keeper
from trainers.errors import CheckpointError, ConfigError
from trainers.launch.local import run_local
from trainers.loop import growth
from trainers.loop.fit import fit
from trainers.loop.growth import APART, PARTS, Branch, Verdict, judge
from trainers.measure.result import RunResult


def branch(time_s: float, losses: list[float]) -> Branch:
    return Branch([9.0] * APART + [time_s] * (PARTS - APART), [5.0] * APART + losses)


LOSSES = [1.0, 1.2, 0.9] * ((PARTS - APART) // 3)
CASES = {
    "lower": (1.0, [0.1, 0.1, 0.1], True),
    "lower by more than the standard error": (1.0, [0.1, 0.0, 0.1], True),
    "by less": (1.0, [0.1, -0.1, 0.05], False),
    "the same": (2.0, [0.0, 0.0, 0.0], False),
    "higher": (2.0, [-0.1, -0.1, -0.1], False),
    "as fast, as clocks go": (0.96, [0.1, 0.1, 0.1], True),
    "slower": (0.9, [0.1, 0.1, 0.1], False),
    "it diverges": (2.0, [0.1, math.nan, 0.1], False),
    "the smaller one diverges": (2.0, [0.1, math.inf, 0.1], False),
}


@pytest.mark.parametrize(("gain", "lower", "grows"), CASES.values(), ids=CASES)
def test_the_larger_batch_is_taken_where_its_loss_is_lower(gain: float, lower: list[float], grows: bool) -> None:
    """Of the parts in which the branches have come apart."""
    lower *= len(LOSSES) // 3
    larger = branch(1.0, [loss - less for loss, less in zip(LOSSES, lower, strict=True)])
    assert judge(32, branch(gain, LOSSES), larger).grows is grows


class Stateful(Tiny):
    """Also counts in its own steps, which a branch takes as well."""

    def after_step(self, model: Any, step: int) -> None:
        self.seen += step

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().loss(outputs, batch) * (1 + 1e-3 * self.seen)


@pytest.fixture(autouse=True)
def _short_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TIMED": 2, "PARTS": 4, "WAIT": 8, "LEFT": 8}.items():
        monkeypatch.setattr(growth, name, value)


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, list[bool]]], None]:
    """What is decided at each size, in place of clocks."""

    def script(decided: dict[int, list[bool]]) -> None:
        monkeypatch.setattr(growth, "judge", lambda size, *_: Verdict(decided[size].pop(0), "by a script"))
        monkeypatch.setattr(growth, "LATER", 0.5)

    return script


AUTO = {"global_batch_size": "auto", "auto_batch": {"start": 2, "largest": 8}}
DECIDED = {2: [False, True], 4: [True]}
FOUND = [{"until_samples": 64, "size": 2}, {"until_samples": 130, "size": 4}, {"size": 8}]
PLAIN: dict[str, Any] = {"epochs": 9, "lr_scaling": {"rule": "linear", "base_batch_size": 2}}
RUNS: dict[str, dict[str, Any]] = {
    "cosine": {},
    "ema": {"ema": {"decay": 0.9}},
    "scheduler": {"lr_schedule": {"name": "StepLR", "args": {"step_size": 3}, "every": "step"}},
    "scaler": {"precision": "fp16"},
    "steps": {"epochs": None, "max_steps": 64},
    "loader": {"data": {"num_workers": 1}},
    "noise scale": {"noise_scale": True},
}


def run(path: Path, cut_at_step: int | None = None, **changes: Any) -> RunResult:
    return fit(Stateful(), tiny_config(**{**PLAIN, **changes}), Context(path, cut_at_step=cut_at_step))


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_the_run_is_that_of_the_schedule_that_was_found(
    changes: dict[str, Any], verdicts: Callable[[Any], None], tmp_path: Path
) -> None:
    verdicts({size: list(one) for size, one in DECIDED.items()})
    rare = {"checkpoint": {"every_steps": 99}, **changes}
    found = run(tmp_path / "auto", **AUTO, **rare).batch_schedule
    assert found == FOUND
    result = run(tmp_path / "again", global_batch_size=None, batch_schedule=found, **rare)
    assert_same_run(tmp_path / "again", tmp_path / "auto")
    assert result.batch_schedule == FOUND
    assert len({lr for _, lr, _ in curve(tmp_path / "auto")}) > 2


def test_a_branch_is_judged_by_the_losses_of_its_own_steps(
    verdicts: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by those as well that the run has not logged yet."""
    verdicts({})
    branches: list[Branch] = []

    def judged(size: int, smaller: Branch, *_: Any) -> Verdict:
        branches.append(smaller)
        return Verdict(False, "")

    monkeypatch.setattr(growth, "judge", judged)
    run(tmp_path / "auto", **AUTO, log_every_steps=5, checkpoint={"every_steps": 99})
    run(tmp_path / "plain", global_batch_size=None, batch_schedule=[{"size": 2}], log_every_steps=1)
    steps = [loss for _, _, loss in curve(tmp_path / "plain")][8:16]
    parts = [(one + other) / 2 for one, other in zip(steps[::2], steps[1::2], strict=True)]
    assert branches[0].losses == pytest.approx(parts)


def test_a_run_that_is_cut_goes_on_with_what_it_has_found(verdicts: Callable[[Any], None], tmp_path: Path) -> None:
    """Cut right before and after comparisons: nobody makes one twice."""
    verdicts({size: list(one) for size, one in DECIDED.items()})
    run(tmp_path / "whole", **AUTO)
    verdicts({size: list(one) for size, one in DECIDED.items()})
    for at in (8, 17, 24, 33, 41, 51):
        with pytest.raises(Power):
            run(tmp_path / "cut", at, **AUTO)
    assert run(tmp_path / "cut", **AUTO).batch_schedule == FOUND
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_a_comparison_that_is_cut_begins_again(verdicts: Callable[[Any], None], tmp_path: Path) -> None:
    verdicts({size: list(one) for size, one in DECIDED.items()})
    with pytest.raises(Power):
        run(tmp_path / "cut", 26, **AUTO)
    found = run(tmp_path / "cut", **AUTO).batch_schedule
    assert found is not None
    assert found[0] == {"until_samples": 68, "size": 2}, "from sample 52 on, not 48"
    run(tmp_path / "again", global_batch_size=None, batch_schedule=found)
    assert_same_run(tmp_path / "again", tmp_path / "cut")


def test_a_checkpoint_of_an_earlier_version_is_gone_on_from(
    verdicts: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have another pair of figures, and not where the next comparison is: it comes at once."""
    keep = Keeper.keep

    def as_before(keeper: Keeper, position: dict[str, Any], *more: Any) -> None:
        del position["next_look"]
        keep(keeper, {**position, "growth": (48, 16)}, *more)

    verdicts({size: list(one) for size, one in DECIDED.items()})
    with monkeypatch.context() as patch:
        patch.setattr(Keeper, "keep", as_before)
        with pytest.raises(Power):
            run(tmp_path, 3, **AUTO)
    found = run(tmp_path, **AUTO).batch_schedule
    assert found is not None
    assert found[0] == {"until_samples": 54, "size": 2}, "refused after samples 6 to 22, and taken after 38 to 54"


def test_sizes_of_a_checkpoint_that_do_not_follow_one_another_are_refused(
    verdicts: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts({size: list(one) for size, one in DECIDED.items()})
    given = {**PLAIN, **AUTO}
    monkeypatch.setattr("trainers.data.batch_schedule.BatchSchedule.grown", lambda self, size, sample: self)
    monkeypatch.setattr("trainers.loop.growth.Growth.due", False)
    monkeypatch.setattr("trainers.loop.checkpointing.list", lambda sizes: [(9, 2), (9, 4), (None, 8)], raising=False)
    with pytest.raises(Power):
        fit(Stateful(), tiny_config(**given), Context(tmp_path, cut_at_step=3))
    with pytest.raises(CheckpointError, match="batch sizes do not follow one another"):
        run(tmp_path, **AUTO)


@pytest.mark.parametrize(
    ("times_s", "largest", "first"),
    [
        ({2: 1.0, 4: 1.1, 8: 1.9}, 8, 4),
        ({2: 1.0, 4: 1.9}, 8, 2),
        ({2: 1.0, 4: 1.1, 8: 1.2}, 8, 8),
        ({2: 1, 4: 1}, 7, 4),
    ],
    ids=["saturated", "at once", "never", "no more are allowed"],
)
def test_it_begins_with_the_size_from_which_on_larger_ones_gain_little(
    times_s: dict[int, float], largest: int, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are timed, and then taken to have been faster or slower."""
    monkeypatch.setattr(growth, "FIRST", 2)
    monkeypatch.setattr(growth, "STEPS", 1)
    monkeypatch.setattr(growth.Growth, "due", False)
    real, timed = growth.Growth._step_s, set[int]()

    def step_s(self: growth.Growth, size: int) -> float:
        assert real(self, size) > 0
        timed.add(size)
        return times_s[size]

    monkeypatch.setattr(growth.Growth, "_step_s", step_s)
    found = run(tmp_path / "auto", global_batch_size="auto", auto_batch={"largest": largest}).batch_schedule
    assert found == [{"size": first}]
    assert timed == times_s.keys()
    run(tmp_path / "again", global_batch_size=None, batch_schedule=found)
    assert_same_run(tmp_path / "again", tmp_path / "auto")


def test_nor_with_one_that_leaves_it_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "STEPS", 9 * SAMPLES // 16)
    monkeypatch.setattr(growth.Growth, "due", False)
    monkeypatch.setattr(growth.Growth, "_step_s", lambda self, size: 1.0)
    assert run(tmp_path, global_batch_size="auto").batch_schedule == [{"size": 16}]


def test_it_is_measured_and_said_without_a_script(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    auto = {"global_batch_size": "auto", "auto_batch__start": 4, "auto_batch__largest": 32, "max_steps": 60}
    spec = make(tmp_path / "auto", **auto)
    found = run_local(spec).batch_schedule
    told = [record.getMessage() for record in caplog.records if record.name == "trainers.loop.growth"]
    assert len(told) >= 2
    assert all("after as many samples" in words for words in told)
    again = make(tmp_path / "again", global_batch_size=None, batch_schedule=found, max_steps=60)
    run_local(again)
    assert losses(again) == losses(spec)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drop_last": True}, "`drop_last` is true, .*no sample is left out"),
        ({"strategy": "fsdp"}, '`strategy` is "fsdp", .*auto'),
        ({"auto_batch": {"start": 64, "largest": 32}}, "`auto_batch.largest` is 32, .*at least `start`, 64"),
        ({"global_batch_size": "largest"}, '`global_batch_size` is "largest", .*auto or a whole number'),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_config(**{**AUTO, **changes})


def test_nor_a_stream_that_is_read_forward(tmp_path: Path) -> None:
    task = {"task": "tests.stream_tasks:Streamed", "task_args": {"kind": "numbered"}, "evaluate__every_steps": 100}
    with pytest.raises(ConfigError, match="a stream is only read forward"):
        run_local(make(tmp_path, **task, max_steps=9, global_batch_size="auto"))
