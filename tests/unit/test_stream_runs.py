"""Runs over streams: each sample once a pass in the stream's order, and a
resume at any step to the bit.
"""

import dataclasses

import pytest
import torch

from tests.specs import error_of, evaluations, losses, make
from tests.stream_tasks import Numbered
from tests.tasks import Blobs
from trainers.inference import Inference
from trainers.launch.local import run_local
from trainers.start import prepare_storage


def changes(kind, **more):
    task = {"task": "tests.stream_tasks:Streamed", "task_args": {"kind": kind}}
    return {
        **task,
        "max_steps": 21,
        "checkpoint__every_steps": 4,
        "evaluate__every_steps": 100,
        **more,
    }


class InOrder(Blobs):
    """The same samples as a dataset: two passes and a half, one after another."""

    def sampler(self, dataset, config):
        return torch.arange(21 * 24) % self.samples


@pytest.mark.parametrize(
    ("kind", "workers"), [("numbered", 0), ("stateful", 3), ("generator", 3)]
)
def test_it_trains_as_a_dataset_of_the_same_samples_in_its_order(
    tmp_path, kind, workers
):
    spec = make(
        tmp_path / "stream", **changes(kind, data__num_workers=workers)
    )
    run_local(spec)
    task = {"task": f"{__name__}:InOrder", "task_args": {"dtype": "float64"}}
    plain = make(tmp_path / "plain", **changes(kind) | task)
    run_local(plain)
    assert losses(spec) == losses(plain)
    if kind != "generator":
        assert (
            evaluations(spec)[-1]["val_loss"]
            == evaluations(plain)[-1]["val_loss"]
        )


@pytest.mark.parametrize(
    ("kind", "workers"), [("numbered", 1), ("stateful", 1), ("generator", 0)]
)
def test_cut_and_resumed_it_goes_on_to_the_bit(tmp_path, kind, workers):
    # The last one's state is kept each 1,000 rows.
    last = {"generator": 21, "numbered": 21, "stateful": 60}[kind]
    whole = make(
        tmp_path / "whole",
        **changes(kind, max_steps=last, data__num_workers=workers),
    )
    run_local(whole)
    for end in sorted({3, 7, max(7, last - 7), last}):
        spec = make(
            tmp_path / "parts",
            **changes(kind, max_steps=end, data__num_workers=workers),
        )
        run_local(spec)
    assert losses(spec) == losses(whole)
    assert len(losses(spec)) == last


def test_a_stream_that_gives_others_goes_on_with_a_warning(
    tmp_path, monkeypatch, caplog
):
    """As a live queue does; what is trained then is known to nobody."""
    run_local(make(tmp_path, **changes("numbered")))
    of = Numbered.__init__

    def others(self, samples, split):
        of(self, samples, split)
        self.rows[100:] = self.rows[100:][::-1]

    monkeypatch.setattr(Numbered, "__init__", others)
    result = run_local(make(tmp_path, **changes("numbered", max_steps=30)))
    assert (result.status, result.steps) == ("done", 30)
    assert "row 481" in caplog.text


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("epochs", {"max_steps": None, "epochs": 2}),
        ("evaluate.every_epochs", {"evaluate": {"every_epochs": 1}}),
        ("checkpoint.every_epochs", {"checkpoint": {"every_epochs": 1}}),
        ("data.resident", {"data": {"resident": True}}),
    ],
)
def test_it_wants_steps_and_is_not_resident(tmp_path, field, given):
    spec = make(tmp_path, **changes("numbered"))
    keys = given.keys() | {"evaluate"}
    tree = {
        key: value for key, value in spec.tree.items() if key not in keys
    } | given
    with error_of(field):
        run_local(dataclasses.replace(spec, tree=tree))


def test_a_stream_is_evaluated_after_training(tmp_path):
    spec = make(tmp_path, **changes("numbered"))
    prepare_storage(spec, fresh=False)
    run_local(spec)
    for split in ("val", "train"):
        found = run_local(
            Inference(
                **dataclasses.asdict(spec),
                split=split,
                which="newest",
                out=None,
            )
        )
        assert found.samples == 203
    assert found.metrics["train_loss"] > 0
