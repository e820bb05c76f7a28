"""Experiment trackers with their real clients, offline: what they say
themselves of runs and sweeps.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyarrow import BufferReader, parquet

from tests.specs import BASE, REPOSITORY, tree
from tests.trackers import mlflow_runs, wandb_runs
from tests.waits import until, when
from trainers.config.yaml import dump_yaml
from trainers.measure.run_log import read_log, scalars
from trainers.storage import Storage
from trainers.tracking.sinks import MlflowSink, Row, TrackedRun
from tune.report.write import write_report
from tune.search.space import grid
from tune.sweeps.spec import prepare, sweep_with
from tune.trials.journal import Journal
from tune.trials.record import TrialRecord, trial_id

# They are imported by the process that runs this, not by all that collect it.
pytestmark = [
    pytest.mark.full,
    *(
        pytest.mark.skipif(find_spec(name) is None, reason=f"no {name}")
        for name in ("mlflow", "wandb")
    ),
]


def store(tmp_path, kind="sqlite"):
    """Where MLflow keeps what it is told below a directory: in a database, or in files."""
    return (
        f"sqlite:///{tmp_path}/mlflow.db"
        if kind == "sqlite"
        else f"file://{tmp_path}/mlruns"
    )


def everywhere(tmp_path, kind="sqlite"):
    """All trackers, and the environment in which they keep what they are told
    below a directory.
    """
    project = tmp_path.name
    tracking = [
        {"tracker": name, "project": project} for name in ("mlflow", "wandb")
    ]
    environment = {
        "MLFLOW_TRACKING_URI": store(tmp_path, kind),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "PYTHONPATH": str(REPOSITORY),
    }
    return tracking, environment


def found(tmp_path, kind="sqlite"):
    """By tracker the runs of a test, by name."""
    in_mlflow = mlflow_runs(store(tmp_path, kind), tmp_path.name, tmp_path)
    return {"mlflow": in_mlflow, "wandb": wandb_runs(tmp_path / "wandb")}


def curves_of_log(run):
    curves = {}
    for line in read_log(run):
        for name, value in scalars(line).items():
            curves.setdefault(name, []).append((line["step"], value))
    return curves


def is_sent_from(directory):
    """Whether a process is there that sends a run which was started in a directory."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                "trainers.tracking.delivery" in process.cmdline()
                and process.cwd() == str(directory)
            ):
                return True
    return False


def send_rest(command, done, given, **where):
    """Do as a run or a sweep says that has ended before a tracker had
    everything, which slow machines see; they send in several starts.
    """
    while "tracking:" in done.out:
        done = command(*given, forked=True, **where)
        assert done.code == 0, done.out + done.err


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """The directory of a database that one process began to make, and another made."""
    directory = tmp_path_factory.mktemp("database")
    makes = (
        "from tests.unit.test_tracking_clients import started; started('.')"
    )

    def is_half_made():
        with contextlib.suppress(
            FileNotFoundError
        ):  # it has been put in place
            files = directory.rglob("mlflow.db")
            return any(file.stat().st_size > 2**18 for file in files)
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", store(directory))
        patch.setenv("TMPDIR", str(directory))
        process = subprocess.Popen(
            [sys.executable, "-c", makes], cwd=REPOSITORY
        )
        until(is_half_made, "half a database", process=process, every_s=0.01)
        process.kill()
        process.wait()
        started(str(directory))
    return directory


@pytest.fixture
def made(database, tmp_path):
    """MLflow's database is there: to make one takes seconds."""
    shutil.copy(database / "mlflow.db", tmp_path)


@pytest.mark.usefixtures("made")
def test_a_run_that_was_killed_goes_on_under_its_id_with_each_step_once(
    tmp_path, command
):
    tracking, environment = everywhere(tmp_path)
    pid = tmp_path / "pid"
    run = Storage(tmp_path / "runs" / "run")
    args = {
        "fail_at": 15,
        "failure": "stop",
        "marker": str(tmp_path / "stopped"),
        "pids": str(pid),
    }
    (tmp_path / "train.yaml").write_text(
        dump_yaml(
            tree(tmp_path, tracking=[*tracking, "tensorboard"], task_args=args)
        )
    )
    start = ("-m", "trainers", str(tmp_path / "train.yaml"))
    thread = when(  # however long they take to be imported
        lambda: len(run.names("tracking")) == len(tracking),
        lambda: os.kill(int(pid.read_text()), signal.SIGKILL),
    )
    assert (
        command(*start, cwd=tmp_path, env=environment, forked=True).code != 0
    )
    thread.join()
    until(lambda: not is_sent_from(tmp_path), "the sender's own end")
    before = {
        name: run.read_json(f"tracking/{name}", dict[str, Any])[""]["id"]
        for name in run.names("tracking")
    }
    done = command(*start, cwd=tmp_path, env=environment, forked=True)
    assert (done.code, done.err) == (0, "")
    send_rest(command, done, start, cwd=tmp_path, env=environment)
    assert {
        name: run.read_json(f"tracking/{name}", dict[str, Any])[""]["id"]
        for name in before
    } == before

    result = run.read_json("result.json", dict[str, Any])
    log = curves_of_log(run)
    assert [step for step, _ in log["train_loss"]] == list(range(1, 31))
    for name, runs in found(tmp_path).items():
        (kept,) = runs.values()
        for metric in ("train_loss", "lr", "val_loss", "val_accuracy"):
            assert kept.curves[metric] == log[metric], (name, metric)
        for metric, values in kept.curves.items():
            assert len({step for step, _ in values}) == len(values), (
                name,
                metric,
            )
        assert kept.curves["result/peak_memory_bytes"] == [
            (30, result["peak_memory_bytes"])
        ]
    (in_mlflow,) = found(tmp_path)["mlflow"].values()
    assert (in_mlflow.status, in_mlflow.tags["paceline.status"]) == (
        "FINISHED",
        "done",
    )
    assert (in_mlflow.params["optimizer.lr"], in_mlflow.params["task"]) == (
        "0.01",
        "tests.tasks:Blobs",
    )
    assert {"paceline.torch", "paceline.uri"} <= in_mlflow.tags.keys()
    assert json.loads(in_mlflow.files["result.json"]) == result
    assert (
        len(list((tmp_path / "runs" / "run" / "tensorboard").iterdir())) == 3
    )
    again = command(
        *start,
        cwd=tmp_path,
        env=environment | {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
        forked=True,
    )
    assert "tracking" not in again.out, "who has everything is not asked"


def a_sweep(tmp_path, tracking):
    """The directory of a sweep that has ended, with one trial that failed."""
    train = {
        key: value
        for key, value in BASE.items()
        if key not in ("launcher", "checkpoint")
    }
    train["tracking"] = tracking
    given = {
        "train": train,
        "space": {"global_batch_size": [8, 16], "optimizer.lr": [0.1, 0.2]},
    }
    spec = sweep_with(
        {**given, "storage_path": str(tmp_path)}, "test", REPOSITORY, {}
    )
    prepare(spec, fresh=False)
    records = []
    for number, config in enumerate(grid(spec.config)):
        start = 1_760_000_000.0 + 100 * number
        curve = []
        for step in (10, 20, 30):
            figures = {"train_loss": 1 / step, "val_loss": number + 1 / step}
            curve.append(
                {
                    "step": float(step),
                    "epoch": step / 10,
                    "train_time_s": step / 2,
                    **figures,
                }
            )
        ended = {
            "status": "done",
            "curve": curve,
            "metrics": {**curve[-1], "val_accuracy": 0.5},
        }
        ended |= {
            "samples_per_s": 1000.0 + number,
            "peak_memory_bytes": 5000 + number,
            "step_time_s": 0.25,
        }
        if number == 3:
            ended = {"status": "out_of_memory", "message": "too large"}
        record = TrialRecord(
            trial_id(config),
            config,
            start_time=start,
            end_time=start + 50,
            lane=0,
            **ended,
        )
        Journal(spec.storage).append(record)
        records.append(record)
    write_report(
        spec.storage,
        spec.config,
        spec.train,
        records,
        {"torch": "2.15.0", "git_commit": "abc"},
        task_dir=None,
    )
    return spec, records


def assert_is_sweep(tmp_path, spec, records):
    """Every tracker has the sweep, its trials below it, the figures of
    results.parquet, and the report.
    """
    results = parquet.read_table(
        BufferReader(spec.storage.read("results.parquet"))
    ).to_pylist()
    numbers = (
        "samples_per_s",
        "step_time_s",
        "peak_memory_bytes",
        "train_loss",
        "val_loss",
        "val_accuracy",
    )
    for name, runs in found(tmp_path, "files").items():
        parent = runs.pop("sweep")
        of_id = {
            next(row["id"] for row in results if row["id"] in run): kept
            for run, kept in runs.items()
        }
        assert len(of_id) == len(runs) == len(records)
        for row in results:
            kept = of_id[row["id"]]
            last = {
                metric: values[-1][1] for metric, values in kept.curves.items()
            }
            shown = {
                metric: row[metric]
                for metric in numbers
                if row[metric] is not None
            }
            assert {metric: last[metric] for metric in shown} == shown, name
            assert kept.params["global_batch_size"] in (
                row["global_batch_size"],
                str(row["global_batch_size"]),
            )
        for record in records:
            values = [
                (int(row["step"]), row["val_loss"]) for row in record.curve
            ]
            assert of_id[record.id].curves.get("val_loss", []) == values, name
        group = {"mlflow": {parent.id}, "wandb": {parent.parent}}[name]
        assert {kept.parent for kept in runs.values()} == group
        assert parent.curves["trials"][-1][1] == len(records)
    in_mlflow = mlflow_runs(store(tmp_path, "files"), tmp_path.name, tmp_path)[
        "sweep"
    ]
    assert in_mlflow.files["report.html"] == spec.storage.read("report.html")
    assert b"train" in in_mlflow.files["best.yaml"]
    assert in_mlflow.status == "FINISHED"
    assert any(
        name.endswith("report.html")
        for name in wandb_runs(tmp_path / "wandb")["sweep"].files
    )
    events = {
        path.name for path in Path(spec.storage.path, "tensorboard").iterdir()
    }
    assert events == {"sweep", *(record.id for record in records)}


def test_a_sweep_is_a_run_with_its_trials_below_it(
    tmp_path, command, monkeypatch
):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking, environment = everywhere(tmp_path, "files")
    spec, records = a_sweep(tmp_path, [*tracking, "tensorboard"])
    resume = ("-m", "tune", "resume", spec.uri)
    while True:  # a slow machine sends in several starts
        done = command(*resume, cwd=tmp_path, env=environment, forked=True)
        assert (done.code, (done.out + done.err).count("Error")) == (0, 0), (
            done.out + done.err
        )
        if "tracking:" not in done.out:
            break
    assert_is_sweep(tmp_path, spec, records)
    sent = {
        name: spec.storage.read(f"tracking/{name}")
        for name in spec.storage.names("tracking")
    }
    assert (
        command(*resume, cwd=tmp_path, env=environment, forked=True).code == 0
    )
    assert {
        name: spec.storage.read(f"tracking/{name}") for name in sent
    } == sent


@pytest.fixture
def silent_port():
    """A server that takes every connection and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.mark.usefixtures("made")
def test_a_server_that_hangs_costs_nothing_and_gets_it_later(
    tmp_path, command, silent_port
):
    config = tree(
        tmp_path, tracking=[{"tracker": "mlflow", "project": "later"}]
    )
    (tmp_path / "train.yaml").write_text(dump_yaml(config))
    run = Storage(tmp_path / "runs" / "run")
    environment = {
        "PYTHONPATH": str(REPOSITORY),
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{silent_port}",
    }
    train = ("-m", "trainers", str(tmp_path / "train.yaml"))
    done = command(*train, cwd=tmp_path, env=environment, forked=True)
    again = "the same command sends the rest"
    assert (done.code, done.err, done.out.count(again)) == (0, "", 1), done.out
    assert "mlflow: not everything was sent" in done.out

    environment["MLFLOW_TRACKING_URI"] = store(tmp_path)
    send_rest(command, done, train, cwd=tmp_path, env=environment)
    (kept,) = mlflow_runs(store(tmp_path), "later", tmp_path).values()
    log = curves_of_log(run)
    assert {
        name: values for name, values in kept.curves.items() if name in log
    } == log
    assert (kept.status, json.loads(kept.files["result.json"])["steps"]) == (
        "FINISHED",
        30,
    )


def test_a_database_that_a_killed_process_was_making_is_made_by_the_next(
    database,
):
    (kept,) = mlflow_runs(store(database), "half", database).values()
    assert kept.params == {"seed": "1"}


def started(directory):
    """Begin a run in MLflow."""
    sink = MlflowSink("half", Storage(directory))
    sink.start(TrackedRun("0e", "", "mine", "run", {"seed": 1}, {}))


@pytest.mark.usefixtures("made")
def test_names_that_mlflow_rejects_are_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store(tmp_path))
    sink = MlflowSink("names", Storage(tmp_path))
    names = ["val_a//b", "val_c/", "../up", "/", "val_d%", "val_" + "x" * 400]
    names += ["val_e@1", "val_e#1", "val_e_1", "val_" + "x" * 300]
    params = dict.fromkeys(names, 1)
    run = sink.start(TrackedRun("0f", "", "mine", "run", params, {}))
    sink.log(run, [Row(3, 1.0, dict.fromkeys(names, 0.5))])
    (told,) = mlflow_runs(store(tmp_path), "names", tmp_path).values()
    assert told.params.keys() == told.curves.keys()
    assert len(told.curves) == len(names)
    assert {
        "val_a/b",
        "val_c",
        "up",
        "_",
        "val_d_",
        "val_e_1",
    } < told.curves.keys()
