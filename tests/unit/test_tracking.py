"""Experiment trackers: what they are told, each step once, and that training never waits for them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.specs import make, tree
from tests.tracking_sinks import Holding, Told
from tests.waits import until
from trainers import train
from trainers.config.tracking import chosen
from trainers.errors import ConfigError
from trainers.measure import run_log
from trainers.measure.run_log import RunLog, read_log, scalars
from trainers.storage import Storage
from trainers.tracking import sender
from trainers.tracking.delivery import Delivery, read_sent
from trainers.tracking.history import RunHistory, as_params
from trainers.tracking.sink import Row
from trainers.tracking.trackers import check_trackers, make_sink


@pytest.mark.parametrize(
    ("tracking", "words"),
    [
        (["mlflw"], "is no tracker; did you mean `mlflow`?"),
        (["no module"], "there are mlflow, wandb, trackio, tensorboard, csv, and your own as `module:Class`"),
        (["csv", {"tracker": "csv"}], "is listed twice"),
        ([{"tracker": "csv", "project": "p"}], "has no effect with csv"),
        ([{"tracker": "mlflow", "projekt": "p"}], "no such key; did you mean `tracking[0].project`?"),
        ([{"project": "p"}], "`tracking[0].tracker` is required"),
    ],
)
def test_a_mistake_in_the_key_is_one_sentence(tracking: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        make(tmp_path, tracking=tracking)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_is_not_there_is_said_before_a_worker_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"`tracking` is .wandb., but needs .* `pip install 'paceline\[wandb\]'`"):
        train(tree(tmp_path, tracking=["wandb"]))
    for named, words in (("no_such:Sink", "cannot be imported"), ("tests.tasks:Blobs", "is no trainers.tracking.sink")):
        with pytest.raises(ConfigError, match=words):
            check_trackers(chosen([named]), [], "f")
    assert not (tmp_path / "runs").exists()


def test_parameters_are_flat_and_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_TOKEN", "hunter2hunter2")
    found = as_params(
        {"a": {"api_key": "abcdefgh", "lr": 1e-3, "on": True, "sizes": [1, 2]}, "url": "x hunter2hunter2"}
    )
    assert found == {"a.api_key": "***", "a.lr": 1e-3, "a.on": True, "a.sizes": "[1, 2]", "url": "x ***"}


def record(step: int, **values: float) -> dict[str, Any]:
    return {"step": step, "epoch": step / 10, "train_time_s": float(step), **values}


@dataclass
class Following:
    """A run that somebody writes by hand, and one tracker of it, as one process after the other has them."""

    run: Storage
    sink: Told = field(default_factory=Told)

    def __post_init__(self) -> None:
        self.run.write("config.yaml", b"name: r\ntask: t:T\n")
        self.run.write("environment.json", b'{"git_commit": "abc"}')
        self.begin()

    def begin(self) -> None:
        """A new process."""
        self.delivery, self.source = Delivery("own:Sink", self.run, self.sink), RunHistory(self.run)

    def send(self, ended: str | None = None) -> None:
        self.delivery.send(self.source.poll(ended))

    @property
    def curve(self) -> list[tuple[int, float]]:
        return [(row.step, row.values["loss"]) for row in self.sink.rows if "loss" in row.values]


@pytest.fixture
def following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Following:
    monkeypatch.setattr(run_log, "SHOW_EVERY_S", 0.0)
    return Following(Storage(str(tmp_path)))


def show(log: RunLog, step: int) -> None:
    log.show(step)
    assert log._showing is not None
    log._showing.join()


@pytest.mark.parametrize("new_process", [False, True])
def test_after_a_resume_each_step_is_sent_once_under_the_same_id(following: Following, new_process: bool) -> None:
    """A checkpoint at step 4, copies up to step 6 sent, then a power cut: steps 5 and 6 are trained again."""
    log = RunLog(following.run, followed=True)
    for step in range(1, 5):
        log.add(record(step, loss=1 / step))
    log.flush(4)
    for step in (5, 6):
        log.add(record(step, loss=1 / step))
        show(log, step)
        following.send()
    assert following.curve == [(step, 1 / step) for step in range(1, 7)], "before the next checkpoint"

    if new_process:
        following.begin()
    log = RunLog(following.run, followed=True)
    log.cut(4)
    assert not following.run.exists("live")
    following.send()
    for step in range(5, 9):
        log.add(record(step, loss=1 / step))
        show(log, step)
        if step == 8:
            log.add(record(8, val_loss=0.5))
        following.send()
    log.flush(8)
    following.send("killed")
    assert following.run.names("live") == []
    assert following.curve == [(step, 1 / step) for step in range(1, 9)]
    assert [row.step for row in following.sink.rows if "val_loss" in row.values] == [8]
    assert len({run.id for run in following.sink.runs}) == 1
    assert following.sink.runs[0].tags == {"uri": following.run.uri, "git_commit": "abc"}
    assert following.sink.ends == [(f"run-{following.sink.runs[0].id}", "killed")]
    times = [row.time_s for row in following.sink.rows]
    assert times == pytest.approx([times[-1] - 8 + row.step for row in following.sink.rows], abs=5)


def test_what_was_sent_but_not_noted_is_asked_for(following: Following) -> None:
    following.sink.asked = True
    log = RunLog(following.run)
    for step in (1, 2, 3):
        log.add(record(step, loss=0.5))
    log.flush(3)
    following.send()
    (sent,) = read_sent(following.run, "own:Sink").values()
    kept = json.loads(following.run.read("tracking/own_Sink.json"))
    kept[""]["last"] = {"loss": 1}  # as the file was before the process was killed
    following.run.write("tracking/own_Sink.json", json.dumps(kept).encode())
    following.begin()
    following.send()
    assert following.curve == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert read_sent(following.run, "own:Sink")[""].last == sent.last == {"loss": 3}


def test_what_a_sink_holds_that_has_failed_comes_before_the_next_one_asks(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "LOOK_EVERY_S", 0.01)
    for name in ("kept", "failed", "held"):
        monkeypatch.setattr(Holding, name, [])
    log = RunLog(following.run)
    for step in (1, 2, 3):
        log.add(record(step, loss=0.5))
    log.flush(3)
    [tracker] = chosen(["tests.tracking_sinks:Holding"])
    tracking = sender.Tracking(tracker, [], following.run, RunHistory)
    thread = threading.Thread(target=tracking.follow, daemon=True)
    thread.start()
    until(lambda: Holding.failed, "the first one's failure")
    tracking.how = "done"
    tracking.ended.set()
    thread.join()
    assert (tracking.is_over, Holding.failed) == (True, [3])
    assert [row.step for row in Holding.kept] == [1, 2, 3]
    assert Holding.held == [], "it would come after the next one had asked"


def test_a_tracker_that_lost_the_run_gets_all_of_it(following: Following) -> None:
    log = RunLog(following.run)
    log.add(record(1, loss=0.5))
    log.flush(1)
    following.send()
    following.sink = type("Moved", (Told,), {"start": lambda self, run: "another server's"})()
    following.begin()
    following.send()
    assert following.curve == [(1, 0.5)]


def test_a_run_without_trackers_leaves_no_copies(tmp_path: Path) -> None:
    log = RunLog(Storage(str(tmp_path)))
    log.add(record(1, loss=0.5))
    log.show(1)
    log.flush(1)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_training_never_waits_for_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker answers nothing before the run has its result: if a step waited for it, there would be none."""
    from trainers import start

    gate, launch = tmp_path / "gate", start.launch
    monkeypatch.setenv("GATE", str(gate))

    def open_after(*args: Any) -> Any:
        result = launch(*args)
        assert not gate.exists()
        gate.touch()
        return result

    monkeypatch.setattr(start, "launch", open_after)
    before = set(sys.modules)
    run = train(tree(tmp_path, tracking=["tests.tracking_sinks:Gated"]))
    assert run.status == "done"
    assert not {"mlflow", "wandb", "trackio"} & (sys.modules.keys() - before)
    status, *rows = json.loads(Storage(run.uri).read("told.json"))
    assert status == "done"
    told: dict[int, dict[str, float]] = {}
    for row in (Row(*row) for row in rows):  # of the last step two, where the result came after its look at the log
        assert not told.get(row.step, {}).keys() & row.values, "each metric once for each step"
        told.setdefault(row.step, {}).update(row.values)
    assert list(told) == list(range(1, 31))
    merged: dict[int, dict[str, float]] = {}
    for line in read_log(Storage(run.uri)):
        merged.setdefault(line["step"], {}).update(scalars(line))
    assert {step: {k: v for k, v in values.items() if "/" not in k} for step, values in told.items()} == merged
    assert told[30]["result/peak_memory_bytes"] == run.peak_memory_bytes


def test_clients_are_imported_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each module, while it is imported, gives the other's import the time to begin: it must not."""
    monkeypatch.syspath_prepend(tmp_path)
    for number in (1, 2):
        (tmp_path / f"client_{number}.py").write_text(
            "import threading\n"
            "from tests import tracking_sinks\n"
            "class Sink(tracking_sinks.Told):\n"
            "    at_once = tracking_sinks.importing.copy()\n"
            f"tracking_sinks.importing.append({number})\n"
            "threading.Event().wait(0.2)\n"
            "Sink.at_once += tracking_sinks.importing\n"
            "tracking_sinks.importing.clear()\n"
        )
    trackers = chosen(["client_1:Sink", "client_2:Sink"])
    with ThreadPoolExecutor() as pool:
        sinks = list(pool.map(lambda one: make_sink(one, [str(tmp_path)], Storage(str(tmp_path))), trackers))
    assert [sink.at_once for sink in sinks] == [[1], [2]]


def test_numpy_is_there_before_wandb() -> None:
    """Which else puts a stand-in into sys.modules, and a thread that imports numpy meanwhile has half a module."""
    code = """
import sys

class Watch:
    def find_spec(name, path=None, target=None):
        if name == "wandb":
            print("numpy" in sys.modules)

sys.meta_path.insert(0, Watch)
import trainers.tracking.wandb_sink
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"
