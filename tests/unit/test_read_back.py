"""Whatever lies in a run's or a sweep's directory: skipped and named, or the end of a command in one sentence."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.specs import make
from tests.unit.report_records import ENVIRONMENT, TRAIN, config, done, failed
from tests.unit.test_loop import train
from trainers.context import RunContext
from trainers.errors import CheckpointError, StorageError
from trainers.measure.result import RunResult
from trainers.measure.run_log import read_log
from trainers.step.ceiling import read_ceiling
from trainers.storage import Storage
from tune.report.table import table
from tune.report.write import read_environment, write_report
from tune.trials.journal import Journal, read_boundary
from tune.trials.live import read_live

T = TypeVar("T")
WRONG: list[Any] = [
    None, True, -1, -(10**400), float("nan"), float("inf"), "", "../../dev/zero", [], {"a": None}, {"epoch": "x"},
    [{"step": -1, "epoch": 0, "train_time_s": 0}],
]  # fmt: skip


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("trainers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("tune"), "propagate", True)
    return caplog


def attempt(read: Callable[[], T]) -> tuple[T | None, str]:
    """What is read, or the one sentence of why not."""
    try:
        return read(), ""
    except CheckpointError as error:
        words = str(error)
    assert "\n" not in words
    return None, words


def swapped(tree: Any) -> list[Any]:
    """The tree with each of its values, to the third level, replaced by each wrong one, or taken away."""
    found: list[Any] = []

    def walk(path: list[Any], value: Any) -> None:
        for wrong in [*WRONG, ...]:
            changed = copy.deepcopy(tree)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            if wrong is ...:
                del holder[path[-1]]
            else:
                holder[path[-1]] = wrong
            found.append(changed)
        if len(path) < 3 and isinstance(value, (dict, list)):
            inner = value.items() if isinstance(value, dict) else enumerate(value[:1])
            for key, one in inner:
                walk([*path, key], one)

    for key, value in tree.items():
        walk([key], value)
    return found


def test_a_record_of_any_shape_is_refused_or_reported(tmp_path: Path) -> None:
    whole = asdict(done()[0])
    records, reported = done()[1:3] + failed()[:2], []
    sweep = Storage(str(tmp_path))
    journal = Journal(sweep)
    journal.append(done()[0])
    for tree in swapped(whole | {"curve": whole["curve"][-2:]}):
        (tmp_path / f"trials/{whole['id']}.json").write_text(json.dumps(tree))
        found, words = attempt(journal.records)
        reported += found or []
        assert found or f"{whole['id']}.json" in words
    assert len(reported) > 50
    for at in range(0, len(reported), 20):
        several = [*records, *reported[at : at + 20]]
        answer = write_report(sweep, config(), TRAIN, several, ENVIRONMENT, task_dir=None)
        assert table(config(), several, answer) is not None


@pytest.mark.parametrize(
    ("name", "value"), [("step", None), ("step", -1), ("epoch", float("nan")), ("train_time_s", float("inf"))]
)
def test_an_evaluation_at_no_place_of_a_run_is_refused(name: str, value: float | None, tmp_path: Path) -> None:
    """What searches and figures count with; None: it is not there."""
    whole = asdict(done()[0])
    rows = [row for row in whole["curve"] if row is not whole["curve"][-1]]
    last = {key: one for key, one in (whole["curve"][-1] | {name: value}).items() if one is not None}
    journal = Journal(Storage(str(tmp_path)))
    journal.append(done()[0])
    assert journal.find(whole["id"]) is not None
    (tmp_path / f"trials/{whole['id']}.json").write_text(json.dumps(whole | {"curve": [*rows, last]}))
    with pytest.raises(CheckpointError):
        journal.find(whole["id"])


def test_a_record_under_another_trials_name_is_refused(tmp_path: Path) -> None:
    journal = Journal(Storage(str(tmp_path)))
    first, second = done()[:2]
    journal.append(first)
    (tmp_path / f"trials/{first.id}.json").rename(tmp_path / f"trials/{second.id}.json")
    with pytest.raises(CheckpointError):
        journal.find(second.id)


FILES = [b"", b"[]", b"{", b"\xff", b'{"a": "b"}', b'{"a": NaN}', b"[" * 100_000]


@pytest.mark.parametrize("data", [*FILES, "fifo", "directory", "device"])
def test_a_damaged_file_beside_a_run_is_named_and_learned_anew(
    data: bytes | str, tmp_path: Path, seen: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("microbatch.json", "boundary.json", "summary.json", "progress.json", "result.json"):
        path = tmp_path / name
        if isinstance(data, bytes):
            path.write_bytes(data)
        elif data == "fifo":
            os.mkfifo(path)
        elif data == "directory":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
    storage = Storage(str(tmp_path))
    context = RunContext(storage, "local")
    assert read_ceiling(make(tmp_path).config, context, "cpu") is None
    assert read_boundary(storage).to_plain() == {}
    assert read_environment(storage) == {}
    assert read_live(storage) is None
    for name, said in (
        ("microbatch.json", seen.text),
        ("boundary.json", seen.text),
        ("summary.json", seen.text),
    ):
        fits = name == "summary.json" and isinstance(data, bytes) and data[:4] == b'{"a"' and b"NaN" not in data
        assert (f"{tmp_path}/{name}" in said) != fits
    with pytest.raises((CheckpointError, StorageError)):
        storage.read_json("result.json", RunResult)


@pytest.mark.parametrize("line", [b"[]", b"{", b"\xff"])
def test_a_damaged_line_of_the_log_is_named(tmp_path: Path, line: bytes) -> None:
    storage = Storage(str(tmp_path))
    storage.write("log/000000000001.jsonl", b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(CheckpointError):
        read_log(storage)


@pytest.mark.parametrize("kind", ["fifo", "bytes"])
def test_a_run_resumes_beside_a_damaged_log(kind: str, tmp_path: Path) -> None:
    train(tmp_path, max_steps=4)
    path = tmp_path / "log/000000000002.jsonl"
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(b"\xff[[[")
    assert train(tmp_path, max_steps=6).steps == 6
