"""Runs over streams: each sample once a pass in the stream's order, and a resume at any step to the bit."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.specs import evaluations, losses, make
from tests.stream_tasks import Numbered
from tests.tasks import Blobs
from trainers.errors import ConfigError
from trainers.inference.passes import Inference
from trainers.launch.local import run_local
from trainers.launch.run_directory import prepare_storage
from trainers.measure.result import RunResult
from trainers.measure.run_log import read_log

KINDS = ["numbered", "stateful", "generator"]


def changes(kind: str, **more: Any) -> dict[str, Any]:
    task = {"task": "tests.stream_tasks:Streamed", "task_args": {"kind": kind}}
    return {**task, "max_steps": 21, "checkpoint__every_steps": 4, "evaluate__every_steps": 100, **more}


class InOrder(Blobs):
    """The same samples as a dataset: two passes and a half, one after another."""

    def sampler(self, dataset: Any, config: Any) -> Any:
        return torch.arange(21 * 24) % self.samples


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_a_dataset_of_the_same_samples_in_its_order(tmp_path: Path, kind: str, workers: int) -> None:
    steps = {"max_steps": 8 if kind == "generator" else 21}  # a pass of it is all there is
    spec = make(tmp_path / "stream", **changes(kind, **steps, data__num_workers=workers))
    run_local(spec)
    task = {"task": f"{__name__}:InOrder", "task_args": {"dtype": "float64"}}
    plain = make(tmp_path / "plain", **changes(kind, **steps) | task)
    run_local(plain)
    assert losses(spec) == losses(plain)
    if kind != "generator":
        assert evaluations(spec)[-1]["val_loss"] == evaluations(plain)[-1]["val_loss"]


def test_so_it_does_where_the_batch_size_changes(tmp_path: Path) -> None:
    sizes = {"batch_schedule": [{"until_samples": 50, "size": 24}, {"size": 40}], "global_batch_size": None}
    spec = make(tmp_path / "stream", **changes("numbered", max_steps=6, **sizes))
    for end in (2, 3, 6):  # before the change, right after its short step, and beyond
        run_local(make(tmp_path / "stream", **changes("numbered", max_steps=end, **sizes)))
    task = {"task": f"{__name__}:InOrder", "task_args": {"dtype": "float64"}}
    plain = make(tmp_path / "plain", **changes("numbered", max_steps=6, **sizes) | task)
    result = run_local(plain)
    assert losses(spec) == losses(plain)
    assert result.samples == 50 + 3 * 40


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_cut_and_resumed_it_goes_on_to_the_bit(tmp_path: Path, kind: str, workers: int) -> None:
    last = {"generator": 8, "numbered": 21, "stateful": 60}[kind]  # the last one's state is kept each 1,000 rows
    whole = make(tmp_path / "whole", **changes(kind, max_steps=last, data__num_workers=workers))
    run_local(whole)
    for end in sorted({3, 7, max(7, last - 7), last}):
        spec = make(tmp_path / "parts", **changes(kind, max_steps=end, data__num_workers=workers))
        run_local(spec)
    assert losses(spec) == losses(whole)
    assert len(losses(spec)) == last


def test_its_own_state_is_loaded_where_that_is_exact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run_local(make(tmp_path, **changes("stateful", max_steps=60)))
    assert "loads its own state_dict" in caplog.text
    caplog.clear()
    run_local(make(tmp_path / "other", **changes("numbered", max_steps=3)))
    assert "reads and drops what was trained" in caplog.text


@pytest.mark.parametrize(("first", "row"), [(0, 481), (100, 481)])
def test_a_stream_that_gives_others_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, first: int, row: int
) -> None:
    """As a live queue does; what is trained then is known to nobody."""
    run_local(make(tmp_path, **changes("numbered")))
    of = Numbered.__init__

    def others(self: Numbered, samples: int, split: str) -> None:
        of(self, samples, split)
        self.rows[first:] = self.rows[first:][::-1]

    monkeypatch.setattr(Numbered, "__init__", others)
    result = run_local(make(tmp_path, **changes("numbered", max_steps=30)))
    assert (result.status, result.steps) == ("done", 30)
    assert f"gives other samples up to row {row} than were trained before" in caplog.text


COUNTS_EPOCHS: list[tuple[dict[str, Any], str]] = [
    ({"max_steps": None, "epochs": 2}, r"^`epochs` is 2, .* give `max_steps`"),
    ({"evaluate": {"every_epochs": 1}}, r"^`evaluate.every_epochs` is 1, .* give `every_steps`"),
    ({"checkpoint": {"every_epochs": 1}}, r"^`checkpoint.every_epochs` is 1, .* give `every_steps` or `every_s`"),
    (
        {"lr_schedule": {"name": "StepLR", "args": {"step_size": 1}, "every": "epoch"}},
        "^`lr_schedule.every` is .epoch., .* step",
    ),
]


@pytest.mark.parametrize(("given", "words"), COUNTS_EPOCHS)
def test_it_wants_steps_and_not_epochs(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    spec = make(tmp_path, **changes("numbered"))
    keys = given.keys() | {"evaluate"}
    tree = {key: value for key, value in spec.tree.items() if key not in keys} | given
    with pytest.raises(ConfigError, match=words):
        run_local(dataclasses.replace(spec, tree=tree))


@pytest.mark.parametrize(("given", "kept"), [({}, [10, 20, 21]), ({"every_s": 1e9}, [21])])
def test_without_a_key_it_is_kept_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], kept: list[int]
) -> None:
    """It has no epochs after which it could be."""
    monkeypatch.setattr("trainers.loop.checkpointing.STREAM_S", 0.0)
    spec = make(tmp_path, **changes("numbered"))
    run_local(dataclasses.replace(spec, tree=spec.tree | {"checkpoint": {"keep": 9, **given}}))
    steps = [int(name.rpartition("-")[2]) for name in spec.storage.names("checkpoints")]
    assert steps == kept


def test_a_stream_that_ends_before_the_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ended after 203 samples"):
        run_local(make(tmp_path, **changes("generator", max_steps=9)))


def test_it_has_no_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = make(tmp_path, **changes("numbered", max_steps=1, log_every_steps=1))
    with caplog.at_level(logging.INFO):
        result = run_local(spec)
    assert result.epochs is None
    assert RunResult.from_json(spec.storage.read("result.json")).epochs is None
    assert all("epoch" not in row for row in read_log(spec.storage))
    assert str(result).startswith("done: 1 step, ")
    said = [record.getMessage() for record in caplog.records]
    assert any(words.startswith("1 step in all; ") for words in said)
    assert any(words.startswith("step 1/1  loss ") for words in said)
    assert not [words for words in said if "epoch" in words]


@pytest.mark.parametrize("workers", [1, 3])
def test_loader_processes_beyond_one_are_named(tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    run_local(make(tmp_path, **changes("numbered", max_steps=1, data__num_workers=workers)))
    named = [record for record in caplog.records if "`data.num_workers` is 3" in record.getMessage()]
    assert len(named) == (workers == 3)


def test_it_cannot_be_resident(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.resident"):
        run_local(make(tmp_path, **changes("numbered", data__resident=True)))


def test_a_stream_is_evaluated_after_training(tmp_path: Path) -> None:
    spec = make(tmp_path, **changes("numbered"))
    prepare_storage(spec, fresh=False)
    run_local(spec)
    for split in ("val", "train"):
        found = run_local(Inference(**dataclasses.asdict(spec), split=split, which="newest", out=None))
        assert found.samples == 203
    assert found.metrics["train_loss"] > 0
