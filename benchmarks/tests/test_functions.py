"""The comparison of both ways sees what differs, down to the last bit, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ray import tune

from benchmarks.functions import WAYS, Record, as_space, compare, differences, digests, make_driver, num_stopped
from tests.on_ray.functions.table import TRAIN, TUNE


def trial(losses: list[float], end: bool = True) -> dict[str, Any]:
    """As `outcome` returns it."""
    return {
        "error": None,
        "metrics": {"loss": losses[-1]},
        "lines": [{"loss": loss} for loss in losses],
        "events": [{"metrics": [{"loss": loss}]} for loss in losses],
        "end": {"returned": None} if end else None,
        "checkpoints": [],
    }


def test_the_last_bit_counts() -> None:
    assert differences(trial([0.3, float("nan")]), trial([0.3, float("nan")]), asha=False) == []
    first, *others = differences(trial([0.1 + 0.2]), trial([0.3]), asha=False)
    assert first == "metrics.loss is 0.30000000000000004 and 0.3"
    assert [words.partition("[")[0] for words in others] == ["lines", "events"]
    assert differences(trial([0.0]), trial([-0.0]), asha=False)


def test_a_stopped_trial_may_have_gone_on() -> None:
    stopped, longer = trial([0.5, 0.4], end=False), trial([0.5, 0.4])
    longer["events"].append({"metrics": [{"loss": 0.3}]})
    assert differences(stopped, longer, asha=True) == []
    assert [words.split()[0] for words in differences(stopped, longer, asha=False)] == ["end", "events"]
    longer["lines"].append({"loss": 0.3})
    assert [words.split()[0] for words in differences(stopped, longer, asha=True)] == ["lines"]


def test_a_row_says_what_the_table_does_not() -> None:
    runs = [trial([3.0, 2.0, 1.0, 0.5]), trial([4.0], end=False), trial([3.5, 3.0], end=False)]
    way = {"elapsed_s": 1.0, "trials": runs}
    row = compare("epochs", 1, dict.fromkeys(WAYS, way))
    assert (row["problems"], row["stopped"], num_stopped(way)) == ([], 2, 2)
    assert compare("epochs", 1, {"ray": way})["problems"] == ["lanes: no result"]
    never = {"elapsed_s": 1.0, "trials": [runs[0]] * 3}
    assert compare("epochs", 1, {"ray": never, "lanes": never})["problems"] == [
        "ray: ASHA stopped none",
        "lanes: ASHA stopped none",
    ]
    assert compare("refuses", 1, {"ray": never, "lanes": never})["problems"][0] == "ray: failed: [], not [1, 2]"


def test_checkpoints_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    for name, runtime in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "model.pt").write_bytes(b"weights")
        log = [{"loss": 0.5, "eval_runtime": runtime}]
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"log_history": log}))
        (tmp_path / name / ".metadata").write_bytes(name.encode())
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    (tmp_path / "b" / "inner" / "model.pt").write_bytes(b"others")
    assert digests(tmp_path / "a") != digests(tmp_path / "b")


def test_a_record_has_what_all_ranks_reported(tmp_path: Path) -> None:
    record = Record(tmp_path / "events.jsonl")
    record.after_report(None, [{"loss": 0.5, "eval_runtime": 3.0}, {"loss": 0.25}], None)
    record.after_exception(None, {0: ValueError(), 1: ValueError()})
    events = [json.loads(line) for line in record.file.read_text().splitlines()]
    assert events == [{"metrics": [{"loss": 0.5}, {"loss": 0.25}]}, {"failed": ["ValueError"]}]


def test_a_grid_becomes_a_space() -> None:
    for case in TUNE.values():
        space = as_space(case.grid)
        assert sum(isinstance(value, dict) for value in space.values()) == 1, "the grid differs in one key"
    assert as_space([{"lr": 1, "fixed": 2}, {"lr": 3, "fixed": 2}]) == {"lr": tune.grid_search([1, 3]), "fixed": 2}


@pytest.mark.parametrize("name", TRAIN)
def test_a_driver_is_what_ray_can_pickle(name: str, tmp_path: Path) -> None:
    import ray.cloudpickle
    import ray.train.torch

    import tests.on_ray.functions

    driver = make_driver(TRAIN[name], name, 1, tmp_path, ray.train.torch.TorchTrainer)
    ray.cloudpickle.register_pickle_by_value(tests.on_ray.functions)
    try:
        assert callable(ray.cloudpickle.loads(ray.cloudpickle.dumps(driver)))
    finally:
        ray.cloudpickle.unregister_pickle_by_value(tests.on_ray.functions)
