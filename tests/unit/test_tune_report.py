"""What a sweep leaves behind, from hand-made records: the answer, the files, and what may not be in them."""

from __future__ import annotations

import io
import json
import math
import re
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from trainers.config import TrainConfig
from trainers.errors import Status
from trainers.settings import build, parse_mapping
from trainers.storage import Storage
from tune.config import Objective, SweepConfig
from tune.journal import TrialRecord, trial_id
from tune.report import Answer, answer, objective_value, table, write_report

SCRIPT = "<script>alert('owned')</script>"
TRAIN = {
    "task": "task:Digits",
    "batch_size_per_worker": 8,
    "epochs": 30,
    "optimizer": {"name": "adamw", "lr": 0.002},
}
ENVIRONMENT = {"paceline": "0.1.0", "torch": "2.15.0", "device": "1 x NVIDIA H200, 139 GiB", "host": SCRIPT}
SPACE: dict[str, list[Any]] = {
    "global_batch_size": [32, 64, 128, 256, 512],
    "precision": ["fp32", "bf16", "fp16"],
}
# batch size, precision, samples/s, MiB, val_accuracy, val_loss, s to the target (None: not reached)
DONE: list[tuple[int, str, float, int, float, float, float | None]] = [
    (32, "fp32", 4120.0, 310, 0.9791, 0.071, 4.31),
    (32, "bf16", 4890.0, 246, 0.9777, 0.074, 4.02),
    (64, "fp32", 7010.0, 402, 0.9805, 0.066, 4.4),
    (64, "bf16", 8240.0, 297, 0.9819, 0.062, 3.12),
    (128, "fp32", 10250.0, 588, 0.9763, 0.078, 4.61),
    (128, "bf16", 10890.0, 398, 0.9758, 0.079, 4.48),
    (256, "fp32", 12310.0, 961, 0.9708, 0.097, 5.23),
    (256, "bf16", 11980.0, 603, 0.9652, 0.118, None),
]


def config(metric: str = "time_to_target", **changes: Any) -> SweepConfig:
    objective = {"metric": metric, "target": {"val_accuracy": 0.97}} | changes.pop("objective", {})
    return SweepConfig.model_validate(
        {"name": "digits-sweep", "train": TRAIN, "space": SPACE, "objective": objective} | changes
    )


def trial(number: int, status: Status, settings: dict[str, Any], **result: Any) -> TrialRecord:
    start = 1_760_000_000.25 + 12 * number
    return TrialRecord(trial_id(settings), settings, status, start, start + 10.5, lane=number % 2, **result)


def curve(accuracy: float, loss: float, duration_s: float, bend: float) -> list[dict[str, float]]:
    return [
        {
            "step": 40.0 * epoch,
            "epoch": float(epoch),
            "train_time_s": duration_s * epoch / 30,
            "val_accuracy": accuracy - 0.85 * math.exp(-epoch / bend),
            "val_loss": loss + 2.2 * math.exp(-epoch / bend),
        }
        for epoch in range(1, 31)
    ]


def done() -> list[TrialRecord]:
    return [
        trial(
            number,
            "done",
            {"global_batch_size": batch, "precision": precision},
            samples_per_s=rate,
            step_time_s=batch / rate,
            peak_memory_bytes=mib * 2**20,
            time_to_target_s=time_s,
            metrics={"train_loss": loss / 2, "val_loss": loss, "val_accuracy": accuracy},
            curve=curve(accuracy, loss, 43110 / rate, 2 + batch / 64),
        )
        for number, (batch, precision, rate, mib, accuracy, loss, time_s) in enumerate(DONE)
    ]


def failed() -> list[TrialRecord]:
    return [
        trial(
            8,
            "out_of_memory",
            {"global_batch_size": 512, "precision": "fp32"},
            message="microbatch 512 needs 1.2 GiB more than there is",
        ),
        trial(
            9,
            "error",
            {"global_batch_size": 512, "precision": "bf16"},
            message=f"ValueError: bad {SCRIPT}",
            traceback=f'Traceback (most recent call last):\n  File "task.py", line 7\n{SCRIPT}',
        ),
        trial(
            10,
            "diverged",
            {"global_batch_size": 64, "precision": "fp16"},
            samples_per_s=99999.0,
            step_time_s=0.001,
            peak_memory_bytes=300 * 2**20,
            time_to_target_s=0.1,
            metrics={"train_loss": math.nan, "val_loss": math.nan, "val_accuracy": 1.0},
            curve=[*curve(0.95, 0.2, 5.0, 3)[:8], {"train_time_s": 1.5, "val_accuracy": math.nan}],
            message="the loss is not finite since step 310",
        ),
    ]


def written(sweep: Storage, records: list[TrialRecord], **changes: Any) -> Answer:
    return write_report(sweep, config(**changes), TRAIN, records, ENVIRONMENT, task_dir="/home/me/digits")


@pytest.fixture
def sweep(tmp_path: Any) -> Storage:
    return Storage(f"{tmp_path}/results/digits-sweep")


@pytest.mark.parametrize(
    ("metric", "batch", "precision"),
    [
        ("time_to_target", 64, "bf16"),
        ("samples_per_s", 256, "fp32"),
        ("step_time_s", 32, "bf16"),
        ("val_loss", 64, "bf16"),
        ("val_accuracy", 64, "bf16"),
    ],
)
def test_best_by_each_objective(metric: str, batch: int, precision: str) -> None:
    found = answer(config(metric), done() + failed())
    assert found.best is not None
    assert found.best.config == {"global_batch_size": batch, "precision": precision}
    assert found.ranking[0] is found.best
    assert len(found.ranking) == (7 if metric == "time_to_target" else 8)


def test_mode_turns_the_ranking_around() -> None:
    least = answer(config("train_loss", objective={"mode": "min"}), done()).ranking
    most = answer(config("train_loss", objective={"mode": "max"}), done()).ranking
    assert [record.id for record in least] == [record.id for record in most][::-1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("metric", ["val_loss", "val_accuracy"])
def test_what_is_not_finite_never_wins(metric: str, value: float) -> None:
    odd = trial(0, "done", {"global_batch_size": 32, "precision": "fp16"}, metrics={metric: value})
    assert objective_value(Objective(metric=metric), odd) is None
    assert odd not in answer(config(metric), [odd, *done()]).ranking


def test_a_stopped_trial_may_win_and_a_failed_one_may_not() -> None:
    objective = Objective(metric="val_loss")
    for status, value in (("stopped", 0.1), ("done", 0.1), ("out_of_memory", None), ("preempted", None)):
        record = trial(0, status, {"precision": "fp32"}, metrics={"val_loss": 0.1})  # type: ignore[arg-type]
        assert objective_value(objective, record) == value


def test_the_sentence_says_the_margin_and_the_throughputs_winner() -> None:
    assert answer(config(), done()).sentence == (
        "global_batch_size 64 with bf16 reaches val_accuracy 0.97 in 3.12 s of training, "
        "1.3 times faster than the next (32, bf16). "
        "The highest throughput, 12,300 samples/s, has global_batch_size 256 with fp32, which needs 5.23 s."
    )
    assert answer(config("val_accuracy"), done()).sentence.startswith(
        "global_batch_size 64 with bf16 has the highest val_accuracy, 0.9819, "
        "but the next (64, fp32) has 0.9805: the first 6 are about equal, "
        "and one run each cannot tell them apart. The highest throughput"
    )
    assert answer(config("samples_per_s"), done()).sentence == (
        "global_batch_size 256 with fp32 has the highest throughput, 12,300 samples/s, "
        "but the next (256, bf16) has 12,000 samples/s: the two are about equal, "
        "and one run each cannot tell them apart."
    )


@pytest.mark.parametrize(
    ("metric", "values", "words"),
    [
        ("val_loss", (0.100, 0.104), "has 0.104: the two are about equal"),
        ("val_loss", (0.10, 0.11), "0.1, 1.1 times lower than the next"),
        ("val_loss", (-2.0, -1.0), "-2, 1 lower than the next"),
        ("val_loss", (0.0, 0.0), "about equal"),
        ("val_accuracy", (0.98, 0.95), "0.98, 0.03 higher than the next"),
    ],
)
def test_the_margin(metric: str, values: tuple[float, float], words: str) -> None:
    records = [
        trial(i, "done", {"precision": name}, metrics={metric: value})
        for i, (name, value) in enumerate(zip(("fp32", "bf16"), values, strict=True))
    ]
    sentence = answer(config(metric, space={"precision": ["fp32", "bf16"]}), records).sentence
    assert sentence.startswith("precision fp32 has")
    assert words in sentence


def test_why_there_is_no_best() -> None:
    slow = [record for record in done() if record.time_to_target_s is None]
    assert answer(config(), slow).sentence.startswith(
        "There is no best trial: no finished one reached val_accuracy 0.97; "
        "the closest, global_batch_size 256 with bf16, came to 0.9652."
    )
    misspelt = answer(config("val_acc", objective={"mode": "max"}), done())
    assert misspelt.best is None
    assert "has a val_acc (metrics reported: train_loss, val_loss, val_accuracy)" in misspelt.sentence
    assert answer(config(), []).sentence == "There is no best trial: none has run."


def test_the_terminals_table() -> None:
    from rich.console import Console

    records = (done() + failed())[::-1]
    console = Console(file=io.StringIO(), width=200)
    console.print(table(config(), records, answer(config(), records)))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    rows = [line.removeprefix("* ").split() for line in lines if re.match(r"(\* )?\d", line)]
    assert [row[:2] for row in rows] == sorted(
        [row[:2] for row in rows],
        key=lambda row: (SPACE["global_batch_size"].index(int(row[0])), SPACE["precision"].index(row[1])),
    )
    marked = [line for line in lines if line.startswith("* ")]
    assert [line.split()[1:3] for line in marked] == [["64", "bf16"]]
    for text in ("done", "8,240", "7.77", "297 MiB", "0.9819", "3.12 s"):
        assert text in marked[0]
    assert len(rows) == 11
    assert "* best by time_to_target" in "".join(lines)


def test_parquet_has_stable_types_and_comes_back(sweep: Storage) -> None:
    records = done() + failed()
    written(sweep, records)
    found = parquet.read_table(io.BytesIO(sweep.read("results.parquet")))
    expected = {
        "id": pa.string(),
        "status": pa.string(),
        "global_batch_size": pa.int64(),
        "precision": pa.string(),
        "samples_per_s": pa.float64(),
        "peak_memory_bytes": pa.int64(),
        "time_to_target_s": pa.float64(),
        "val_accuracy": pa.float64(),
        "lane": pa.int64(),
        "message": pa.string(),
        "start_time": pa.timestamp("us", "UTC"),
        "end_time": pa.timestamp("us", "UTC"),
    }
    assert {name: found.schema.field(name).type for name in expected} == expected
    assert found.num_rows == 11
    assert found.column("global_batch_size").to_pylist() == [r.config["global_batch_size"] for r in records]
    assert found.column("peak_memory_bytes").to_pylist()[0] == 310 * 2**20
    assert found.column("samples_per_s").to_pylist()[8] is None
    frame = pd.read_parquet(io.BytesIO(sweep.read("results.parquet")))
    assert list(frame[frame.time_to_target_s < 1].status) == ["diverged"]  # kept, though it cannot win
    assert frame.start_time[1].timestamp() == records[1].start_time
    assert frame[frame.status == "done"].groupby("precision").samples_per_s.max()["bf16"] == 11980.0
    again = Storage(f"{sweep.uri}-less")
    written(again, records[8:9])
    less = parquet.read_table(io.BytesIO(again.read("results.parquet"))).schema
    assert all(less.field(name).type == found.schema.field(name).type for name in less.names)


def test_parquet_columns_of_any_value(sweep: Storage) -> None:
    space: dict[str, list[Any]] = {
        "microbatch_size": [16, "auto"],
        "optimizer.lr": [1, 0.5],
        "fullgraph": [True, False],
        "scaling.num_workers": [[1, 2], 2],
    }
    records = [
        trial(number, "done", {key: values[number] for key, values in space.items()}, metrics=metrics)
        for number, metrics in enumerate([{"status": 1.0, "val_loss": 1.0}, {}])
    ]
    found = config("samples_per_s", space=space)
    write_report(sweep, found, TRAIN, records, {}, task_dir=None)
    columns = parquet.read_table(io.BytesIO(sweep.read("results.parquet"))).to_pydict()
    assert columns["microbatch_size"] == ["16", "auto"]
    assert columns["optimizer.lr"] == [1.0, 0.5]
    assert columns["fullgraph"] == [True, False]
    assert columns["scaling.num_workers"] == ["[1, 2]", "2"]
    assert columns["metrics.status"] == [1.0, None]
    assert columns["status"] == ["done", "done"]


def test_best_yaml_is_a_run(sweep: Storage) -> None:
    found = written(sweep, done() + failed())
    text = sweep.read("best.yaml").decode()
    assert found.best is not None
    first = text.splitlines()[0]
    assert first == f"# The best trial of the sweep digits-sweep: {found.best.id}, time_to_target 3.12."
    best = build(TrainConfig, parse_mapping(text, "best.yaml"), "best.yaml")
    assert (best.global_batch_size, best.batch_size_per_worker, best.precision) == (64, None, "bf16")
    assert (best.name, best.storage_path) == ("digits-sweep-best", sweep.uri.removesuffix("/digits-sweep"))
    assert (best.task_dir, best.epochs, best.optimizer.lr) == ("/home/me/digits", 30, 0.002)


def test_summary_is_plain_data(sweep: Storage) -> None:
    found = written(sweep, done() + failed())
    summary = json.loads(sweep.read("summary.json"), parse_constant=pytest.fail)
    assert summary["best"]["config"] == {"global_batch_size": 64, "precision": "bf16"}
    assert summary["best"]["value"] == 3.12
    assert summary["sentence"] == found.sentence
    assert summary["status"] == {"done": 8, "out_of_memory": 1, "diverged": 1, "error": 1}
    assert summary["wall_time_s"] == 130.5
    objective = {"metric": "time_to_target", "mode": "min", "target": {"val_accuracy": 0.97}}
    assert summary["objective"] == objective


def page(sweep: Storage) -> str:
    return sweep.read("report.html").decode()


def test_the_page_is_whole_and_asks_the_network_for_nothing(sweep: Storage) -> None:
    written(sweep, done() + failed())
    text = page(sweep)
    assert re.findall(r"""(?:src|href)\s*=\s*(?!["']?(?:#|data:,)).*""", text) == []
    assert re.findall(r"""url\(\s*(?!["']?#).*""", text) == []
    assert set(re.findall(r"(\S{0,12})https?://", text)) <= {'xmlns="'}
    assert "@import" not in text
    assert "<link" not in text.replace('<link rel="icon" href="data:,">', "")
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 3
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_the_pages_figures(sweep: Storage) -> None:
    written(sweep, done() + failed())
    text = page(sweep)
    assert len(re.findall(r"<svg\s", text)) == len(re.findall(r"<figure\s", text)) == 4
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', text)) <= set(ids)
    assert not re.search(r"#0a0[bc]", text)
    assert "var(--s1)" in text
    drawn = re.findall(r"<text [^>]*>([^<]*)<", text)
    assert {"32", "64", "128", "256", "512"} <= set(drawn)
    assert "<title>512, fp32: out of memory</title>" in text


def test_the_same_records_give_the_same_bytes(sweep: Storage) -> None:
    names = ("results.parquet", "best.yaml", "summary.json", "report.html")
    written(sweep, done() + failed())
    first = [sweep.read(name) for name in names]
    written(sweep, done() + failed())
    assert [sweep.read(name) for name in names] == first


def test_a_sweep_that_failed_says_so(sweep: Storage) -> None:
    written(sweep, done())
    assert sweep.exists("best.yaml")
    found = written(sweep, failed())
    assert found.best is None
    assert found.sentence.startswith("There is no best trial: none finished")
    assert "(1 out_of_memory, 1 error, 1 diverged)" in found.sentence
    assert not sweep.exists("best.yaml")
    assert "There is no best trial" in page(sweep)
    assert json.loads(sweep.read("summary.json"))["best"] is None


def test_a_sweep_without_trials_has_a_report(sweep: Storage) -> None:
    written(sweep, [])
    assert parquet.read_table(io.BytesIO(sweep.read("results.parquet"))).num_rows == 0
    assert "none has run" in page(sweep)


def test_one_trial(sweep: Storage) -> None:
    found = written(sweep, done()[3:4])
    assert found.sentence.endswith(" in 3.12 s of training; it is the only trial.")
    assert page(sweep).count("<figure ") == 4


@pytest.mark.parametrize(
    "space",
    [
        {"precision": ["fp32", "bf16"]},
        {"task_args.name": ["$\\frac{", '<b>&"]']},
        {"optimizer.lr": {"loguniform": [1e-5, 1e-1]}, "task_args.lr": [1, 2]},
        {"microbatch_size": [16, "auto"], "scaling.num_workers": [[1, 2], 2]},
    ],
)
def test_any_space_can_be_drawn(sweep: Storage, space: dict[str, Any]) -> None:
    is_random = any(not isinstance(given, list) for given in space.values())
    values = {key: given if isinstance(given, list) else [1e-5, 3e-2] for key, given in space.items()}
    records = [
        trial(
            number,
            "done",
            {key: given[number] for key, given in values.items()},
            samples_per_s=100.0 + number,
            peak_memory_bytes=2**31,
            curve=[{"train_time_s": 1.0, "val_loss": 0.5}],
        )
        for number in range(2)
    ]
    search = {"search": "random", "budget": {"trials": 2}} if is_random else {}
    found = config("samples_per_s", space=space, objective={"target": None}, **search)
    write_report(sweep, found, TRAIN, records, {}, task_dir=None)
    text = page(sweep)
    assert text.count("<figure ") == 3
    assert "<b>" not in text
