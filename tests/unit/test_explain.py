"""Where a run's time goes: the shares add up, and each cause is named by what it takes."""

from dataclasses import asdict

import pytest
import torch

from tests.specs import make, tree
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.yaml import dump_yaml
from trainers.errors import ConfigError
from trainers.explain import (
    CompareJob,
    Gain,
    ProfileJob,
    StepProfile,
    explain,
    name_causes,
    read_subject,
    run_shares,
)
from trainers.launch.local import LocalContext
from trainers.measure.figures import Throughput
from trainers.measure.result import Pauses, RunResult
from trainers.start import run_training

HEALTHY = {
    "data": 0.1,
    "transform": 0.1,
    "forward": 3.0,
    "backward": 5.0,
    "optimizer": 0.5,
    "host": 0.1,
}


def profile(parts=None, **changes):
    """A healthy step, in ms, with what is changed."""
    parts_s = {
        name: value / 1e3 for name, value in (HEALTHY | (parts or {})).items()
    }
    step_s = sum(parts_s.values())
    known = {
        "step_s": step_s,
        "parts": parts_s,
        "own_s": [step_s],
        "reads": {},
        "accumulation": 1,
        "device": "cpu",
    }
    return StepProfile(**(known | changes))


def config(**changes):
    keys = {
        "task": "task:T",
        "epochs": 20,
        "global_batch_size": 64,
        "optimizer": {"lr": 0.1},
    }
    return build(TrainConfig, keys | changes, "test")


def result(**changes):
    """Of a run that trained in half of its time."""
    known = {
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
        "throughput": Throughput(6400.0, 0.01, 0.001, 0.02, 995),
        "pauses": Pauses(20, 0.4, 2, 0.1),
    }
    return RunResult(**(known | changes))


STEPS = {
    "slow loader": (profile({"data": 9.0}), {}, {"data.num_workers": 2}),
    "slow transform": (profile({"transform": 4.0}), {}, {}),
    "hidden synchronisation": (profile(reads={"task.py:7": 4e-3}), {}, {}),
    "straggling rank": (profile(own_s=[5e-3, 5e-3, 8e-3]), {}, {}),
    "slow all-reduce": (profile({"all-reduce": 4.0}), {}, {}),
    "host-bound small batches": (
        profile(device="cuda", busy_s=1e-3),
        {"precision": "bf16"},
        {},
    ),
    "microbatch too small": (
        profile(accumulation=8),
        {"microbatch_size": 8},
        {"microbatch_size": "auto"},
    ),
    "wrong precision": (profile(device="cuda"), {}, {"precision": "bf16"}),
}
RECORDS = {
    "evaluation too often": result(pauses=Pauses(20, 8.0, 2, 0.1)),
    "checkpoint stalls": result(pauses=Pauses(20, 0.5, 20, 8.0)),
    "compiling": result(compile={"graphs": 9}, train_time_s=18.0),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_cause_is_named_by_what_it_takes_of_a_step(kind):
    measured, changes, expected = STEPS[kind]
    (found,) = name_causes(config(**changes), None, measured)
    assert (found.kind, found.changes) == (kind, expected)
    assert kind in "\n".join(found.lines())


@pytest.mark.parametrize("kind", RECORDS)
def test_records_show_what_lies_outside_a_step(kind):
    of_run = RECORDS[kind]
    (found,) = name_causes(config(), of_run, profile())
    assert (found.kind, found.changes) == (kind, {})
    assert sum(run_shares(of_run, profile()).values()) == pytest.approx(1)


def test_a_healthy_run_has_no_cause():
    assert name_causes(config(), result(), profile()) == []
    assert name_causes(config(), result(), None) == []
    shares = run_shares(result(), None)
    assert (shares["evaluation"], sum(shares.values())) == pytest.approx(
        (0.02, 1)
    )


def test_a_run_that_cannot_be_profiled_is_explained_by_its_records(tmp_path):
    spec = make(tmp_path)
    done = run_training(spec, fresh=False)
    assert (done.pauses.evaluations, done.pauses.checkpoints) == (3, 3)

    def workers(job):
        raise ConfigError("scaling.num_workers", 9, "must fit", "use fewer")

    found = explain(read_subject(spec.uri), workers, 0.01)
    assert "must fit" in found.notes[0]
    assert {"steps", "evaluation", "checkpoints"} <= found.shares.keys()


def test_a_profile_takes_steps_and_leaves_nothing(tmp_path):
    spec = make(tmp_path, microbatch_size=6)
    job = ProfileJob(**asdict(spec), seconds=0.01)
    found = job.read_result(
        job.execute(LocalContext(spec.storage, "local")).to_json().encode()
    )
    assert found.accumulation == 4
    assert {
        "data",
        "forward",
        "backward",
        "optimizer",
    } <= found.shares().keys()
    assert sum(found.shares().values()) == pytest.approx(1)
    assert not spec.storage.exists("")
    assert "item" not in vars(torch.Tensor)


def profiled(tmp_path, **task):
    spec = make(tmp_path, **task, max_steps=3, evaluate={}, checkpoint={})
    job = ProfileJob(**asdict(spec), seconds=0.01)
    return job.execute(LocalContext(None, "local"))


def test_optimizers_that_step_one_by_one_are_timed(tmp_path):
    task = "tests.unit.test_phases:Adversarial"
    found = profiled(tmp_path, task=task).shares()
    assert found["optimizer"] > 0
    assert sum(found.values()) == pytest.approx(1)


def test_a_stream_is_profiled_for_longer_than_its_run(tmp_path):
    task = {
        "task": "tests.stream_tasks:Streamed",
        "task_args": {"kind": "numbered"},
    }
    found = profiled(tmp_path, **task)
    assert found.step_s > 0


def test_a_batch_schedule_is_profiled_at_its_largest_size(tmp_path):
    schedule = [{"until_samples": 60, "size": 4}, {"size": 8}]
    keys = tree(tmp_path, global_batch_size=None, batch_schedule=schedule)
    (tmp_path / "train.yaml").write_text(dump_yaml(keys))

    def workers(job):
        assert (job.config.batch_size, job.config.changes_batch) == (8, False)
        return profile()

    found = explain(read_subject(str(tmp_path / "train.yaml")), workers, 0.01)
    assert (found.notes, found.causes) == ([], [])


def test_both_configurations_are_run_where_a_key_is_to_be_changed(tmp_path):
    keys = tree(tmp_path, launcher="spawn", microbatch_size=6)
    (tmp_path / "train.yaml").write_text(dump_yaml(keys))
    asked = []

    def workers(job):
        asked.append(job)
        if isinstance(job, CompareJob):
            return Gain(0.3, 0.2, 0.4)
        return profile({"transform": 6.0}, accumulation=4)

    subject = read_subject(str(tmp_path / "train.yaml"))
    microbatch, transform = explain(subject, workers, 1.0, verify=True).causes
    assert (microbatch.kind, microbatch.gain) == (
        "microbatch too small",
        Gain(0.3, 0.2, 0.4),
    )
    assert (transform.kind, transform.gain) == ("slow transform", None)
    _, compared = asked
    assert (
        compared.config.microbatch_size,
        compared.new["microbatch_size"],
    ) == (
        6,
        "auto",
    )


def test_a_configuration_s_own_task_is_run(tmp_path):
    spec = make(
        tmp_path, max_steps=1000, task_args={"pids": str(tmp_path / "old")}
    )
    new = {**spec.tree, "task_args": {"pids": str(tmp_path / "new")}}
    job = CompareJob(**asdict(spec), new=new, steps=3)
    found = job.read_result(
        job.execute(LocalContext(spec.storage, "local")).to_json().encode()
    )
    assert found.low <= found.value <= found.high < 1
    assert [
        len((tmp_path / name).read_text().split()) for name in ("old", "new")
    ] == [
        4,
        4,
    ]
    assert not spec.storage.exists("")
