"""The journal: a trial's record is whole, durable, and found again by what was
configured.
"""

import json
import math

import pytest

from trainers.errors import CheckpointError
from trainers.storage import Storage
from tune.trials.journal import Journal
from tune.trials.record import TrialRecord, trial_id


def record(config, start=1.0, status="done", **more):
    return TrialRecord(
        trial_id(config), config, status, start, start + 1, **more
    )


def row(step, loss):
    return {
        "step": step,
        "epoch": step / 2,
        "train_time_s": step * 0.5,
        "val_loss": loss,
    }


def test_an_id_names_a_configuration_whatever_the_order_of_its_keys():
    first = {
        "global_batch_size": 8,
        "optimizer.lr": 1e-3,
        "task_args.list": [1, {"a": 1, "b": 2}],
    }
    second = {
        "task_args.list": [1, {"b": 2, "a": 1}],
        "optimizer.lr": 0.001,
        "global_batch_size": 8,
    }
    assert trial_id(first) == trial_id(second)
    assert len(trial_id(first)) == 10
    assert trial_id(json.loads(json.dumps(first))) == trial_id(first)


def test_ids_are_the_same_in_every_process_and_version():
    assert (
        trial_id({"global_batch_size": 8, "precision": "fp32"}) == "f7818e903c"
    )  # printf ... | sha256sum


def test_what_is_appended_is_found_also_by_another_journal(tmp_path):
    full = record(
        {"a": 1},
        samples_per_s=10.5,
        step_time_s=0.1,
        peak_memory_bytes=2**34,
        metrics={"val_loss": 0.5},
        curve=[row(1, 0.7), row(2, 0.5)],
        time_to_target_s=3.5,
        lane=2,
        message="ü — words",
        traceback="line 1\nline 2",
    )
    Journal(Storage(tmp_path)).append(full)
    journal = Journal(Storage(tmp_path))
    assert journal.find(full.id) == full
    assert journal.find(trial_id({"a": 2})) is None
    assert journal.records() == [full]
    assert [path.name for path in (tmp_path / "trials").iterdir()] == [
        f"{full.id}.json"
    ]


def test_dollars_of_an_earlier_start_become_those_of_this_price(tmp_path):
    journal = Journal(Storage(str(tmp_path)))
    metrics = {"usd_to_target": 9.0}
    journal.append(record({}, time_to_target_s=2.0, metrics=metrics))
    [priced] = journal.price(3600.0)
    assert priced.metrics == {"usd_to_target": 2.0}
    assert journal.records() == [priced]


def test_figures_that_are_not_finite_survive(tmp_path):
    journal = Journal(Storage(tmp_path))
    journal.append(
        record(
            {"a": 1},
            metrics={"nan": math.nan, "up": math.inf, "down": -math.inf},
            status="diverged",
        )
    )
    (back,) = journal.records()
    assert math.isnan(back.metrics["nan"])
    assert (back.metrics["up"], back.metrics["down"]) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"id": "a", "config": {}, "status": "won", "start_time": 1, "end_time": 2}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_record_is_named(tmp_path, data):
    storage = Storage(tmp_path)
    journal = Journal(storage)
    journal.append(record({"a": 1}))
    storage.write("trials/0123456789.json", data)
    with pytest.raises(CheckpointError, match=r"trials/0123456789\.json"):
        journal.records()
    with pytest.raises(CheckpointError, match=r"trials/0123456789\.json"):
        journal.find("0123456789")
