"""What the recovery benchmark reads from a timeline, and that both ways do the same work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from benchmarks.recovery import Recovery, Timed, figures, paceline_command, recovery, steps_of
from benchmarks.recovery_plain import BATCH, Moment, make_data, make_model, read_moments, watch, write_moment
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.launch.local import LocalContext
from trainers.loop.fit import fit
from trainers.storage import Storage


def run(process: int, start_s: float, first: int, last: int, rank: int = 0) -> list[Moment]:
    """A process that begins, then does a step a second."""
    steps = [Moment(start_s + step - first + 1, step, rank, process) for step in range(first, last + 1)]
    return [Moment(start_s, 0, rank, process), *steps]


def test_the_next_step_and_what_is_done_again() -> None:
    moments = [*run(1, 0.0, 1, 25), *run(2, 40.0, 21, 30)]
    assert recovery(moments, 25.5, 100.0) == Recovery(next_step_s=15.5, started_s=14.5, redone=5)


def test_throw_away_passes_and_the_last_breath_of_another_rank_are_no_steps() -> None:
    other = [*run(2, 0.0, 1, 24, rank=1), Moment(25.6, 25, 1, 2)]
    probe = [Moment(40.0, 0, 0, 3), Moment(40.5, 1, 0, 3), Moment(40.6, 2, 0, 3), *run(3, 41.0, 21, 30)[1:]]
    found = recovery([*run(1, 0.0, 1, 25), *other, *probe], 25.5, 100.0)
    assert found == Recovery(next_step_s=16.5, started_s=14.5, redone=5)


def test_a_run_that_lost_its_checkpoints_starts_at_one() -> None:
    probe = [Moment(40.0, 0, 0, 3), Moment(40.5, 1, 0, 3)]
    found = recovery([*run(1, 0.0, 1, 25), *probe, *run(3, 41.0, 1, 9)[1:]], 25.5, 100.0)
    assert found == Recovery(next_step_s=16.5, started_s=14.5, redone=25)


@pytest.mark.parametrize("after", [[], [Moment(40.0, 0, 0, 2)], [Moment(40.0, 0, 0, 2), Moment(41.0, 1, 0, 2)]])
def test_no_figure_before_the_next_step(after: list[Moment]) -> None:
    assert recovery([*run(1, 0.0, 1, 25), *after], 25.5, 100.0) is None


def test_only_what_came_before_the_next_kill_counts() -> None:
    moments = [*run(1, 0.0, 1, 25), *run(2, 40.0, 21, 30), *run(3, 60.0, 31, 40)]
    assert recovery(moments, 25.5, 39.0) is None
    second = recovery(moments, 50.5, 100.0)
    assert second == Recovery(next_step_s=10.5, started_s=9.5, redone=0)


def test_figures_set_both_ways_side_by_side() -> None:
    found = {
        "plain": [Recovery(10.0, 6.0, 40), Recovery(12.0, 7.0, 150), Recovery(11.0, 6.5, 60)],
        "paceline": [Recovery(5.0, 3.0, 40), Recovery(6.0, 4.0, 50), Recovery(5.5, 3.5, 60)],
    }
    result = figures(found, 100)
    assert result["rows"]["paceline"]["ratio"] == 0.5
    assert result["floor"] == pytest.approx(0.2), "plain's kills differ by 12 / 10 at most"
    assert result["parts"]["plain"]["redone"] == {"median": 60, "min": 40, "max": 150}
    assert result["parts"]["paceline"]["first_step_ms"] == 2000


def test_a_timeline_is_read_while_it_is_written(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline"
    assert read_moments(timeline) == []
    write_moment(timeline, 0)
    write_moment(timeline, 7)
    with timeline.open("a") as file:
        file.write("123.4 8")  # a line that is not whole yet
    assert [(moment.step, moment.process) for moment in read_moments(timeline)] == [(0, os.getpid()), (7, os.getpid())]


def test_both_ways_count_the_steps_of_the_run_and_not_of_a_process(tmp_path: Path) -> None:
    paceline_command(tmp_path, workers=1, steps=4, interval=2)
    tree = yaml.safe_load((tmp_path / "train.yaml").read_text())
    for steps in (4, 6):
        context = LocalContext(Storage(str(tmp_path / "run")), "local")
        task = Timed(tree["task_args"]["timeline"])
        fit(task, build(TrainConfig, tree | {"max_steps": steps}, "test"), context)
    ours = [moment.step for moment in read_moments(tmp_path / "timeline")]
    moments = read_moments(tmp_path / "timeline")
    resumed = len(ours) - ours[::-1].index(0)
    assert [moment.step for moment in steps_of(moments[: resumed - 1])] == [1, 2, 3, 4]
    assert [moment.step for moment in steps_of(moments)] == [5, 6]

    model, lines = make_model(), tmp_path / "plain"
    optimizer = torch.optim.AdamW(model.parameters(), lr=tree["optimizer"]["lr"], fused=True)
    watch(optimizer, lines)
    rows, labels = make_data()[:BATCH]
    for _ in range(2):
        nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()
    again = torch.optim.AdamW(model.parameters(), lr=tree["optimizer"]["lr"], fused=True)
    again.load_state_dict(optimizer.state_dict())
    watch(again, lines)
    again.step()
    assert [moment.step for moment in read_moments(lines)] == [1, 2, 3]
