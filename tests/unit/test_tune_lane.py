"""A trial between its Tune actor and its lane, without Ray: what is handed
over, adopted, and ended at its target.
"""

import math
from types import SimpleNamespace

import pytest
import ray
import ray.train

from tests.specs import BASE
from tests.unit.report_records import config
from trainers.storage import Storage
from tune.config import Target
from tune.forks.assignment import Assignment
from tune.forks.child import TrialStopped
from tune.lanes._worker import Asked, FunctionContext
from tune.lanes.queue import Event
from tune.sweeps._trial import LaneTrial
from tune.trials.journal import Journal

ROW = {"step": 10, "epoch": 1.0, "train_time_s": 1.0, "val_accuracy": 0.5}
TARGET = Target("val_accuracy", 0.97, "max")


class Box:
    """A mailbox that keeps what it is told."""

    def __init__(self):
        self.told = []
        self.events = []

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args: self._answer(name, args))

    def _answer(self, name, args):
        self.told.append((name, args))
        submitted = args[0].ticket if name == "submit" else None
        event = self.events[args[1]] if name == "next_event" else None
        return {"report": True, "submit": submitted, "next_event": event}.get(
            name
        )


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch):
    place = {
        "world_rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "local_world_size": 1,
    }
    context = SimpleNamespace(
        get_node_rank=lambda: 0,
        **{
            f"get_{name}": lambda n=number: n for name, number in place.items()
        },
    )
    monkeypatch.setattr(ray, "get", lambda value: value)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr("trainers.on_ray.worker_group.own_gpu", lambda: 0)


def asked(box, target, watches):
    lane = SimpleNamespace(
        gauges=SimpleNamespace(set=lambda figures: None),
        tell=lambda method, *args: getattr(box, method).remote(*args),
    )
    return Asked(
        lane, Assignment("t/1", "t", {}, target=target, watches=watches)
    )


@pytest.mark.parametrize(
    ("goes_on", "raised"), [(False, TrialStopped), (None, InterruptedError)]
)
def test_a_function_that_another_rank_has_ended_is_not_stopped(
    goes_on, raised, monkeypatch
):
    """A stopped function is known to fit; one that another rank has ended is not."""
    monkeypatch.setattr(FunctionContext, "get_world_rank", lambda self: 1)
    monkeypatch.setattr(FunctionContext, "get_world_size", lambda self: 2)
    context = object.__new__(FunctionContext)
    context.assignment = Assignment("t/1", "t", {})
    context.lane = SimpleNamespace(tell=lambda *given: goes_on)
    context.checkpoint = None
    with pytest.raises(raised):
        context._wait_then_report(SimpleNamespace(checkpoint=None), 1)


@pytest.mark.parametrize(
    ("watches", "said"),
    [
        (("peak_memory_bytes",), {"peak_memory_bytes": 5.0}),
        (("val_accuracy",), {}),
    ],
)
def test_a_lane_says_what_its_trial_has_used_where_the_objective_asks(
    watches, said
):
    box = Box()
    lane = asked(box, None, watches)
    lane.observe({"peak_bytes": 5.0, "disturbed_s": 3.0})
    lane.report(ROW)
    [(_, (_, row))] = box.told
    assert row == ROW | said | {"disturbed_s": 3.0}


@pytest.mark.parametrize(
    ("metric", "status", "value"),
    [
        ("time_to_target", "stopped", 2.0),  # at its target
        ("time_to_target", "out_of_memory", math.inf),
        ("peak_memory_bytes", "done", 7),
        ("val_accuracy", "done", 0.98),
        ("val_accuracy", "error", -math.inf),
    ],
)
def test_tune_hears_of_a_trials_objective_in_the_end(
    tmp_path, metric, status, value
):
    box = Box()
    outcome = {"status": status, "result": {"peak_memory_bytes": 7}}
    box.events = [
        Event(ROW),
        Event(ROW | {"step": 20, "train_time_s": 2.0, "val_accuracy": 0.98}),
        Event(outcome=outcome),
    ]
    trial = begun(tmp_path, box, metric)
    assert box.told[0][1][0].target == (
        TARGET if metric == "time_to_target" else None
    )
    assert trial.step()["train_time_s"] == 1.0
    trial.step()
    last = trial.step()
    assert (last["done"], last["objective"]) == (True, value)
    assert begun(tmp_path, box, metric).step() == last, "from its record"


def test_a_scheduler_hears_the_last_value_where_a_report_has_none(tmp_path):
    box = Box()
    box.events = [
        Event({"train_loss": 3.0}),
        Event({"train_loss": 2.0, "val_loss": 0.5}),
        Event({"train_loss": 1.0}),
    ]
    trial = begun(tmp_path, box, "val_loss")
    first, *others = (trial.step()["objective"] for _ in box.events)
    assert math.isnan(first), "no scheduler judges by it"
    assert others == [0.5, 0.5]


@pytest.mark.parametrize(
    "name", ["done", "training_iteration", "should_checkpoint"]
)
def test_a_figure_with_a_name_of_tunes_own_reaches_the_record_only(
    tmp_path, name
):
    box = Box()
    row = {"step": 1.0, "train_time_s": 1.0, "val_loss": 0.5, name: 7.0}
    box.events = [Event(row), Event({}, {"status": "done"})]
    trial = begun(tmp_path, box, "val_loss")
    assert name not in trial.step()
    assert trial.step().get(name) in (None, True)
    [record] = Journal(Storage(tmp_path)).records()
    assert record.metrics[name] == 7.0


def begun(tmp_path, box, metric="time_to_target"):
    trial = LaneTrial.__new__(LaneTrial)
    given = {"mailbox": box, "sweep": Storage(tmp_path), "train": BASE}
    trial.setup(
        {"seed": 1}, **given, objective=config(metric).objective.model_dump()
    )
    return trial
