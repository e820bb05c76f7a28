"""A run in parts, each with a directory of its own, as a population's stages are: the curve of the whole run, and what
its configuration changes between two parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.test_loop import PER_EPOCH, Context, Tiny, config, curve, evaluations
from trainers.checkpoint.run_state import Keeper
from trainers.errors import CheckpointError, ConfigError
from trainers.loop.build import build_replica
from trainers.loop.fit import fit
from trainers.storage import Storage

TOTAL = 3 * PER_EPOCH


def part(path: Path, source: Path | None, until_epoch: float | None, **changes: Any) -> Any:
    context = Context(path)
    context.source = Storage(str(source)) if source is not None else None
    context.until_epoch = until_epoch
    return fit(Tiny(), config(checkpoint={"every_epochs": 9}, **changes), context)


@pytest.mark.parametrize("ends", [[1.0, 2.0], [1.5], [0.01, 2.5], [1 / 3, 4 / 3]])
def test_parts_are_the_whole(ends: list[float], tmp_path: Path) -> None:
    whole = part(tmp_path / "whole", None, None)
    source, steps, tested = None, [], []
    for number, end in enumerate([*ends, None]):
        path = tmp_path / str(number)
        result = part(path, source, end)
        assert result.status == ("done" if end is None else "stopped")
        assert evaluations(path)[-1][0] == result.steps, "each part ends with an evaluation"
        steps += curve(path)
        tested += evaluations(path)
        source = path
    assert result.metrics == whole.metrics
    assert steps == curve(tmp_path / "whole")
    assert set(tested) >= set(evaluations(tmp_path / "whole"))


def test_a_part_ends_at_its_very_step(tmp_path: Path) -> None:
    """Also where floats would add one: 2/5 and 4/5 of an epoch of five steps are a little more than six."""
    assert PER_EPOCH == 5
    assert part(tmp_path / "exact", None, 2 / 5 + 4 / 5).steps == 6
    assert part(tmp_path / "longer", None, 100.0).status == "done"


def test_a_part_that_was_cut_off_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    part(tmp_path / "first", None, 1.0)
    part(tmp_path / "second", tmp_path / "first", 2.0)
    before = curve(tmp_path / "second")
    (tmp_path / "first" / "checkpoints").rename(tmp_path / "gone")
    assert part(tmp_path / "second", tmp_path / "first", None).status == "done"
    assert [step for step, *_ in curve(tmp_path / "second")] == list(range(PER_EPOCH + 1, TOTAL + 1))
    assert curve(tmp_path / "second")[: len(before)] == before


def test_a_part_needs_the_checkpoint_that_it_shall_begin_with(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*nothing to begin with"):
        part(tmp_path / "part", tmp_path / "nothing", None)


def test_a_part_must_not_change_what_a_step_is(tmp_path: Path) -> None:
    part(tmp_path / "first", None, 1.0)
    with pytest.raises(ConfigError, match="global_batch_size"):
        part(tmp_path / "second", tmp_path / "first", None, global_batch_size=3)


def test_a_part_takes_what_its_configuration_changes_of_the_optimizer_and_the_rest_from_before(tmp_path: Path) -> None:
    """lr alone would not tell: the loop sets it anew in each step."""
    before = {"name": "adamw", "lr": 0.05, "weight_decay": 0.1, "betas": [0.8, 0.9]}
    now = {"name": "adamw", "lr": 0.02, "weight_decay": 0.0, "betas": [0.8, 0.9]}
    part(tmp_path / "first", None, 1.0, optimizer=before)
    context, task = Context(tmp_path / "second"), Tiny()
    changed = config(optimizer=now)
    parts = build_replica(task, changed, context)
    (group,) = parts.optimizer.param_groups
    group["eps"] = 0.5  # not the configuration's doing: the checkpoint's comes back
    keeper = Keeper(context.storage or Storage(""), parts, task, changed, None, lambda where: None)
    keeper.resume(Storage(str(tmp_path / "first")))
    parts.close()
    (group,) = parts.optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.0, (0.8, 0.9), 1e-8)
    assert all(float(moments["step"]) == PER_EPOCH for moments in parts.optimizer.state.values())
    assert all(torch.any(moments["exp_avg"] != 0) for moments in parts.optimizer.state.values())


def test_another_learning_rate_changes_only_what_comes_after(tmp_path: Path) -> None:
    part(tmp_path / "first", None, 1.0)
    part(tmp_path / "same", tmp_path / "first", 2.0)
    optimizer = {"name": "adamw", "lr": 0.005}
    part(tmp_path / "other", tmp_path / "first", 2.0, optimizer=optimizer)
    same, other = curve(tmp_path / "same"), curve(tmp_path / "other")
    assert other[0][2] == same[0][2], "the first step's loss is that of the weights that were taken over"
    assert [lr for _, lr, _ in other] == pytest.approx([lr / 10 for _, lr, _ in same])
    assert other[1][2] != same[1][2]
