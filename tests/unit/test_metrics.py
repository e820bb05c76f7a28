"""Step times, throughput after warm-up, the run's log in parts, and the result file."""

import json
import math

import pytest
import torch

from trainers.errors import in_digits
from trainers.measure.clock import WARMUP_STEPS, StepClock
from trainers.measure.figures import Throughput
from trainers.measure.result import RunResult
from trainers.measure.run_log import RunLog, read_log
from trainers.storage import Storage, parse_json

CPU = torch.device("cpu")


class Time:
    """A clock that moves only when told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(
            "trainers.measure.clock.time.perf_counter", lambda: self.now
        )


@pytest.fixture
def time(monkeypatch):
    return Time(monkeypatch)


def steps(clock, time, durations, samples=10):
    clock.start_span()
    for duration in durations:
        time.now += duration
        clock.step(samples)
    clock.end_span()


def test_the_warm_up_is_left_out(time):
    clock = StepClock(CPU)
    steps(clock, time, [100.0] * WARMUP_STEPS + [2.0] * 4)
    speed = clock.throughput()
    assert speed == Throughput(
        samples_per_s=5.0,
        step_time_s=2.0,
        step_time_ci95_s=0.0,
        data_wait_share=0.0,
        steps=4,
    )
    assert clock.train_time_s == pytest.approx(100.0 * WARMUP_STEPS + 8.0)


def test_the_interval_is_that_of_a_mean(time):
    clock = StepClock(CPU)
    steps(clock, time, [1.0] * WARMUP_STEPS + [1.0, 2.0, 3.0, 4.0])
    speed = clock.throughput()
    assert speed.step_time_ci95_s == pytest.approx(
        3.182 * math.sqrt(5 / 3) / 2, rel=0.01
    )  # Student, 3 degrees


@pytest.mark.parametrize(
    ("durations", "lost_s"),
    [
        ([1.0] * 60 + [40.0] + [1.0] * 40, 39.0),  # stopped
        (
            [1.0] * 60 + [9.0] * 10 + [1.0] * 40,
            80.0,
        ),  # without a processor for a while
        ([1.0] * 60 + [10.0] + [1.0] * 40, 0.0),  # too little to matter
        (([5.0] + [1.0] * 3) * 30, 0.0),  # again and again: the training's own
        ([1.0] * 5 + [1.5] * 40 + [1.0] * 55, 0.0),
        ([1.0, 1.0, 1.0, 9.0], 0.0),  # too few to tell
        ([0.001] * 60 + [0.1] + [0.001] * 40, 0.0),  # of a short trial
    ],
)
def test_what_stood_still_is_no_throughput(time, durations, lost_s):
    clock = StepClock(CPU)
    steps(clock, time, [1.0] * WARMUP_STEPS + durations)
    speed = clock.throughput()
    assert speed.disturbed_s == pytest.approx(lost_s)
    assert speed.samples_per_s == pytest.approx(
        10.0 * len(durations) / (sum(durations) - lost_s)
    )


def test_larger_batches_and_slow_loaders_are_no_disturbance(time):
    clock = StepClock(CPU)
    for samples, wait_s in [(1, 0.0)] * 40 + [(8, 0.0)] * 20 + [(1, 60.0)]:
        clock.start_span()
        time.now += samples
        for _ in clock.timed(_after(time, wait_s)):
            clock.step(samples)
        clock.end_span()
    speed = clock.throughput()
    assert speed.disturbed_s == 0.0


def _after(time, wait_s):
    time.now += wait_s
    yield 0


def test_time_between_spans_is_no_training(time):
    clock = StepClock(CPU)
    for _ in range(WARMUP_STEPS + 2):
        steps(clock, time, [1.0])
        time.now += 1000.0  # evaluation, checkpoints
    assert clock.train_time_s == WARMUP_STEPS + 2
    speed = clock.throughput()
    assert speed.step_time_s == 1.0


def test_on_a_device_the_steps_of_a_span_share_its_time(time, monkeypatch):
    waited = []
    monkeypatch.setattr(
        "trainers.measure.clock.synchronize", lambda _: waited.append(time.now)
    )
    clock = StepClock(
        torch.device("meta")
    )  # not a CPU: steps are only issued, and done when the device is waited for
    for _ in range(4):
        steps(clock, time, [0.0, 0.0, 3.0])
    assert len(waited) == 8 + 2  # the first step is timed by itself
    assert clock.train_time_s == 12.0
    speed = clock.throughput()
    assert (speed.step_time_s, speed.step_time_ci95_s, speed.steps) == (
        1.0,
        0.0,
        12 - WARMUP_STEPS,
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_step_that_compiles_again_does_not_count(time, monkeypatch, device):
    monkeypatch.setattr("trainers.measure.clock.synchronize", lambda _: None)
    clock = StepClock(torch.device(device))
    clock.start_span()
    for index in range(WARMUP_STEPS + 6):
        compiles = index in (0, WARMUP_STEPS + 2)
        time.now += 30.0 if compiles else 1.0
        clock.step(10)
        if compiles:
            clock.leave_out()
    clock.end_span()
    speed = clock.throughput()
    assert speed.samples_per_s == pytest.approx(10.0)
    assert clock.train_time_s == 60.0 + WARMUP_STEPS + 4
    assert speed.steps == (
        5 if device == "cpu" else 3
    )  # on a device, those of the span that it spoilt are left out


def test_waiting_for_data_is_a_share_of_the_measured_time(time):
    clock = StepClock(CPU)

    def slow():
        for index in range(WARMUP_STEPS + 4):
            time.now += 50.0 if index < WARMUP_STEPS else 1.0
            yield index

    clock.start_span()
    for _ in clock.timed(slow()):
        time.now += 3.0
        clock.step(1)
    clock.end_span()
    speed = clock.throughput()
    assert speed.step_time_s == pytest.approx(4.0)
    assert speed.data_wait_share == pytest.approx(0.25)


def row(step, **more):
    return {"step": step, "train_loss": step / 10, **more}


def test_the_log_is_read_in_order(tmp_path):
    run = Storage(tmp_path)
    log = RunLog(run)
    for step in (1, 2, 3, 20, 100):
        log.add(row(step))
        if step in (2, 20):
            log.flush(step)
    assert [record["step"] for record in read_log(run)] == [1, 2, 3, 20]
    log.flush(100)
    assert read_log(run) == [row(step) for step in (1, 2, 3, 20, 100)]
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == [
        "000000000002.jsonl", "000000000020.jsonl", "000000000100.jsonl",
    ]  # fmt: skip


def test_a_cut_drops_what_will_be_redone(tmp_path):
    run = Storage(tmp_path)
    log = RunLog(run)
    for step in (5, 10, 15):
        log.add(row(step))
        log.flush(step)
    again = RunLog(run)
    again.cut(10)
    assert [record["step"] for record in read_log(run)] == [5, 10]
    again.add(row(15))
    again.flush(15)
    assert [record["step"] for record in read_log(run)] == [5, 10, 15]


def test_figures_that_are_not_finite_are_kept(tmp_path):
    run = Storage(tmp_path)
    log = RunLog(run)
    log.add(row(1, val_loss=math.inf, other=math.nan))
    log.flush(1)
    (record,) = read_log(run)
    assert record["val_loss"] == math.inf
    assert math.isnan(record["other"])


@pytest.mark.parametrize(("value", "shown"), [
    (0.0, "0.0000"),
    (0.97333333, "0.9733"),
    (-12.5, "-12.5000"),
    (3.14159e-5, "3.142e-05"),
    (-1e300, "-1e+300"),
    (math.inf, "inf"),
    (math.nan, "nan"),
])  # fmt: skip
def test_no_size_of_a_figure_hides_its_digits(value, shown):
    assert in_digits(value) == shown


@pytest.mark.parametrize(
    "speed", [None, Throughput(1e3, 1e-3, 1e-5, 0.25, 100)]
)
def test_a_result_comes_back_from_its_json(speed):
    result = RunResult(
        "stopped",
        12,
        1.5,
        2,
        64,
        16,
        2,
        3.25,
        4.5,
        2**33,
        speed,
        {"val_loss": 0.125, "worst": math.inf},
        "/a/b",
        "why",
    )
    assert parse_json(result.to_json().encode(), RunResult) == result
    assert json.loads(result.to_json())["status"] == "stopped"
