"""Where a run's time goes: the shares add up, and each cause is told by what it does to a step."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.specs import make, tree
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.yaml import dump_yaml
from trainers.explain.explanation import advise, explain, read_subject
from trainers.explain.profile import ProfileJob, side_by_side
from trainers.explain.readings import Profile, RankReadings, Readings, Span, Suspicion
from trainers.explain.recorded import Recorded, run_shares
from trainers.explain.segments import Segments, parts_timed, stale_reads
from trainers.explain.suspect import suspect
from trainers.explain.verify import CompareJob, Verified, sample_s
from trainers.launch.local import LocalContext, run_local
from trainers.measure.clock import Throughput
from trainers.measure.result import Pauses, RunResult

HEALTHY = {"loader": 0.1, "transform": 0.1, "forward": 3.0, "backward": 5.0, "optimizer": 0.5, "other": 0.1}


def rank(number: int = 0, blocked: dict[str, float] | None = None, stolen: float = 0.0, **ms: float) -> RankReadings:
    wall_s = {name.replace("_", " "): value / 1e3 for name, value in (HEALTHY | ms).items()}
    return RankReadings(number, wall_s, {key: value / 1e3 for key, value in (blocked or {}).items()}, {}, stolen)


def readings(*ranks: RankReadings, **changes: Any) -> Readings:
    ranks = ranks or (rank(),)
    step_s = sum(sum(one.wall_s.values()) for one in ranks) / len(ranks)
    known = {
        "samples": 64,
        "microbatch_size": 64,
        "accumulation": 1,
        "train_samples": 10_000,
        "device": "cpu",
        "cores": 4,
    }
    return Readings(list(ranks), step_s, step_s, 100, **(known | changes))


def config(**changes: Any) -> TrainConfig:
    tree: dict[str, Any] = {"task": "task:T", "epochs": 20, "global_batch_size": 64, "optimizer": {"lr": 0.1}}
    return build(TrainConfig, tree | changes, "test")


CASES: dict[str, tuple[Readings, dict[str, Any], dict[str, Any]]] = {
    "slow loader": (readings(rank(loader=9.0)), {}, {"data.num_workers": 2}),
    "slow transform": (readings(rank(transform=4.0), hand_over_s=0.3e-3), {}, {}),
    "hidden synchronisation": (readings(rank(blocked={"forward": 6.0}, forward=9.0)), {}, {}),
    "straggling rank": (readings(rank(waiting_for_ranks=4.0), rank(1, forward=7.0), all_reduce_s=0.0), {}, {}),
    "small all-reduce buckets": (
        readings(rank(communication=4.0), rank(1, communication=4.0), all_reduce_s=1e-3),
        {"ddp": {"bucket_cap_mb": 1}},
        {"ddp.bucket_cap_mb": 25},
    ),
    "slow all-reduce": (
        readings(rank(communication=4.0), rank(1, communication=4.0), all_reduce_s=4e-3),
        {},
        {"ddp.compression": "bf16"},
    ),
    "host-bound small batches": (readings(fixed_share=0.9), {}, {"global_batch_size": 256}),
    "microbatch too small": (
        readings(accumulation=8, microbatch_size=8),
        {"microbatch_size": 8},
        {"microbatch_size": "auto"},
    ),
    "wrong precision": (
        readings(device="cuda", device_peaks={"fp32": 67e12, "bf16": 989e12}),
        {},
        {"precision": "bf16"},
    ),
    "busy neighbour": (readings(rank(stolen=0.5)), {}, {}),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_cause_is_told_by_what_it_does_to_a_step(kind: str) -> None:
    measured, changes, expected = CASES[kind]
    first, *others = suspect(measured, config(**changes))
    assert (first.kind, first.changes) == (kind, expected)
    assert first.gain.value > 0.05
    assert others == []


def test_a_neighbour_takes_nothing_of_what_waits_for_something_else() -> None:
    first, second = suspect(readings(rank(stolen=0.6, forward=12.0, blocked={"forward": 8.9})), config())
    assert (first.kind, second.kind) == ("hidden synchronisation", "busy neighbour")
    assert first.gain.value == pytest.approx(0.5)
    assert second.gain.value == pytest.approx(0.3)


def test_a_read_of_an_asynchronous_device_costs_what_steps_without_it_save() -> None:
    of_gpu = replace(rank(), reads={"task.py:7": 1})
    (found,) = suspect(readings(of_gpu, device="cuda", reads_gain=[0.3, 0.25, 0.35]), config())
    assert (found.kind, found.gain) == ("hidden synchronisation", Span(0.3, 0.25, 0.35))
    assert "task.py:7" in found.words
    assert suspect(readings(of_gpu, device="cuda", reads_gain=[0.01, 0.0, 0.02]), config()) == []


def test_stale_reads_give_what_was_read_at_the_same_place() -> None:
    known: dict[tuple[str, int], Any] = {}
    found = []
    for value in (1.0, 2.0):
        with stale_reads(known) as begin:
            begin()
            for tensor in (torch.tensor(value), torch.tensor(10 * value)):
                found.append(tensor.item())
    assert found == [1.0, 10.0, 1.0, 10.0]
    assert torch.tensor(2.0).item() == 2.0


def test_a_healthy_step_has_no_cause() -> None:
    assert suspect(readings(rank(), rank(1), all_reduce_s=1e-4, fixed_share=0.3), config()) == []


@pytest.mark.parametrize(
    "one", [rank(transform=12.0), rank(blocked={"forward": 12.0}, forward=15.0), rank(loader=12.0, host_reads=12.0)]
)
def test_a_cause_that_is_the_same_for_any_batch_is_no_small_batch(one: RankReadings) -> None:
    found = suspect(readings(one, fixed_share=0.7), config())
    assert "host-bound small batches" not in [cause.kind for cause in found]


def test_what_one_rank_takes_longer_for_any_batch_is_a_straggler_alone() -> None:
    late = readings(rank(waiting_for_ranks=6.0), rank(1, forward=9.0), all_reduce_s=0.0, fixed_share=0.6)
    assert [one.kind for one in suspect(late, config())] == ["straggling rank"]


def test_a_larger_batch_is_for_whatever_most_of_a_step_is_the_same_by() -> None:
    """Gradients are 6 of 14 ms; of the rest, calls are less, or more."""
    slow = [rank(number, communication=6.0) for number in (0, 1)]
    less, more = (suspect(readings(*slow, all_reduce_s=6e-3, fixed_share=share), config()) for share in (0.8, 0.95))
    assert [(one.kind, *one.changes) for one in less] == [
        ("slow all-reduce", "global_batch_size"),
        ("slow all-reduce", "ddp.compression"),
    ]
    assert [(one.kind, *one.changes) for one in more] == [
        ("host-bound small batches", "global_batch_size"),
        ("slow all-reduce", "ddp.compression"),
    ]


def test_gradients_that_are_added_up_beside_the_backward_pass_take_time_too() -> None:
    """Nothing of it is left after the backward pass, which it slows from 5 to 13 ms."""
    ranks = [rank(number, backward=13.0) for number in (0, 1)]
    measured = readings(*ranks, all_reduce_s=6e-3, sent_share=0.48, fixed_share=0.8)
    assert [(one.kind, *one.changes) for one in suspect(measured, config())] == [
        ("slow all-reduce", "global_batch_size"),
        ("slow all-reduce", "ddp.compression"),
    ]


def test_a_larger_batch_is_placed_by_the_cause_it_is_advised_for() -> None:
    """Steps of 80 ms, of which the task waits 60: a larger batch has a share of that, too."""
    ranks = [rank(number, {"forward": 60.0}, forward=63.0, communication=11.0) for number in (0, 1)]
    waits, *others = suspect(readings(*ranks, all_reduce_s=11e-3, fixed_share=0.9), config())
    assert (waits.kind, [tuple(one.changes) for one in others]) == ("hidden synchronisation", [("ddp.compression",)])
    small = replace(CASES["host-bound small batches"][0], fixed_share=0.5)
    (found,) = suspect(small, config())
    probed = replace(found, gain=Span(0.7, 0.6, 0.8))
    assert (found.own, probed.own, probed.scaled(0.5).own) == pytest.approx((0.375, 0.375, 0.1875))
    before = advise(Recorded(config()), Profile(small, [Suspicion("slow transform", "", Span(0.4, 0.3, 0.5)), probed]))
    assert [one.kind for one in before] == ["slow transform", "host-bound small batches"]


def test_what_all_ranks_wait_for_is_no_straggler_and_a_straggler_no_common_cause() -> None:
    both = readings(*(rank(number, blocked={"forward": 6.0}, forward=9.0) for number in (0, 1)), all_reduce_s=0.0)
    assert [one.kind for one in suspect(both, config())] == ["hidden synchronisation"]
    one = readings(rank(waiting_for_ranks=6.0), rank(1, blocked={"forward": 6.0}, forward=9.0), all_reduce_s=0.0)
    assert [found.kind for found in suspect(one, config())] == ["straggling rank"]


def test_time_is_charged_to_one_name_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("trainers.explain.segments.time.perf_counter", lambda: float(next(ticks)))
    segments = Segments(torch.device("cpu"))
    with segments.within("forward"):
        with segments.within("backward"):
            segments.become("communication")
        segments.timed("optimizer", lambda: None)()
    wall, _ = segments.take()
    assert wall == {"other": 2, "forward": 3, "backward": 1, "communication": 1, "optimizer": 1}
    assert segments.take()[0] == {"other": 1}


def test_a_host_read_is_charged_without_what_it_takes_to_time_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the clock takes 1 s, and 100 reads nothing."""
    ticks = itertools.count()
    monkeypatch.setattr("trainers.explain.segments.time.perf_counter", lambda: float(next(ticks)))
    step = SimpleNamespace(forward=SimpleNamespace(model=None))
    parts: Any = SimpleNamespace(
        train_feed=SimpleNamespace(_transform=None), optimizer=SimpleNamespace(step=None), step=step
    )
    segments = Segments(torch.device("cpu"))
    with parts_timed(parts, segments):
        assert [torch.tensor(2.0).item() for _ in range(3)] == [2.0] * 3
    wall, _ = segments.take()
    assert wall["host reads"] == pytest.approx(3 * 1 / 100)
    assert [*segments.read_at.values()] == [3]


def result(**changes: Any) -> RunResult:
    known: dict[str, Any] = {
        "status": "done",
        "steps": 1000,
        "epochs": 20.0,
        "world_size": 1,
        "global_batch_size": 64,
        "microbatch_size": 64,
        "accumulation": 1,
        "train_time_s": 10.0,
        "wall_time_s": 20.0,
        "peak_memory_bytes": 1,
        "throughput": Throughput(6400.0, 0.01, 0.001, 0.1, 995),
        "pauses": Pauses(20, 1.0, 2, 0.1),
    }
    return RunResult(**(known | changes))


def machine(gpu: Any = None, **figures: float) -> Any:
    return {"rank": 0, "gpu": gpu, "machine": figures, "backward_s": None}


SLOW_WINDOWS = [{"step": 50 + at, "step_time_s": 0.01 if at < 30 else 0.02} for at in range(100)]
RECORDED: dict[str, tuple[RunResult, list[dict[str, Any]], dict[str, Any]]] = {
    "evaluation too often": (result(pauses=Pauses(20, 8.0, 2, 0.1, 0.4)), [], {"evaluate.every_epochs": 40}),
    "checkpoint stalls": (result(pauses=Pauses(20, 0.5, 20, 8.0)), [], {"checkpoint.every_epochs": 40}),
    "recompiles": (
        result(compile={"graphs": 9, "graph_breaks": 0, "recompiles": 8}, first_step_s=1.0, train_time_s=18.0),
        [],
        {},
    ),
    "thermal throttling": (
        result(ranks=[machine({"slowed_by": ["heat"], "temperature_c": 91.0})]),
        SLOW_WINDOWS,
        {},
    ),
    "swapped memory": (result(ranks=[machine(swapped_bytes=2e9, major_faults=900.0)]), SLOW_WINDOWS, {}),
}


@pytest.mark.parametrize("kind", RECORDED)
def test_records_show_what_lies_outside_a_step(kind: str) -> None:
    of_run, log, expected = RECORDED[kind]
    measured = Profile(replace(readings(), plain_step_s=0.01), [])
    recorded = Recorded(config(), of_run, log)
    (found,) = advise(recorded, measured)
    assert (found.kind, found.changes) == (kind, expected)
    assert sum(run_shares(recorded, measured).values()) == pytest.approx(1)


def test_what_is_written_beside_the_steps_costs_what_they_take_longer() -> None:
    often = result(train_time_s=19.0, pauses=Pauses(0, 0.0, 20, 1.0, written_s=18.0))
    now = replace(readings(), plain_step_s=0.008)  # the run's took 0.01 s
    (found,) = advise(Recorded(config(), often), Profile(now, []))
    assert found.kind == "checkpoint stalls"
    assert found.predicted.value == pytest.approx((1.0 + 0.2 * 19.0) / 20 * 19 / 20)
    seldom = replace(often, pauses=Pauses(0, 0.0, 20, 1.0, written_s=0.1))
    assert list(advise(Recorded(config(), seldom), Profile(now, []))) == []


def test_a_healthy_run_has_nothing_to_gain_and_shares_add_up_without_a_profile() -> None:
    recorded = Recorded(config(), result(throughput=Throughput(6400.0, 0.01, 0.001, 0.01, 995)))
    assert list(advise(recorded, None)) == []
    assert list(advise(recorded, Profile(readings(), []))) == []
    shares = run_shares(recorded, None)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["evaluation"] == pytest.approx(0.05)


def test_what_compiles_again_is_counted_once_for_the_whole_run() -> None:
    compiling = Profile(readings(recompiled_share=0.2), [])
    (found,) = advise(Recorded(config(compile="default")), compiling)
    assert (found.kind, found.predicted.value) == ("recompiles", 0.2)
    shares = run_shares(Recorded(config(compile="default")), compiling)
    assert (shares["recompiles"], sum(shares.values())) == pytest.approx((0.2, 1))
    compiled = {"graphs": 3, "graph_breaks": 0, "recompiles": 2}
    without = result(compile=compiled, first_step_s=0.01)
    assert list(advise(Recorded(config(compile="default"), without), compiling)) == [], "the run took no time for it"


def test_a_gain_of_steps_is_one_of_the_runs_time() -> None:
    of_steps = Suspicion("slow loader", "", Span(0.4, 0.3, 0.5))
    (found,) = advise(Recorded(config(), result()), Profile(readings(), [of_steps]))
    assert found.predicted == Span(0.2, 0.15, 0.25)  # half of the run is training
    (found,) = advise(Recorded(config(), result()), Profile(readings(), [replace(of_steps, in_evaluation=True)]))
    assert found.predicted.value == pytest.approx(0.4 * (10 + 1) / 20)


def test_it_is_measured_by_workers_of_the_cluster(tmp_path: Path) -> None:
    keys = tree(tmp_path, launcher="ray", scaling__num_workers=64, microbatch_size=6, global_batch_size=1536)
    (tmp_path / "train.yaml").write_text(dump_yaml(keys))
    asked: list[Any] = []

    def cluster(job: Any) -> Any:
        asked.append(job)
        if isinstance(job, CompareJob):
            return Verified(Span(0.3, 0.2, 0.4))
        small = Suspicion("microbatch too small", "", Span(0.4, 0.3, 0.5), {"microbatch_size": 24})
        return Profile(readings(), [small, Suspicion("slow transform", "", Span(0.2, 0.1, 0.3))])

    subject = read_subject(str(tmp_path / "train.yaml"))
    first, second = explain(subject, 1.0, verify=True, cluster=cluster).advice
    assert (first.verified, second.verified) == (Span(0.3, 0.2, 0.4), None)
    _, compared = asked
    assert all(job.config.launcher == "ray" and job.config.scaling.num_workers == 64 for job in asked)
    assert (compared.config.microbatch_size, compared.new["microbatch_size"]) == (6, 24)
    assert not explain(subject, 1.0).profiled, "so many workers do not fit on this machine"
    assert explain(subject, 1.0, cluster=cluster).advice[0].verified is None


def test_what_is_due_seldom_is_counted_by_the_whole_run() -> None:
    log = [{"step": step, "train_loss": 1.0, "train_time_s": step / 100} for step in (5, 55)]
    short = result(steps=55, epochs=55 / 50, pauses=Pauses(3, 9.0, 1, 2.0, first_evaluation_s=8.0))
    whole = config(evaluate={"every_steps": 100}, checkpoint={"every_steps": 500})
    assert sample_s(short, log, whole, whole) == pytest.approx((0.01 + 0.5 / 100 + 2.0 / 500) / 64)


def test_a_larger_batch_does_not_make_what_is_done_at_the_end_cheaper() -> None:
    log = [{"step": step, "train_loss": 1.0, "train_time_s": step / 100} for step in (5, 55)]
    keys = {"max_steps": 100, "epochs": None, "evaluate": {"every_steps": 1000}}
    old, new = (config(global_batch_size=size, **keys) for size in (64, 256))
    short = result(steps=55, pauses=Pauses(3, 3.0, first_evaluation_s=1.0))
    assert sample_s(short, log, new, old) * 6400 == pytest.approx(25 * 0.01 + 1.0)


def test_a_short_run_of_a_compiled_one_compiles_once() -> None:
    log = [{"step": step, "train_loss": 1.0, "train_time_s": 5 + step / 20} for step in (5, 55)]
    compiled = {"graphs": 3, "graph_breaks": 0, "recompiles": 2}
    short = result(steps=50, train_time_s=6.0, compile=compiled, pauses=None)
    whole = config(max_steps=1000, epochs=None)
    assert sample_s(short, log, whole, whole) == pytest.approx((0.01 + 5.5 / 1000) / 64)


def test_a_run_counts_its_pauses(tmp_path: Path) -> None:
    found = run_local(make(tmp_path))
    assert found.pauses is not None
    assert (found.pauses.evaluations, found.pauses.checkpoints) == (3, 3)
    assert found.pauses.evaluation_s > found.pauses.first_evaluation_s > 0
    assert found.ranks[0]["machine"]["cpu_s"] > 0


def test_a_profile_takes_steps_and_leaves_nothing(tmp_path: Path) -> None:
    spec = make(tmp_path, microbatch_size=6, log_every_steps=5)
    job = ProfileJob(**asdict(spec), seconds=0.01)
    found = job.read_result(job.execute(LocalContext(spec.storage, "local")).to_json().encode())
    assert found.readings.steps == 12
    assert (found.readings.accumulation, found.readings.microbatch_size) == (4, 6)
    assert {"forward", "backward", "optimizer", "loader"} <= found.readings.shares().keys()
    assert sum(found.readings.shares().values()) == pytest.approx(1)
    assert not spec.storage.exists("")
    assert "item" not in vars(torch.Tensor)


def test_steps_that_take_longer_than_a_slice_are_compared(tmp_path: Path) -> None:
    spec = make(tmp_path)
    job = ProfileJob(**asdict(spec), seconds=0.01)
    with job.replica(spec.config, LocalContext(None, "local")) as parts:
        pair = side_by_side(parts, parts, 0.0)
    assert all(second > 0 for round_ in pair.rounds for second in round_)


def test_both_configurations_are_run(tmp_path: Path) -> None:
    spec = make(tmp_path, max_steps=1000, evaluate__every_epochs=1)
    new = {**spec.tree, "global_batch_size": 48}
    job = CompareJob(**asdict(spec), new=new, seconds=1.0, step_s=100.0, place=str(tmp_path / "turns"))
    found = job.read_result(job.execute(LocalContext(spec.storage, "local")).to_json().encode())
    assert found.gain.low <= found.gain.value <= found.gain.high < 1
    assert not spec.storage.exists("")


def test_a_configuration_s_own_task_is_run(tmp_path: Path) -> None:
    spec = make(tmp_path, max_steps=1000, task_args={"pids": str(tmp_path / "old")})
    new = {**spec.tree, "task_args": {"pids": str(tmp_path / "new")}}
    CompareJob(**asdict(spec), new=new, seconds=1.0, step_s=100.0, place=str(tmp_path / "turns")).execute(
        LocalContext(spec.storage, "local")
    )
    assert [len((tmp_path / name).read_text().split()) for name in ("old", "new")] == [4, 4]
