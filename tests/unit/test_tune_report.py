"""What a sweep leaves behind, from hand-made records: the files, and what may
not be in them.
"""

import base64
import hashlib
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.unit.report_records import (
    ENVIRONMENT,
    TRAIN,
    config,
    curve,
    done,
    failed,
    trial,
)
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.yaml import parse_mapping
from trainers.storage import Storage
from tune.report.answer import answer
from tune.report.table import table
from tune.report.write import write_report
from tune.trials.record import Spent


def written(sweep, records, **changes):
    return write_report(
        sweep,
        config(**changes),
        TRAIN,
        records,
        ENVIRONMENT,
        task_dir="/home/me/digits",
    )


def on_terminal(found, records, console_width, *width):
    """The table as a terminal of a width shows it."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=console_width)
    console.print(table(found, records, answer(found, records), *width))
    return console.file.getvalue()


def results(sweep):
    return parquet.read_table(io.BytesIO(sweep.read("results.parquet")))


def best_run(sweep):
    text = sweep.read("best.yaml").decode()
    return build(TrainConfig, parse_mapping(text, "best.yaml"), "best.yaml")


def summary_of(sweep):
    """In JSON's own grammar, without NaN."""
    return json.loads(sweep.read("summary.json"), parse_constant=pytest.fail)


@pytest.fixture
def sweep(tmp_path):
    return Storage(f"{tmp_path}/results/digits-sweep")


def test_the_terminals_table():
    records = (done() + failed())[::-1]
    lines = on_terminal(config(), records, 200).splitlines()
    rows = [
        line.removeprefix("* ").split()
        for line in lines
        if re.match(r"(\* )?\d", line)
    ]
    best, *_ = rows
    assert best[:2] == ["64", "bf16"]
    times = [
        float(row[-2]) for row in rows if row[2] == "done" and row[-1] == "s"
    ]
    assert times == sorted(times)
    assert [row[:2] for row in rows[-3:]] == [
        ["512", "bf16"],
        ["512", "fp32"],
        ["256", "bf16"],
    ], "as the records stand"
    marked = [line for line in lines if line.startswith("* ")]
    assert [line.split()[1:3] for line in marked] == [["64", "bf16"]]
    for text in ("done", "8,240", "7.77", "297 MiB", "0.9819", "3.12 s"):
        assert text in marked[0]
    assert len(rows) == 11
    assert "* best by time_to_target" in "".join(lines)


def test_a_narrow_terminal_gets_fewer_columns_and_whole_figures():
    records = done() + failed()
    for width in (60, 80, 100):
        text = on_terminal(config(), records, width, width)
        assert max(map(len, text.splitlines())) <= width
        assert "out_of_memory" in text
        assert "3.12 s" in text
        assert ("8,240" in text) == (width > 60)


def test_a_figure_of_several_words_is_whole_or_left_out():
    """Also where other columns could still be narrower."""
    met = [
        {"step": 1.0, "train_time_s": time_s, "val_accuracy": 0.99}
        for time_s in (0.0301, 0.0731)
    ]
    times = {
        "time_to_target_s": 0.0731,
        "spent": Spent(5.0, 1.25, 0.0987, 3.5),
    }
    records = [replace(record, curve=met, **times) for record in done()]
    for width in range(70, 140, 2):
        text = on_terminal(config(), records, width, width)
        left_out = text.partition("not shown")[2]
        assert text.count("0.0301 to 0.0731 s") == len(records)
        for header, figure in (
            ("starting", "1.25 s"),
            ("training", "0.0987 s"),
        ):
            assert text.count(figure) == len(records) * (
                header not in left_out
            )


@pytest.mark.parametrize("key", ["seed", "epochs"])
def test_parquet_has_a_trials_key_that_is_also_the_name_of_a_figure(
    sweep, key
):
    records = []
    for number in (1, 2):
        settings = {key: number}
        records.append(trial(number, "done", settings, epochs=0.5))
    again = {"id": "repeat", "purpose": "repeat", "seed": 7}
    written(
        sweep, [*records, replace(records[0], **again)], space={key: [1, 2]}
    )
    rows = results(sweep).to_pydict()
    if key == "seed":
        assert rows["seed"] == [1, 2, 7]
    else:
        assert rows["config.epochs"] == [1, 2, 1]
        assert rows["epochs"] == [0.5] * 3


def test_parquet_has_stable_types_and_comes_back(sweep):
    records = done() + failed()
    written(sweep, records)
    found = results(sweep)
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
    assert {
        name: found.schema.field(name).type for name in expected
    } == expected
    assert found.num_rows == 11
    assert found.column("global_batch_size").to_pylist() == [
        r.config["global_batch_size"] for r in records
    ]
    assert found.column("peak_memory_bytes").to_pylist()[0] == 310 * 2**20
    assert found.column("samples_per_s").to_pylist()[8] is None
    frame = pd.read_parquet(io.BytesIO(sweep.read("results.parquet")))
    assert list(frame[frame.time_to_target_s < 1].status) == [
        "diverged"
    ]  # kept, though it cannot win
    assert frame.start_time[1].timestamp() == records[1].start_time
    assert (
        frame[frame.status == "done"]
        .groupby("precision")
        .samples_per_s.max()["bf16"]
        == 11980.0
    )
    again = Storage(f"{sweep.uri}-less")
    written(again, records[8:9])
    less = results(again).schema
    assert all(
        less.field(name).type == found.schema.field(name).type
        for name in less.names
    )


def test_parquet_tells_starting_from_training_and_when_the_target_was_missed(
    sweep,
):
    first, second, third = done()[:3]
    met = [
        {"step": 1.0, "train_time_s": time_s, "val_accuracy": 0.9}
        for time_s in (3.0, 4.31)
    ]
    known = replace(first, curve=met, spent=Spent(5.0, 1.0, 2.0, 3.5))
    written(
        sweep,
        [
            known,
            replace(second, curve=[{**met[1], "train_time_s": 4.02}]),
            third,
        ],
    )
    rows = results(sweep).to_pylist()
    assert [row["time_to_target_low_s"] for row in rows] == [3.0, 0.0, None]
    assert [
        rows[0][name] for name in ("starting_s", "training_s", "on_lane_s")
    ] == [
        1.0,
        2.0,
        3.5,
    ]
    assert rows[1]["starting_s"] is None
    assert summary_of(sweep)["trial_time_s"] == 3.5 + 2 * 10.5
    text = page(sweep)
    assert "3 to 4.31 s" in text
    assert "up to 4.02 s" in text
    assert (
        "On the lanes, trials were starting for 1 s and training for 2 s."
        in text
    )


def test_best_yaml_is_a_run(sweep):
    found = written(sweep, done() + failed())
    text = sweep.read("best.yaml").decode()
    first = text.splitlines()[0]
    assert (
        first
        == f"# The best trial of the sweep digits-sweep: {found.best.id}."
    )
    best = best_run(sweep)
    assert (
        best.global_batch_size,
        best.batch_size_per_worker,
        best.precision,
    ) == (
        64,
        None,
        "bf16",
    )
    assert (best.name, best.storage_path) == (
        "digits-sweep-best",
        sweep.uri.removesuffix("/digits-sweep"),
    )
    assert (best.task_dir, best.epochs, best.optimizer.lr) == (
        "/home/me/digits",
        30,
        0.002,
    )


def test_summary_is_plain_data(sweep):
    found = written(sweep, done() + failed())
    summary = summary_of(sweep)
    assert summary["best"]["config"] == {
        "global_batch_size": 64,
        "precision": "bf16",
    }
    assert summary["best"]["value"] == 3.12
    assert summary["answer"] == found.line
    assert summary["status"] == {
        "done": 8,
        "out_of_memory": 1,
        "diverged": 1,
        "error": 1,
    }
    assert summary["wall_time_s"] == 130.5
    objective = {
        "metric": "time_to_target",
        "mode": "min",
        "target": {"val_accuracy": 0.97},
    }
    assert summary["objective"] == objective


def test_files_stay_readable_whatever_they_hold(sweep):
    name = "a\nb: 1 loss"
    space = {"task_args.x": [math.nan, math.inf, {"y": [-math.inf]}]}
    records = [
        trial(
            n,
            "done",
            {"task_args.x": value},
            metrics={name: 1.0 + n},
            message="no file /data/\udcff",
        )
        for n, value in enumerate(space["task_args.x"])
    ]
    found = config(
        name,
        space=space,
        objective={"mode": "min", "target": {"val_loss": 1e308}},
    )
    for ended in (records, records[1:], records[2:]):
        write_report(
            sweep, found, TRAIN, ended, {"host": "\ud800"}, task_dir=None
        )
        best = best_run(sweep)
        assert repr(best.task_args) == repr(
            {"x": ended[0].config["task_args.x"]}
        )
        summary_of(sweep)
        assert r"no file /data/\udcff" in page(sweep)
        messages = results(sweep).column("message").to_pylist()
        assert messages == [r"no file /data/\udcff"] * len(ended)


def page(sweep):
    return sweep.read("report.html").decode()


def test_the_page_is_whole_and_asks_the_network_for_nothing(sweep):
    written(sweep, done() + failed())
    text = page(sweep)
    assert (
        re.findall(r"""(?:src|href)\s*=\s*(?!["']?(?:#|data:,)).*""", text)
        == []
    )
    assert re.findall(r"""url\(\s*(?!["']?#).*""", text) == []
    assert set(re.findall(r"(\S{0,12})https?://", text)) <= {'xmlns="'}
    assert "@import" not in text
    assert "<link" not in text.replace('<link rel="icon" href="data:,">', "")
    [script] = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(
        hashlib.sha256(script.encode()).digest()
    ).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "<script" not in text.replace(f"<script>{script}</script>", "")
    assert (
        len(re.findall(r"<figure\s", text)),
        len(re.findall(r"<svg\s", text)),
    ) == (
        4,
        5,
    )
    assert text.count("&lt;script&gt;") >= 3
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


HOSTILE = [
    "<script>alert(1)</script>",
    "</style></title></svg></textarea><img src=x onerror=alert(1)>",
    '" onload="alert(1)" x="',
    "-->{{ 7 * 7 }}{% raw %}",
    "a\x01b\x1b]8;;https://x.invalid\x07c\x1b[2J\u202e",
]


class _Tags(HTMLParser):
    """All tags of a page, and those of their attributes that could do something."""

    def __init__(self, text):
        super().__init__()
        self.tags = set()
        self.live = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            points = name.endswith("href") or name in (
                "src",
                "action",
                "formaction",
                "data",
                "srcdoc",
            )
            if name.startswith("on") or (
                points and not (value or "").startswith(("#", "data:,"))
            ):
                self.live.append(f"{tag} {name}={value}")


@pytest.mark.parametrize("words", HOSTILE)
def test_no_text_of_a_trial_does_anything_in_the_page_or_on_the_terminal(
    sweep, words
):
    """Names and values of the configuration, metrics, messages, tracebacks,
    ids, versions: from anybody.
    """
    key = f"task_args.{words}"
    found = config(
        words,
        space={key: [words, "b"], "precision": ["fp32", "bf16"]},
        objective={"mode": "max"},
    )
    hostile = [
        trial(n, "done", {key: value, "precision": "fp32"}, samples_per_s=9.0 + n, peak_memory_bytes=2**30,
              metrics={words: 1.0 + n, "val_loss": 1.0}, curve=curve(0.9, 0.1, 5.0, 3),
              message=f"{words}\ud800", traceback=f"\ud800{words}")
        for n, value in enumerate((words, "b"))
    ]  # fmt: skip
    records = [
        *hostile,
        *(replace(one, id=words + one.id, status="error") for one in hostile),
    ]
    train = {**TRAIN, "task_args": {words: words}}
    write_report(
        sweep, config(), TRAIN, done() + failed(), ENVIRONMENT, task_dir=None
    )
    usual = _Tags(page(sweep))
    where = "".join(filter(str.isprintable, words))
    write_report(
        sweep, found, train, records, {words: f"{words}\ud800"}, task_dir=where
    )
    shown = _Tags(page(sweep))
    assert shown.live == usual.live == []
    assert shown.tags <= usual.tags | {"details"}
    assert page(sweep).count("<script") == 1, "ours, by its hash"
    for name in ("report.html", "summary.json", "best.yaml"):
        assert "\x1b" not in sweep.read(name).decode()
    assert best_run(sweep)
    summary_of(sweep)
    rows = results(sweep)
    assert rows.num_rows == 4
    text = on_terminal(found, records, 300)
    assert not set(text) & {"\x01", "\x1b", "\x07", "\u202e", "\ud800"}


def test_a_sweep_that_failed_says_so(sweep):
    written(sweep, done())
    assert sweep.exists("best.yaml")
    found = written(sweep, failed())
    assert found.best is None
    assert found.line.startswith("There is no best trial: none finished")
    assert "(1 out_of_memory, 1 error, 1 diverged)" in found.line
    assert not sweep.exists("best.yaml")
    assert "There is no best trial" in page(sweep)
    assert json.loads(sweep.read("summary.json"))["best"] is None
