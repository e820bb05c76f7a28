"""Whatever lies in a run's or a sweep's directory: skipped and named, or the
end of a command in one sentence.
"""

import json
from dataclasses import asdict

import pytest

from tests.unit.report_records import done
from tests.unit.test_loop import train
from trainers.context import RunContext
from trainers.errors import CheckpointError, StorageError
from trainers.measure.result import RunResult
from trainers.measure.run_log import read_log
from trainers.step.ceiling import Ceiling
from trainers.storage import Storage
from tune.report.write import read_environment
from tune.trials.journal import Journal, read_boundary, read_live


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", None),
        ("step", -1),
        ("epoch", float("nan")),
        ("train_time_s", float("inf")),
    ],
)
def test_an_evaluation_at_no_place_of_a_run_is_refused(name, value, tmp_path):
    """What searches and figures count with; None: it is not there."""
    whole = asdict(done()[0])
    rows = [row for row in whole["curve"] if row is not whole["curve"][-1]]
    last = {
        key: one
        for key, one in (whole["curve"][-1] | {name: value}).items()
        if one is not None
    }
    journal = Journal(Storage(tmp_path))
    journal.append(done()[0])
    assert journal.find(whole["id"]) is not None
    (tmp_path / f"trials/{whole['id']}.json").write_text(
        json.dumps(whole | {"curve": [*rows, last]})
    )
    with pytest.raises(CheckpointError):
        journal.find(whole["id"])


FILES = [
    b"",
    b"[]",
    b"{",
    b"\xff",
    b'{"a": "b"}',
    b'{"a": NaN}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("data", FILES)
def test_a_damaged_file_beside_a_run_is_named_and_learned_anew(
    data, tmp_path, caplog
):
    for name in (
        "microbatch.json",
        "boundary.json",
        "summary.json",
        "progress.json",
        "result.json",
    ):
        (tmp_path / name).write_bytes(data)
    storage = Storage(tmp_path)
    context = RunContext(storage, "local")
    assert Ceiling(context, "1 x cpu", may_shrink=True).read() is None
    assert read_boundary(storage).to_plain() == {}
    assert read_environment(storage) == {}
    assert read_live(storage) is None
    for name, said in (
        ("microbatch.json", caplog.text),
        ("boundary.json", caplog.text),
        ("summary.json", caplog.text),
    ):
        fits = name == "summary.json" and data[:4] == b'{"a"'
        assert (f"{tmp_path}/{name}" in said) != fits
    with pytest.raises((CheckpointError, StorageError)):
        storage.read_json("result.json", RunResult)


@pytest.mark.parametrize("line", [b"[]", b"{", b"\xff"])
def test_a_damaged_line_of_the_log_is_named(tmp_path, line):
    storage = Storage(tmp_path)
    storage.write("log/000000000001.jsonl", b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(CheckpointError):
        read_log(storage)


def test_a_run_resumes_beside_a_damaged_log(tmp_path):
    train(tmp_path, max_steps=4)
    (tmp_path / "log/000000000002.jsonl").write_bytes(b"\xff[[[")
    assert train(tmp_path, max_steps=6).steps == 6
