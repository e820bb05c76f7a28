"""Streams on several ranks: the curve of one, each kind; killed and resumed
over an S3 server; what ranks split.
"""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from tests.distributed.kills import BATCH, EPOCHS, SAMPLES, STEPS_PER_EPOCH
from tests.distributed.processes import printed_by, run_processes
from tests.distributed.stream_kills import KINDS
from tests.distributed.test_collectives import run
from tests.faults.s3 import installed
from tests.specs import make, ranked
from tests.stream_tasks import Streamed
from trainers.errors import ConfigError
from trainers.inference import Inference, infer
from trainers.launch.local import run_local
from trainers.start import prepare_storage

pytestmark = pytest.mark.full


def train(rank, world_size, kind):
    try:
        return run(Streamed(kind), rank, world_size, max_steps=17).metrics[
            "train_loss"
        ]
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["numbered", "stateful", "by rank"])
def test_any_number_of_ranks_trains_on_the_same_samples(kind, monkeypatch):
    if kind == "by rank":  # of a launcher around all of it
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
    [alone] = run_processes(1, train, kind)
    assert (
        run_processes(3, train, kind) == [pytest.approx(alone, rel=1e-12)] * 3
    )


@pytest.mark.parametrize(
    "kind", ["own share", "own share later", "own share of val"]
)
def test_a_stream_that_is_split_by_rank_is_refused(kind):
    for said in run_processes(2, train, kind):
        assert "gives each rank different samples" in said


def use(rank, world_size, kind, spec, out):
    job = Inference(
        **dataclasses.asdict(spec), split="val", which="newest", out=out
    )
    context = ranked(rank, world_size, spec.uri)
    try:
        found = infer(Streamed(kind), context, job)
    except ConfigError as error:
        return str(error)
    return found.samples, found.metrics


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    task = {
        "task": "tests.stream_tasks:Streamed",
        "task_args": {"kind": "numbered"},
    }
    spec = make(tmp_path_factory.mktemp("trained"), **task, max_steps=4)
    prepare_storage(spec, fresh=False)
    run_local(spec)
    return spec


@pytest.mark.parametrize("predicts", [False, True])
def test_what_was_trained_is_used_by_any_number_of_ranks(
    tmp_path, trained, predicts
):
    outs = [
        str(tmp_path / f"{world_size}.parquet") if predicts else None
        for world_size in (1, 2)
    ]
    [alone] = run_processes(1, use, "numbered", trained, outs[0])
    assert alone[0] == 203
    assert run_processes(2, use, "numbered", trained, outs[1]) == [alone] * 2
    if predicts:
        alone_rows, rows = (Path(str(out)).read_bytes() for out in outs)
        assert rows == alone_rows


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    if not installed():
        pytest.skip("moto is not installed")
    return printed_by(
        "tests.distributed.stream_kills",
        tmp_path_factory.mktemp("stream-kills"),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_killed_over_an_object_store_each_sample_comes_once_and_the_curve_is_the_same(
    killed, kind
):
    found = killed[kind]
    for name, of in found.items():
        *before, last = of["ends"]
        assert all(end["codes"][end["kill_rank"]] == -9 for end in before), (
            name,
            before,
        )
        assert set(last["codes"]) == {0}
        assert of["samples"] == found["unbroken"]["samples"], name
        seen = [sample for step in of["samples"] for sample in step]
        assert (
            len(seen) == len(of["losses"]) * BATCH
        )  # pass after pass, without a short last step
        counts = Counter(seen).values()
        assert (len(counts), max(counts) - min(counts)) == (SAMPLES, 1), name
    assert found["fixed"]["losses"] == found["unbroken"]["losses"], (
        "bit-equal on as many workers"
    )
    assert found["moved"]["losses"] == pytest.approx(
        found["unbroken"]["losses"], rel=1e-12
    )
    assert len(found["moved"]["losses"]) == EPOCHS * STEPS_PER_EPOCH
