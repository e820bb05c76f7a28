"""Sweeps over a training function for Ray Train, from a file."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import yaml

from tests.commands.test_output import records_of
from tests.on_ray.embedded import await_end_of_trials
from tests.on_ray.test_lanes import run
from tests.specs import REPOSITORY
from tests.waits import until
from trainers.__main__ import main as train
from tune.__main__ import main as tune
from tune.sweeps.spec import read_sweep
from tune.trials.journal import Journal

pytestmark = [pytest.mark.ray, pytest.mark.full]


def write(directory, train, **keys):
    """A sweep's file."""
    function = {
        "train_func": "tests.lane_functions:train",
        "task_dir": str(REPOSITORY),
        **train,
    }
    tree = {
        "name": "sweep",
        "storage_path": str(directory),
        "train": function,
        "lanes": 1,
        **keys,
    }
    file = directory / "sweep.yaml"
    file.write_text(yaml.safe_dump(tree))
    return str(file)


def test_a_rank_without_memory_a_killed_driver_and_the_best_trained(
    tmp_path, cluster, driver, monkeypatch, capsys, command
):
    """One rank of two runs out of memory in a place; the driver is killed amid
    that, and `resume` goes on, and tells in JSON.
    """
    note = tmp_path / "note"
    file = write(
        tmp_path,
        {
            "train_loop_config": {"lr": 0.01, "note": str(note)},
            "keys": {"batch_size_per_worker": "train_loop_config.batch_size"},
            "scaling": {"num_workers": 2},
        },
        space={
            "train_loop_config.batch_size": [64, 128, 32],
            "train_loop_config.place": ["backward", "optimizer"],
        },
        objective={"metric": "loss"},
    )
    killed = start([file], cluster)
    trials = tmp_path / "sweep" / "trials"
    # A record that is being written lies beside its place.
    until(
        lambda: [*trials.glob("*.json")],
        "a record",
        process=killed,
        every_s=0.01,
    )
    kill(killed)
    before = {path.name: path.read_text() for path in trials.glob("*.json")}
    begun = note.read_text()
    monkeypatch.setattr(
        "trainers.on_ray.cluster.disconnect", lambda: None
    )  # this process stays in the cluster
    done = command(
        "-m tune resume",
        str(tmp_path / "sweep"),
        "--json",
        ray_address=cluster.address,
        forked=True,
    )
    assert done.code == 0, done.err
    *told, result = records_of(done)
    assert tune(["report", str(tmp_path / "sweep"), "--quiet"]) == 0
    assert capsys.readouterr().out == f"{result['answer']}\n"
    assert tune(["report", str(tmp_path / "sweep")]) == 0
    said = capsys.readouterr().out

    spec = read_sweep(file, {})
    records = {
        (
            r.config["batch_size_per_worker"],
            r.config["train_loop_config.place"],
        ): r
        for r in journal(spec)
    }
    assert len(records) == 6
    assert (
        before.items()
        <= {path.name: path.read_text() for path in trials.iterdir()}.items()
    )
    for place in ("backward", "optimizer"):
        assert records[64, place].message.startswith(
            "rank 1: OutOfMemoryError: CUDA out of memory"
        )
        assert records[128, place].message.startswith(
            "a batch of 128 is not tried: one of 64 ran out of memory"
        )
        assert [records[size, place].status for size in (64, 128, 32)] == [
            "out_of_memory"
        ] * 2 + ["done"]
    assert "128" not in note.read_text()
    ended = [json.loads(text)["config"] for text in before.values()]
    ended_names = {
        f"{one['batch_size_per_worker']}-{one['train_loop_config.place']}"
        for one in ended
    }
    again = note.read_text().removeprefix(begun).split()
    assert not ended_names.intersection(again), (
        "only what had not finished runs"
    )
    assert "Batch 32 a worker, place backward: loss" in said
    assert result["status"] == "done"
    assert result["trials"] == {"done": 2, "out_of_memory": 4}
    assert [one["record"] for one in told] == ["trial"] * (6 - len(before))
    assert names(tmp_path / "sweep" / "lanes" / "*") == []

    interrupted = signal.getsignal(signal.SIGINT)
    assert train([str(tmp_path / "sweep" / "best.yaml")]) == 0
    assert signal.getsignal(signal.SIGINT) is interrupted, (
        "Ray's handler would keep its controller"
    )
    said = capsys.readouterr().out
    found = re.search(
        r"^done\n  loss (\S+)  epoch 2  words no number\n  checkpoint ",
        said,
        re.MULTILINE,
    )
    assert found, said
    # Ray's own TorchTrainer has trained that: to the bit what the lane has.
    assert float(found[1]) == records[32, "backward"].metrics["loss"]


def names(journal):
    return [path.name for path in journal.glob("*.json")]


def start(arguments, cluster):
    return subprocess.Popen(
        [sys.executable, "-m", "tune", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"RAY_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill(process):
    process.kill()
    process.communicate()
    await_end_of_trials()


def journal(spec):
    return Journal(spec.storage).records()


def test_retries_targets_and_functions_of_tune(tmp_path, driver):
    """One lane of one worker: a trial that failed goes on from its checkpoint,
    and one at its target ends there.
    """
    file = write(
        tmp_path,
        {
            "train_loop_config": {"lr": 0.01, "batch_size": 32, "fails": -1},
            "failure": {"max_failures": 1},
        },
        space={
            "train_loop_config.fails": [-1, 1],
            "train_loop_config.lr": [0.01, 0.1],
            "train_func": [
                "tests.lane_functions:train",
                "tests.lane_functions:by_tune",
            ],
        },
        objective={"metric": "time_to_target", "target": {"loss": 0.5}},
    )
    spec = read_sweep(file, {})
    records = run(spec)
    shown = ("train_loop_config.fails", "train_loop_config.lr", "train_func")
    by_key = {
        tuple(record.config[key] for key in shown): record
        for record in records
    }
    assert {record.status for record in records} == {"done"}, [
        record.message for record in records
    ]
    assert all(
        record.spent and 0 < record.spent.training_s < record.spent.total_s
        for record in records
    )
    whole, retried = (
        rows(by_key[fails, 0.01, "tests.lane_functions:train"])
        for fails in (-1, 1)
    )
    assert [row["epoch"] for row in whole] == [0, 1, 2]
    assert retried == whole
    at_target = by_key[-1, 0.1, "tests.lane_functions:train"]
    assert len(at_target.curve) < 3
    assert at_target.metrics["loss"] <= 0.5
    assert at_target.time_to_target_s == at_target.curve[-1]["train_time_s"]
    of_tune = [
        record
        for record in records
        if "by_tune" in record.config["train_func"]
    ]
    assert all(len(record.curve) == 1 for record in of_tune), (
        "the first report is at the target"
    )
    assert len({record.metrics["drawn"] for record in of_tune}) == 4, (
        "random draws are those of new processes"
    )


def rows(record):
    return [
        {key: row[key] for key in ("step", "epoch", "loss")}
        for row in record.curve
    ]
