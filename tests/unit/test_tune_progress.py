"""What the driver records of a trial: its own end, that somebody stopped it,
or nothing.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray

from tests.unit.report_records import config
from trainers.errors import PacelineError, StorageError
from trainers.output import Output
from trainers.storage import Storage
from tune.lanes.queue import Event
from tune.sweeps import _run
from tune.sweeps._progress import Progress
from tune.sweeps._run import Budget, Steered
from tune.trials.journal import Journal
from tune.trials.record import TrialRecord, make_record, trial_id
from tune.trials.steering import Action

TRIAL = {"global_batch_size": 32, "precision": "fp32"}
NAME = trial_id(TRIAL)
ROW = {"step": 10.0, "epoch": 1.0, "train_time_s": 1.0, "val_accuracy": 0.5}


class Parts:
    """A driver without a cluster: what the mailbox has heard, and what Tune tells."""

    def __init__(self, directory):
        self.heard = []
        self.orphans = []
        self.forgotten = []
        mailbox = SimpleNamespace(
            heard=SimpleNamespace(remote=lambda name: self.heard),
            orphan=SimpleNamespace(remote=self.orphans.append),
            forget=SimpleNamespace(remote=self.forgotten.append),
            submit=SimpleNamespace(
                remote=lambda assignment: assignment.ticket
            ),
            submit_ahead=SimpleNamespace(remote=lambda assignment: None),
        )
        self.storage = Storage(directory)
        self.journal = Journal(self.storage)
        spec = SimpleNamespace(
            config=config(), storage=self.storage, train={}, source=""
        )
        plan = SimpleNamespace(num_trials=1)
        plan.lane_usd_per_hour = None
        pace = SimpleNamespace(
            trial_started=lambda name: None, trial_ended=lambda was_known: None
        )
        self.progress = Progress(spec, plan, mailbox, pace, None, Output())
        self.trial = SimpleNamespace(
            trial_id="t", config=TRIAL, num_failures=4, error_file=None
        )
        self.progress.on_trial_start(0, [], self.trial)

    def complete(self):
        self.progress.on_trial_complete(0, [], self.trial)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "get", lambda value: value)
    return Parts(tmp_path)


@pytest.mark.parametrize(
    ("heard", "status", "message"),
    [
        ([Event(ROW)], "stopped", "stopped by the search"),
        # Its actor could not write the record: the disk was full then, or the
        # directory gone.
        (
            [Event(ROW), Event(outcome={"status": "done", "lane": 3})],
            "done",
            "",
        ),
    ],
)
def test_a_trial_is_recorded_as_its_lane_has_told_it(
    parts, heard, status, message
):
    parts.heard = heard
    parts.complete()
    [record] = parts.journal.records()
    assert (record.id, record.status, record.message, record.curve) == (
        NAME,
        status,
        message,
        [ROW],
    )
    assert parts.progress.records == {NAME: record}
    assert parts.forgotten == [NAME]


@pytest.mark.parametrize(
    ("end_time", "num_lines"), [(1.0, 0), (1e10, 1)], ids=["kept", "new"]
)
def test_a_trial_of_an_earlier_start_is_counted_and_not_told(
    parts, end_time, num_lines, caplog
):
    parts.journal.append(TrialRecord(NAME, TRIAL, "done", 0.5, end_time))
    with caplog.at_level("INFO"):
        parts.complete()
    assert parts.progress.records.keys() == {NAME}
    assert (
        len([line for line in caplog.messages if line.startswith("trial 1/1")])
        == num_lines
    )


@pytest.mark.parametrize(
    ("purpose", "seed", "said"),
    [("repeat", 7, "repeat"), ("clone", None, "trial 1/2")],
)
def test_a_clone_or_repeat_is_recorded_once_it_has_ended(
    parts, purpose, seed, said, caplog
):
    progress = parts.progress
    name = progress.add(TRIAL, purpose, seed)
    ticket = progress.extras[name].ticket
    parts.heard = [Event(ROW)]
    assert not progress.has_ended(name)
    assert parts.journal.records() == []
    parts.heard.append(Event(outcome={"status": "done", "lane": 1}))
    with caplog.at_level("INFO"):
        assert progress.has_ended(name)
        assert progress.has_ended(name), "somebody may ask again"
    [record] = parts.journal.records()
    assert (record.id, record.config) == (name, TRIAL)
    assert (record.purpose, record.seed, record.status) == (
        purpose,
        seed,
        "done",
    )
    assert parts.forgotten == [name, ticket]
    assert progress.extras == {}
    assert [line for line in caplog.messages if line.startswith(said)]


def test_a_hurried_trial_is_recorded_and_told_before_tune_starts_it(
    parts, caplog
):
    config = {"precision": "bf16"}
    parts.progress.hurry(config)
    [name] = parts.progress.extras
    running = {"running": {0: {"trial": name, "started": 1.0, "metrics": {}}}}
    [live] = parts.progress._live({"lanes": [0], **running}).running
    assert live.config == config
    parts.heard = [Event(outcome={"status": "done"})]
    parts.trial.config = config
    with caplog.at_level("INFO"):
        assert parts.progress.has_ended(name)
        parts.complete()
    [record] = parts.journal.records()
    assert record.config == config
    assert len(caplog.messages) == 1


def test_a_clone_of_an_earlier_start_counts(parts, caplog):
    clone = TrialRecord(trial_id(TRIAL, "clone"), TRIAL, "done", 0.5, 1.0)
    parts.journal.append(replace(clone, purpose="clone"))
    steered = Steered(
        SimpleNamespace(storage=parts.storage), None, parts.progress
    )
    steered._begin(clone.id, Action("clone", NAME, TRIAL))
    parts.heard = [Event(ROW)]
    with caplog.at_level("INFO"):
        parts.complete()
    assert caplog.messages[0].startswith("trial 2/2")


def test_what_cannot_be_written_ends_the_sweep(parts, monkeypatch):
    def full(*args):
        raise StorageError("could not write a.json: No space left on device")

    monkeypatch.setattr(Journal, "append", full)
    parts.heard = [Event(ROW), Event(outcome={"status": "done"})]
    parts.complete()  # Tune would blame the trial for what is raised here
    assert parts.forgotten == []
    with pytest.raises(StorageError):
        parts.progress.tick()
    with pytest.raises(StorageError):
        parts.progress.record_rest(is_over_budget=True)


def test_a_trial_that_tune_gave_up_has_no_record_and_ends_the_sweep(
    parts, tmp_path
):
    file = tmp_path / "error.txt"
    file.write_text("Failure # 4\nTraceback\nOSError: its cause\n\n")
    parts.trial.error_file = str(file)
    parts.heard = [Event(ROW)]
    parts.progress.on_trial_error(0, [], parts.trial)
    with pytest.raises(
        PacelineError,
        match=f"trial {NAME} was given up.*4 times .{file}.; the last time: OSError: its cause$",
    ):
        parts.progress.tick()
    assert parts.journal.records() == []


def test_only_a_budget_may_leave_trials_without_an_end(parts):
    parts.heard = [Event(ROW)]
    with pytest.raises(
        PacelineError, match=f"without a result of trial {NAME}"
    ):
        parts.progress.record_rest(is_over_budget=False)
    assert parts.journal.records() == []
    parts.progress.record_rest(is_over_budget=True)
    [record] = parts.journal.records()
    assert (record.status, record.message) == (
        "stopped",
        "stopped by the budget",
    )


def test_a_clone_that_ended_in_the_budgets_last_second_is_recorded(parts):
    name = parts.progress.add(TRIAL, "clone")
    parts.heard = [Event(outcome={"status": "done"})]
    parts.progress.record_rest(is_over_budget=True)
    assert name in parts.progress.records


def test_a_trial_that_trains_to_its_end_tells_when_it_met_the_target():
    whole = config(
        "val_accuracy", objective={"target": {"val_accuracy": 0.97}}
    ).objective
    rows = [
        {
            **ROW,
            "step": step,
            "train_time_s": step,
            "val_accuracy": 0.9 + step / 100,
        }
        for step in (5.0, 8.0, 9.0)
    ]
    record = make_record(TRIAL, whole, 0.0, rows, {"status": "done"})
    assert (
        record.status,
        record.time_to_target_s,
        record.missed_target_s,
    ) == (
        "done",
        8.0,
        5.0,
    )
    assert record.metrics["val_accuracy"] == 0.99
    for purpose, status in (("trial", "stopped"), ("repeat", "done")):
        assert (
            make_record(
                TRIAL, whole, 0.0, rows, {"status": "stopped"}, None, purpose
            ).status
            == status
        )


def test_a_metric_that_not_every_report_has_counts_by_its_last_value():
    rows = [{"loss": 3.0}, {"loss": 2.0, "val_accuracy": 0.5}, {"loss": 1.0}]
    objective = config("val_accuracy").objective
    record = make_record(TRIAL, objective, 0.0, rows, {"status": "done"})
    assert record.status == "done"
    assert record.metrics == {"loss": 1.0, "val_accuracy": 0.5}


def test_a_record_keeps_what_was_used_beside_its_metrics():
    objective = config("peak_memory_bytes").objective
    row = {**ROW, "peak_memory_bytes": 5.0}
    outcome = {
        "status": "done",
        "result": {"peak_memory_bytes": 7, "warnings": ["a", "b"]},
    }
    record = make_record(TRIAL, objective, 0.0, [row], outcome)
    assert (record.status, record.peak_memory_bytes, record.message) == (
        "done",
        7,
        "a; b",
    )
    assert "peak_memory_bytes" not in record.metrics
    stopped = make_record(TRIAL, objective, 0.0, [row], {"status": "stopped"})
    assert stopped.peak_memory_bytes == 5
    assert (
        make_record(TRIAL, objective, 0.0, [ROW], {"status": "done"}).status
        == "error"
    ), "nobody told it"


@pytest.mark.parametrize(("metric", "accuracy", "status"), [
    ("time_to_target", 0.98, "done"),
    ("time_to_target", 0.96, "stopped"),
    ("val_accuracy", 0.98, "stopped"),
])  # fmt: skip
def test_a_trial_that_stopped_at_its_target_is_done(metric, accuracy, status):
    row = {**ROW, "val_accuracy": accuracy}
    record = make_record(
        TRIAL, config(metric).objective, 0.0, [row], {"status": "stopped"}
    )
    assert record.status == status


@pytest.mark.parametrize(
    ("elapsed_s", "wall_s", "is_used_up"),
    [(9, 9, False), (10, 10, True), (1, 10, True), (10, -50, True)],
)
def test_a_budget_ends_by_the_clock_that_is_first(
    elapsed_s, wall_s, is_used_up, monkeypatch
):
    """The monotonic clock stands still in suspend; the wall clock may be set."""
    clocks = SimpleNamespace(monotonic=lambda: 100.0, time=lambda: 5000.0)
    monkeypatch.setattr(_run, "time", clocks)
    budget = Budget(10.0)
    endless = Budget(math.inf)
    clocks.monotonic = lambda: 100.0 + elapsed_s
    clocks.time = lambda: 5000.0 + wall_s
    assert budget.is_used_up is is_used_up
    assert not endless.is_used_up
