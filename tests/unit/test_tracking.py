"""Experiment trackers: what they are told, each step once, and that training
never waits for them.
"""

import importlib.util
import json
import sys
import threading
import time
from unittest import mock

import pytest

from tests.specs import make, tree
from tests.tracking_sinks import Buffered, Failing, Told
from tests.waits import until
from trainers import train
from trainers.config.sections import chosen
from trainers.errors import ConfigError
from trainers.measure import run_log
from trainers.measure.run_log import RunLog, read_log, scalars
from trainers.storage import Storage
from trainers.tracking import delivery, sinks
from trainers.tracking.delivery import Delivery, RunHistory, as_params
from trainers.tracking.sinks import Row, check_trackers


@pytest.mark.parametrize(
    "tracking",
    [
        ["mlflw"],
        ["no module"],
        [{"tracker": "mlflow", "projekt": "p"}],
        [{"project": "p"}],
    ],
)
def test_a_mistake_in_the_key_is_an_error_of_the_configuration(
    tracking, tmp_path
):
    with pytest.raises(ConfigError) as raised:
        make(tmp_path, tracking=tracking)
    assert "tracking" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_is_not_there_is_said_before_a_worker_starts(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        train(tree(tmp_path, tracking=["wandb"]))
    for named in ("no_such:Sink", "tests.tasks:Blobs"):
        with pytest.raises(ConfigError):
            check_trackers(chosen([named]), [], "f")
    assert not (tmp_path / "runs").exists()


def test_parameters_are_flat_and_hold_no_secret(monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "hunter2hunter2")
    found = as_params(
        {
            "a": {
                "api_key": "abcdefgh",
                "lr": 1e-3,
                "on": True,
                "sizes": [1, 2],
            },
            "url": "x hunter2hunter2",
        }
    )
    assert found == {
        "a.api_key": "***",
        "a.lr": 1e-3,
        "a.on": True,
        "a.sizes": "[1, 2]",
        "url": "x ***",
    }


def record(step, **values):
    return {
        "step": step,
        "epoch": step / 10,
        "train_time_s": float(step),
        **values,
    }


class Following:
    """A run that somebody writes by hand, and one tracker of it, as one
    process after the other has them.
    """

    def __init__(self, run):
        self.run = run
        self.sink = Told()
        self.run.write("config.yaml", b"name: r\ntask: t:T\n")
        self.run.write("environment.json", b'{"git_commit": "abc"}')

    def send(self, ended="killed"):
        """A process that begins, sends, and ends."""
        [tracker] = chosen(["tests.tracking_sinks:Told"])
        sender = Delivery(tracker, [], self.run, RunHistory)
        sender.end(ended)
        with mock.patch.object(delivery, "make_sink", return_value=self.sink):
            sender.follow()
        return sender.is_over

    @property
    def curve(self):
        return [
            (row.step, row.values["loss"])
            for row in self.sink.rows
            if "loss" in row.values
        ]


@pytest.fixture
def following(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "SHOW_EVERY_S", 0.0)
    return Following(Storage(tmp_path))


def show(log, step):
    log.show(step)
    log._showing.join()


def test_after_a_resume_each_step_is_sent_once_under_the_same_id(following):
    """A checkpoint at step 4, copies up to step 6 sent, then a power cut:
    steps 5 and 6 are trained again.
    """
    began = time.time()
    log = RunLog(following.run, followed=True)
    for step in range(1, 5):
        log.add(record(step, loss=1 / step))
    log.flush(4)
    for step in (5, 6):
        log.add(record(step, loss=1 / step))
        show(log, step)
        assert following.send()
    assert following.curve == [(step, 1 / step) for step in range(1, 7)], (
        "before the next checkpoint"
    )

    log = RunLog(following.run, followed=True)
    log.cut(4)
    assert following.send()
    for step in range(5, 9):
        log.add(record(step, loss=1 / step))
        show(log, step)
        if step == 8:
            log.add(record(8, val_loss=0.5))
        assert following.send()
    log.flush(8)
    assert following.send()
    assert following.run.names("live") == []
    assert following.curve == [(step, 1 / step) for step in range(1, 9)]
    assert [
        row.step for row in following.sink.rows if "val_loss" in row.values
    ] == [8]
    assert len({run.id for run in following.sink.runs}) == 1
    assert following.sink.runs[0].tags == {
        "uri": following.run.uri,
        "git_commit": "abc",
    }
    assert following.sink.ends[-1] == (
        f"run-{following.sink.runs[0].id}",
        "killed",
    )
    times = [row.time_s for row in following.sink.rows]
    assert all(began - 9 < at < time.time() + 1 for at in times), (
        "each when its step was made"
    )


def test_steps_of_a_part_that_is_still_being_written_are_sent_in_order(
    following,
):
    log = RunLog(following.run, followed=True)
    for step in (1, 2, 3):
        log.add(record(step, loss=0.5))
    write = log.part(3)
    log.add(record(4, loss=0.5))
    log.show(4)
    assert following.run.names("live") == []
    assert following.send()
    write()
    show(log, 4)
    assert following.send()
    assert following.curve == [(step, 0.5) for step in range(1, 5)]


class Going(Storage):
    """A run that trains on when a directory of it is looked at."""

    def __init__(self, run, directory, go_on):
        super().__init__(run.uri)
        self.directory = directory
        self.steps = iter([go_on])

    def child(self, *names):
        if names == (self.directory,):
            for go_on in self.steps:
                go_on()
        return super().child(*names)


@pytest.mark.parametrize("directory", ["log", "live"])
def test_a_part_that_is_written_while_the_log_is_read_is_sent(
    directory, following
):
    log = RunLog(following.run, followed=True)
    log.add(record(1, loss=0.5))
    log.add(record(2, loss=0.5))

    def go_on():
        log.flush(2)
        log.add(record(3, loss=0.5))
        show(log, 3)

    following.run = Going(following.run, directory, go_on)
    assert following.send()
    assert following.send()
    assert following.curve == [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_what_a_sink_that_failed_did_not_take_is_sent_again(
    following, monkeypatch
):
    monkeypatch.setattr(delivery, "_RETRY_S", 0.01)
    monkeypatch.setattr(Failing, "kept", [])
    log = RunLog(following.run)
    for step in (1, 2, 3):
        log.add(record(step, loss=0.5))
    log.flush(3)
    [tracker] = chosen(["tests.tracking_sinks:Failing"])
    sender = Delivery(tracker, [], following.run, RunHistory)
    thread = threading.Thread(target=sender.follow, daemon=True)
    thread.start()
    until(lambda: Failing.kept, "the second sink's rows")
    sender.end("done")
    thread.join()
    assert sender.is_over
    assert [row.step for row in Failing.kept] == [1, 2, 3]


def test_what_a_client_still_had_in_memory_is_sent_again(following):
    following.sink = Buffered()
    log = RunLog(following.run)
    for step in (1, 2, 3):
        log.add(record(step, loss=0.5))
    log.flush(3)
    assert not following.send("done")
    assert following.send("done")
    assert following.curve == [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_training_never_waits_for_a_tracker(tmp_path, monkeypatch):
    """The tracker answers nothing before the run has its result: if a step
    waited for it, there would be none.
    """
    from trainers import start

    gate = tmp_path / "gate"
    launch = start.launch
    monkeypatch.setenv("GATE", str(gate))

    def open_after(*args):
        result = launch(*args)
        assert not gate.exists()
        gate.touch()
        return result

    monkeypatch.setattr(start, "launch", open_after)
    before = set(sys.modules)
    run = train(tree(tmp_path, tracking=["tests.tracking_sinks:Gated"]))
    assert run.status == "done"
    assert not {"mlflow", "wandb"} & (sys.modules.keys() - before)
    status, *rows = json.loads(Storage(run.uri).read("told.json"))
    assert status == "done"
    told = {}
    for row in (
        Row(*row) for row in rows
    ):  # of the last step two, where the result came after its look at the log
        assert not told.get(row.step, {}).keys() & row.values, (
            "each metric once for each step"
        )
        told.setdefault(row.step, {}).update(row.values)
    assert list(told) == list(range(1, 31))
    merged = {}
    for line in read_log(Storage(run.uri)):
        merged.setdefault(line["step"], {}).update(scalars(line))
    assert {
        step: {k: v for k, v in values.items() if "/" not in k}
        for step, values in told.items()
    } == merged
    assert told[30]["result/peak_memory_bytes"] == run.peak_memory_bytes


def test_a_sink_that_names_no_run_is_told_so(following, caplog):
    following.sink.start = lambda run: None
    assert not following.send("done")
    assert "start() returned None" in caplog.text


def test_a_sink_that_leaves_by_sys_exit_is_told_so(following, caplog):
    following.sink.start = lambda run: sys.exit("no such project")
    assert not following.send("done")
    assert "SystemExit: no such project" in caplog.text


def test_a_full_disk_keeps_no_half_of_a_database(tmp_path, monkeypatch):
    def copy(_, target):
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    client = mock.MagicMock()
    client.get_tracking_uri.return_value = f"sqlite:///{tmp_path}/ml.db"
    client.make_url.return_value.database = f"{tmp_path}/ml.db"
    monkeypatch.setattr(sinks, "_client", lambda name: client)
    monkeypatch.setattr(sinks.shutil, "copyfile", copy)
    with pytest.raises(OSError, match="No space"):
        sinks._make_database(client)
    assert not list(tmp_path.iterdir())
