"""What a worker measures of itself: windows, MFU, the comparison of ranks."""

import logging
import types

import pytest
import torch
from torch import nn

from tests.specs import logged
from tests.unit.test_loop import PER_EPOCH, train
from trainers.loop._monitor import Monitor
from trainers.measure.clock import WARMUP_STEPS, StepClock
from trainers.model.precision import resolve_precision

CPU = torch.device("cpu")


class Ranks:
    """A group of two, of which the other rank says what it is told to."""

    def __init__(self, rank=0, **other):
        self.rank = rank
        self.world_size = 2
        self.other = other

    def gather(self, row):
        return [row, row | {"rank": 1 - self.rank} | self.other]


class Clock(StepClock):
    """A StepClock that is told how long steps take."""

    def steps(self, count, seconds, samples=10, own=None, wait_s=0.0):
        for _ in range(count):
            self.start_span()
            self._began -= seconds
            self._wait_s += wait_s
            self.step(samples, own)
            self.end_span()


@pytest.fixture
def clock(monkeypatch):
    """Time stands still but for the steps."""
    monkeypatch.setattr(
        "trainers.measure.clock.time.perf_counter", lambda: 100.0
    )
    return Clock(CPU)


def monitor(clock, group=None, flops=None):
    group = group or types.SimpleNamespace(
        rank=0, world_size=1, gather=lambda row: [row]
    )
    parts = types.SimpleNamespace(
        device=CPU,
        group=group,
        flops_per_sample=flops,
        step=types.SimpleNamespace(
            forward=types.SimpleNamespace(model=nn.Linear(1, 1))
        ),
        spec=resolve_precision("fp32", CPU),
    )
    return Monitor(parts, clock)


def test_a_window_is_about_its_own_steps(clock):
    watch = monitor(clock)
    clock.steps(3, 1.0)
    assert watch.window()["step_time_s"] == pytest.approx(1.0)
    clock.steps(2, 4.0, samples=20, wait_s=1.0)
    found = watch.window()
    assert found["step_time_s"] == pytest.approx(4.0)
    assert found["samples_per_s"] == pytest.approx(5.0)
    assert found["data_wait_share"] == pytest.approx(0.25)
    assert "mfu" not in found
    assert "samples_per_s" not in watch.window(), "no step in between"


def test_mfu_where_the_peak_is_known(clock):
    watch = monitor(clock, Ranks(), flops=1e9)
    watch.peak = 1e11
    clock.steps(6, 0.5)
    assert watch.window()["mfu"] == pytest.approx(1e9 * 20 / (2 * 1e11))
    assert watch.mfu(clock.throughput().samples_per_s) == pytest.approx(0.1)


def test_a_comparison_is_about_the_steps_since_the_last(clock, caplog):
    watch = monitor(clock, Ranks(data_wait_share=0.5))
    clock.steps(4, 1.0, samples=10, own=5, wait_s=0.02)
    with caplog.at_level(logging.WARNING):
        (ours, _) = watch.compare(10.0) or []
        clock.steps(2, 2.0, samples=10, own=0, wait_s=1.0)
        (later, _) = watch.compare(20.0) or []
        watch.compare(30.0)
    assert (ours["steps"], ours["idle_share"]) == (4, 0.0)
    assert ours["samples_per_s"] == pytest.approx(5.0)
    assert ours["data_wait_share"] == pytest.approx(0.02)
    assert (later["steps"], later["idle_share"], later["samples_per_s"]) == (
        2,
        1.0,
        0.0,
    )
    assert [line.split(" the others")[0] for line in caplog.messages] == [
        f"ranks: rank 1 ({ours['host']}) waits 50% of its time for data,",
        "ranks: rank 0 has no sample in 100% of its steps: the global batch is too small for all ranks",
        "ranks: rank 1 has no sample in 100% of its steps: the global batch is too small for all ranks",
    ], "each once"


def test_a_run_has_the_figures_in_its_log_and_result(tmp_path):
    result = train(tmp_path, epochs=2)
    rows = logged(tmp_path, "train_loss")
    assert all(
        row["samples_per_s"] > 0
        and row["step_time_s"] > 0
        and 0 <= row["data_wait_share"] <= 1
        for row in rows
    )
    assert all("mfu" not in row and "ranks" not in row for row in rows), (
        "a CPU has no peak, and one rank no others"
    )
    (row,) = result.ranks
    assert row["steps"] == PER_EPOCH, (
        "the second epoch: the first is the warm-up"
    )
    assert row["peak_bytes"] == result.peak_memory_bytes
    assert result.mfu is None


def test_steps_are_timed_to_the_end_of_an_epoch(monkeypatch):
    """On a GPU steps are counted when the device is next waited for: an epoch
    may end in between.
    """
    monkeypatch.setattr(
        "trainers.loop._attempt.StepClock",
        lambda device: StepClock(torch.device("meta")),
    )
    steps = 4 * PER_EPOCH + 3
    result = train(
        None,
        max_steps=steps,
        log_every_steps=1000,
        evaluate={"every_steps": 1000},
    )
    assert result.ranks[0]["steps"] == steps
    assert result.throughput.steps == steps - WARMUP_STEPS
