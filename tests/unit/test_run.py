"""From a file to a RunSpec, and the run's directory: what is refused, and when
a run is complete already.
"""

import os
import pickle
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.specs import dotted, error_of, read_spec
from trainers.checkpoint.manifest import FileEntry, Manifest, folder_name
from trainers.config import TrainConfig
from trainers.config.yaml import dump_yaml, parse_mapping
from trainers.errors import ConfigError, StorageError
from trainers.launch.spec import (
    MARK,
    check_precision,
    read_file,
    torchrun_world_size,
)
from trainers.lease import LEASE, held
from trainers.measure.result import RunResult
from trainers.start import check_kept, prepare_storage

MODULE = "task_of_test_run"
TASK = """
import torch
from trainers.task import Task

class Mine(Task):
    def __init__(self, width=3):
        self.width = width
"""
TREE = {
    "task": f"{MODULE}:Mine",
    "name": "mine",
    "epochs": 2,
    "global_batch_size": 8,
    "optimizer": {"lr": 0.1},
    "launcher": "local",
}


@pytest.fixture
def user(user):
    """With a task and its run."""
    (user / f"{MODULE}.py").write_text(TASK)
    (user / "train.yaml").write_text(dump_yaml(TREE))
    yield user
    sys.modules.pop(MODULE, None)


def read(user, **overrides):
    return read_spec(str(user / "train.yaml"), dotted(overrides))


def test_a_file_becomes_a_spec(user, tmp_path):
    spec = read(user)
    assert spec.uri == f"{tmp_path}/cwd/results/mine"
    assert spec.path == (str(user),)
    assert spec.config.batch_size == 8
    assert spec.config == TrainConfig.model_validate(TREE)
    assert spec.storage.uri == spec.uri
    assert pickle.loads(pickle.dumps(spec)) == spec  # noqa: S301
    assert parse_mapping(dump_yaml(spec.tree), "again") == spec.tree


def test_a_file_that_is_not_there_has_a_near_miss(user):
    with pytest.raises(ConfigError) as raised:
        read_file(str(user / "trian.yaml"))
    assert f"{user}/train.yaml" in raised.value.fix
    with pytest.raises(ConfigError):
        read_file(str(user / "nothing_like_it"))


@pytest.mark.parametrize("address", ["auto", None])
def test_the_size_of_a_cluster_is_not_this_machines(
    user, monkeypatch, address
):
    """Nor is that of a cluster which the user's program has connected Ray to."""
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    else:
        connected = SimpleNamespace(is_initialized=lambda: True)
        monkeypatch.setitem(sys.modules, "ray", connected)
    assert (
        read(
            user, launcher="ray", scaling__num_workers=100_000
        ).config.scaling.max_workers
        == 100_000
    )


def test_torchrun_decides_the_number_of_workers(user):
    (user / "train.yaml").write_text(
        dump_yaml(
            {**TREE, "launcher": "ray", "scaling": {"num_workers": [1, 4]}}
        )
    )
    spec = read_spec(str(user / "train.yaml"), {}, world_size=1)
    assert spec.config.scaling.num_workers == 1
    assert spec.config.launcher == "spawn"


def test_torchrun_on_many_machines_is_not_held_against_this_one(
    user, monkeypatch
):
    cores = len(os.sched_getaffinity(0))
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 4 * cores,
        "LOCAL_WORLD_SIZE": cores,
        "LOCAL_RANK": 0,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert torchrun_world_size() == 4 * cores
    spec = read_spec(str(user / "train.yaml"), {}, torchrun_world_size())
    assert spec.config.scaling.num_workers == 4 * cores


def test_the_precision_is_checked_where_workers_run(user):
    spec = read(user, precision="tf32")
    check_precision(spec, "cuda")
    with error_of("precision"):
        check_precision(spec, "cpu")
    check_precision(read(user, device="cpu"))


def finish(spec, status="done"):
    """What a run leaves when it ends."""
    result = RunResult(
        status, 2, 2.0, 1, 8, 8, 1, 1.0, 2.0, 100, metrics={"val_loss": 0.5}
    )
    spec.storage.write("result.json", result.to_json().encode())
    return result


def test_a_new_run_leaves_its_configuration(user):
    spec = read(user)
    assert prepare_storage(spec, fresh=False) is None
    assert spec.storage.names() == ["config.yaml"]
    kept = parse_mapping(spec.storage.read("config.yaml").decode(), "f")
    assert kept == {**spec.tree, "task_dir": spec.path[0]}, (
        "and where its task is"
    )


@pytest.mark.parametrize("status", ["stopped", "diverged"])
def test_an_incomplete_run_goes_on(user, status):
    spec = read(user)
    prepare_storage(spec, fresh=False)
    finish(spec, status)
    assert prepare_storage(spec, fresh=False) is None


def test_a_longer_run_goes_on_until_it_is_done(user):
    prepare_storage(read(user), fresh=False)
    finish(read(user))
    longer = read(user, epochs=5)
    assert prepare_storage(longer, fresh=False) is None
    # Killed before it was done: the old result must not be taken for the new
    # run's.
    assert prepare_storage(longer, fresh=False) is None
    finish(longer)
    assert prepare_storage(longer, fresh=False) is not None


@pytest.mark.parametrize(
    "overrides",
    [
        {"seed": 1},
        {"global_batch_size": 4},
        {"optimizer__lr": 0.2},
        {"task_args": {"width": 4}},
    ],
)
def test_another_run_of_the_same_name_is_refused(user, overrides):
    prepare_storage(read(user), fresh=False)
    with pytest.raises(ConfigError) as raised:
        prepare_storage(read(user, **overrides), fresh=False)
    assert (
        raised.value.field in overrides
        or raised.value.field == next(iter(overrides)).split("__")[0]
    )
    assert (
        prepare_storage(read(user, name="other", **overrides), fresh=False)
        is None
    )


def test_workers_and_speed_may_change_between_launches(user):
    prepare_storage(read(user), fresh=False)
    changed = {
        "microbatch_size": 2,
        "data__num_workers": 1,
        "checkpoint__keep": 5,
        "compile": "default",
    }
    assert prepare_storage(read(user, **changed), fresh=False) is None


def test_fresh_deletes_nothing_that_is_no_run(user, tmp_path):
    """`--name` and `--storage_path` are typed by hand: a directory without our
    files is not ours to delete.
    """
    (tmp_path / "home" / "mine").mkdir(parents=True)
    (tmp_path / "home" / "mine" / "thesis.tex").write_text("years of work")
    try:
        prepare_storage(
            read(user, storage_path=str(tmp_path / "home")), fresh=True
        )
    except ConfigError as error:
        assert "mine" in str(error)  # noqa: PT017
    assert (tmp_path / "home" / "mine" / "thesis.tex").exists()


def checkpoint(spec):
    """A checkpoint as its manifest describes it; where it is."""
    entries = {
        name: FileEntry(0, "0" * 64) for name in ("state.pt", "rank-00000.pt")
    }
    kept = spec.storage.child("checkpoints", folder_name(2))
    for name in entries:
        kept.write(name, b"")
    kept.write("manifest.json", Manifest(2, 1, entries).to_json())
    return kept.uri


@pytest.mark.parametrize(
    "lost", ["manifest.json", "state.pt", "rank-00000.pt", ""]
)
def test_a_result_is_worth_no_more_than_its_checkpoint(user, caplog, lost):
    """Of a run that has just ended, and of one that is found to be complete;
    wherever the run lies by now.
    """
    spec = read(user)
    prepare_storage(spec, fresh=False)
    checkpoint(spec)
    result = replace(
        finish(spec), checkpoint=f"/moved/since/checkpoints/{folder_name(2)}"
    )
    spec.storage.write("result.json", result.to_json().encode())
    check_kept(spec.storage, result)
    assert (
        prepare_storage(read(user, log_every_steps=3), fresh=False) == result
    )
    spec.storage.delete(f"checkpoints/{folder_name(2)}/{lost}")
    with pytest.raises(StorageError, match=lost or "manifest.json"):
        check_kept(spec.storage, result)
    assert prepare_storage(spec, fresh=False) is None
    assert "resumes from its newest checkpoint" in caplog.text


def test_fresh_starts_anew_and_leaves_the_lease(user):
    spec = read(user)
    with held(spec.storage, MARK) as token:
        prepare_storage(spec, fresh=True)
        finish(spec)
        checkpoint(spec)
        assert prepare_storage(read(user, seed=7), fresh=True) is None
        assert spec.storage.names() == ["config.yaml", "lease.json"]
        replace(spec, token=token).storage.write("log/1", b"")
    assert spec.storage.names() == ["config.yaml", "log"]


def test_a_live_run_is_neither_started_again_nor_deleted(user, capsys):
    from trainers.__main__ import main

    spec = read(user)
    with held(spec.storage, MARK):
        prepare_storage(spec, fresh=False)
        before = spec.storage.read(LEASE), spec.storage.names()
        for options in ([], ["--fresh"]):
            where = ["--storage_path", spec.storage.parent.uri]
            assert main([str(user / "train.yaml"), *where, *options]) == 2
            [line] = capsys.readouterr().err.splitlines()
            assert f"is in use: process {os.getpid()} on " in line
        assert (spec.storage.read(LEASE), spec.storage.names()) == before
