"""Lanes: trial after trial; what goes wrong in one stays in it."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from tests.lane_tasks import POISON, Poison
from tests.specs import BASE, REPOSITORY, evaluations, logged, make
from tests.waits import when
from trainers import lease
from trainers.config.model import build
from trainers.errors import LeaseError
from trainers.launch.local import run_local
from trainers.lease import held
from tune.config import SweepConfig
from tune.sweeps.spec import SAVED, _spec, prepare
from tune.trials.journal import Journal

pytestmark = pytest.mark.ray

TRAIN = {
    key: value
    for key, value in BASE.items()
    if key not in ("launcher", "checkpoint")
}


def sweep(tmp_path, space, train=None, **keys):
    tree = {
        "name": "sweep",
        "storage_path": str(tmp_path),
        "train": {**TRAIN, **(train or {})},
        "space": space,
        "objective": {"metric": "val_loss"},
        "lanes": 1,
        **keys,
    }
    config = build(SweepConfig, tree, "test")
    return _spec(
        config, config.train, "test", "test", REPOSITORY, own_workers=True
    )


def run(spec):
    from tune.sweeps._run import run_sweep

    prepare(spec, fresh=False)
    return run_sweep(spec)


def rows(curve):
    """What must be equal: everything but times."""
    return [
        {
            key: row[key]
            for key in ("step", "epoch", "val_loss", "val_accuracy")
        }
        for row in curve
    ]


def named(trials, records):
    """The record of each trial, by its name."""
    return {
        name: next(r for r in records if r.config["task_args"] == args)
        for name, args in trials.items()
    }


POISONED = "tests.lane_tasks:Poison"
ENDED = {
    "exit": ("error", "exit code 0"),
    "system exit": ("error", "exit code 3"),
    "interrupt": ("error", "KeyboardInterrupt was raised"),
    "abort": ("error", "SIGABRT"),
    "crash": ("error", "SIGSEGV"),
    "kill": ("error", "SIGKILL"),
    "kill group": ("error", "SIGKILL"),
    "alarm": ("error", "SIGALRM"),
    "stop": ("hung", ""),
}
"""The status of each, and what its message names."""
METHODS = [name[1:] for name in vars(Poison) if re.match("_[a-z]", name)]
KINDS = [kind for kind in (*METHODS, *POISON) if kind not in ENDED]
CLEAN = {"drawn": 5}


def hostile(log):
    """Trials that poison their process, with clean ones between them."""
    trials = {"clean": CLEAN}
    for number, kind in enumerate((*KINDS, *ENDED), 1):
        trials[kind] = {"poison": kind, "log": str(log)}
        if number % 10 == 0 or kind in ENDED:
            trials[f"clean after {kind}"] = {**CLEAN, "after": kind}
    return trials


@pytest.fixture(scope="module")
def ended(tmp_path_factory, driver):
    """A lane's records, by name, and their directory; then the sweep's was deleted."""
    from tests.on_ray.test_sweep_faults import kill, lines
    from tune.sweeps._run import run_sweep

    directory = tmp_path_factory.mktemp("ended")
    pids = directory / "pids"
    trials = {
        "first": {},
        "its actor dies": {"pids": str(pids), "pause_s": 0.1},
        "raises": {"fail_at": 12, "failure": "raise"},
        "diverges": {"fail_at": 5, "failure": "nan"},
        "fits eight": {"fits": 8},
        "fits none": {"fits": 0},
        "killed once": {
            "fail_at": 20,
            "failure": "kill",
            "marker": str(directory / "killed"),
        },
        "hangs": {"fail_at": 20, "failure": "sleep"},
        "runs out in mid-training": {
            "fail_at": 12,
            "failure": "oom",
            "marker": str(directory / "ran out"),
        },
        **hostile(directory / "survived"),
        "last, same as first": {"samples": 203},
    }
    at_the_end = {"fail_at": 1, "failure": "sleep"}
    thread = when(lambda: lines(pids) == 1, lambda: kill("ResourceTrainable"))
    spec = sweep(
        directory,
        {"task_args": [*trials.values(), at_the_end]},
        {"failure": {"hang_timeout_s": 10.0}, "task": POISONED},
    )
    records = []

    def delete():
        records.extend(Journal(spec.storage).records())
        shutil.rmtree(spec.storage.path, ignore_errors=True)

    deleter = when(
        lambda: len(spec.storage.names("trials")) == len(trials), delete
    )

    def run_it():
        with held(spec.storage, SAVED) as token:
            prepare(spec, fresh=False)
            run_sweep(replace(spec, token=token))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "BEAT_S", 0.2)
        with pytest.raises(
            LeaseError, match="is gone: the directory was deleted"
        ):
            run_it()
    thread.join()
    deleter.join()
    assert lines(pids) == 1, (
        "what the dead actor had submitted was heard to its end, not run again"
    )
    return named(trials, records), directory


@pytest.mark.full
def test_a_hostile_trial_affects_itself_only(ended, tmp_path, command):
    """What it does to its process ends with it: the next has the losses that
    it has alone.
    """
    by_name, directory = ended
    assert len(KINDS) + len(ENDED) >= 40
    survived = (directory / "survived").read_text().splitlines()
    assert set(survived) == set(KINDS)
    tree = {
        **TRAIN,
        "task": POISONED,
        "task_args": CLEAN,
        "launcher": "local",
        "storage_path": str(tmp_path),
        "name": "alone",
    }
    (tmp_path / "alone.yaml").write_text(json.dumps(tree))
    done = command("-m trainers", str(tmp_path / "alone.yaml"), forked=True)
    assert done.code == 0, done.err
    alone = rows(logged(tmp_path / "alone", "val_loss"))
    for name, record in by_name.items():
        assert "clean" not in name or rows(record.curve) == alone, name
    for kind, (status, words) in ENDED.items():
        assert by_name[kind].status == status, kind
        assert words in by_name[kind].message


@pytest.mark.full
def test_what_goes_wrong_stays_in_its_trial(ended, tmp_path):
    by_name, directory = ended
    statuses = {
        "first": "done",
        "its actor dies": "done",
        "raises": "error",
        "diverges": "diverged",
        "fits eight": "done",
        "fits none": "out_of_memory",
        "killed once": "done",
        "hangs": "hung",
        "runs out in mid-training": "done",
        "last, same as first": "done",
    }
    assert {name: by_name[name].status for name in statuses} == statuses
    assert by_name["raises"].message.startswith(
        "rank 0: ValueError: injected: the task fails here (tasks.py:"
    )
    assert "in _fail" in by_name["raises"].traceback
    assert "made no step for" in by_name["hangs"].message
    assert "injected: 1 samples, 0 fit" in by_name["fits none"].message
    # Warm equals fresh: the last trial of the lane, after all of the above,
    # has the first one's curve, and both have the one that a process of its
    # own gives.
    assert rows(by_name["last, same as first"].curve) == rows(
        by_name["first"].curve
    )
    for name in ("killed once", "its actor dies"):
        assert rows(by_name[name].curve) == rows(by_name["first"].curve)
    assert (directory / "ran out").exists()
    for halved, whole in zip(
        rows(by_name["runs out in mid-training"].curve),
        rows(by_name["first"].curve),
        strict=True,
    ):
        assert halved == pytest.approx(
            whole, rel=1e-5
        )  # sums of halves round as the processor's kernels have it
    alone = make(tmp_path)
    run_local(alone)
    assert rows(by_name["first"].curve) == rows(evaluations(alone))


@pytest.mark.campaign
def test_fresh_isolation_gives_every_trial_its_own_process(tmp_path, driver):
    ran = tmp_path / "pids"
    spec = sweep(
        tmp_path,
        {"precision": ["fp32", "bf16"]},
        {"task_args": {"pids": str(ran)}},
        isolation="fresh",
    )
    records = run(spec)
    assert [record.status for record in records] == ["done", "done"]
    assert len(set(ran.read_text().split())) == 2


@pytest.mark.full
def test_in_a_lane_of_two_the_rank_that_failed_first_decides(tmp_path, driver):
    """The other one's broken collective is heard of sooner, and says nothing
    of the cause; no rank waits for long.
    """
    at = {"place": "training 20", "on_rank": 1}
    trials = {
        "healthy": {"place": ""},
        "killed always": {**at, "failure": "kill"},
        "raises": {**at, "failure": "raise"},
        "runs out": {**at, "failure": "oom"},
        "hangs in setup": {
            "place": "setup",
            "failure": "sleep",
            "short_phases": True,
        },
    }
    train = {
        "task": "tests.tasks:Stuck",
        "scaling": {"num_workers": 2},
        "failure": {"hang_timeout_s": 10.0},
    }
    train["global_batch_size"] = (
        4  # two groups, not four, until no microbatch is left that could fit
    )
    records = run(sweep(tmp_path, {"task_args": list(trials.values())}, train))
    by_name = named(trials, records)
    assert {name: record.status for name, record in by_name.items()} == {
        "healthy": "done",
        "killed always": "error",
        "raises": "error",
        "runs out": "out_of_memory",
        "hangs in setup": "hung",
    }
    assert (
        by_name["killed always"].message == "rank 1 died by SIGKILL, 3 times"
    )
    assert by_name["raises"].message.startswith(
        "rank 1: ValueError: injected: the task fails here (tasks.py:"
    )
    assert "on one rank" in by_name["runs out"].message
    culprit, waits = by_name["hangs in setup"].message.split("; rank 1")
    assert " s in setup (at tasks.py:" in culprit
    assert " s in the barrier after setup, waiting for other ranks" in waits
    assert "in _fail" in by_name["hangs in setup"].traceback


@pytest.mark.full
def test_trials_that_asha_stops_are_recorded_with_their_curves(
    tmp_path, driver
):
    train = {"max_steps": 60, "evaluate": {"every_steps": 5}}
    spec = sweep(
        tmp_path,
        {
            "optimizer.lr": [1e-2, 1e-9, 1e-8],
            "task_args": [{}, {"fail_at": 30, "failure": "raise"}],
        },
        train,
        scheduler="asha",
        lanes="auto",
    )
    records = run(spec)
    failing = [record for record in records if record.config["task_args"]]
    healthy = [record for record in records if not record.config["task_args"]]
    assert len(records) == 6
    assert {record.status for record in failing} <= {"error", "stopped"}
    assert "error" in {record.status for record in failing}
    best = min(
        (record for record in healthy if record.status == "done"),
        key=lambda r: r.metrics["val_loss"],
    )
    assert best.config["optimizer.lr"] == 1e-2
    for record in healthy:
        assert record.status in ("done", "stopped")
        assert record.curve
