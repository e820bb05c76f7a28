"""Whole steps as CUDA graphs: the curve of the steps that are not captured, to
the last bit, from one launch.
"""

import pytest
import torch

from tests.gpu.runs import CUDA, Images, make, stepper, train
from tests.specs import curve
from tests.tasks import Blobs
from trainers.step import cuda_graphs as graphs

pytestmark = pytest.mark.gpu

# 123 samples in steps of 24: five of them and a short one of 3 an epoch; the
# rate changes with every step.
OPTIONS = {
    "cuda_graphs": True,
    "deterministic": True,
    "max_steps": 40,
    "clip_grad_norm": 1.0,
}


class Uncaptured(graphs.CudaCapture):
    """The same steps on the same stream with the same learning rate, launched
    one kernel at a time.
    """

    def record(self, work):
        return lambda: self.run(work)


@pytest.fixture
def replays(monkeypatch):
    """One entry for every graph that was replayed to train, not to prove it."""
    seen = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(self):
        seen.append(1)
        replay(self)

    take_pass = graphs.take_pass

    def proved(*args):
        before = len(seen)
        found = take_pass(*args)
        del seen[before:]
        return found

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    monkeypatch.setattr(graphs, "take_pass", proved)
    return seen


WAYS = {
    "adamw": {},
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.02, "momentum": 0.9}},
    "adam, accumulated": {
        "optimizer": {"name": "adam", "lr": 0.01},
        "microbatch_size": 7,
    },
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "bf16-pure": {"precision": "bf16-pure", "optimizer__eps": 1e-4},
    "tf32, loader processes": {"precision": "tf32", "data__num_workers": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_captured_steps_have_the_curve_of_the_same_steps_uncaptured(
    way, replays, tmp_path, monkeypatch
):
    """Dropout, BatchNorm and a random transform among them: random numbers go
    on as if nothing was captured.
    """
    options = OPTIONS | WAYS[way]
    captured = train(
        CUDA, tmp_path / "captured", Images(samples=123), **options
    )
    # 7 epochs begin in 40 steps: the last short step is the 36th, and three
    # full ones are the warm-up.
    assert len(replays) == 40 - 6 - 3
    monkeypatch.setattr(graphs, "CudaCapture", Uncaptured)
    uncaptured = train(
        CUDA, tmp_path / "uncaptured", Images(samples=123), **options
    )
    assert len(replays) == 40 - 6 - 3
    assert len(curve(tmp_path / "captured")) == 40
    assert curve(tmp_path / "captured") == curve(tmp_path / "uncaptured")
    assert captured.metrics["val_loss"] == uncaptured.metrics["val_loss"]


def test_each_size_of_a_schedule_is_captured(replays, tmp_path, monkeypatch):
    sizes = [{"until_samples": 300, "size": 24}, {"size": 30}]
    options = OPTIONS | {
        "global_batch_size": None,
        "batch_schedule": sizes,
        "max_steps": 30,
    }
    train(CUDA, tmp_path / "captured", Images(samples=123), **options)
    # Of 12 full steps of 24 and 12 of 30 the first three each are the warm-up;
    # six steps are short.
    assert len(replays) == 12 - 3 + 12 - 3
    monkeypatch.setattr(graphs, "CudaCapture", Uncaptured)
    train(CUDA, tmp_path / "uncaptured", Images(samples=123), **options)
    assert curve(tmp_path / "captured") == curve(tmp_path / "uncaptured")


@pytest.mark.parametrize("way", ["adamw", "sgd", "fp16"])
def test_captured_steps_train_as_plain_ones(way, replays, tmp_path):
    """Close, not equal: the learning rate of a captured step is a float32."""
    options = OPTIONS | WAYS[way]
    train(
        CUDA,
        tmp_path / "captured",
        Images(samples=123, random=False),
        **options,
    )
    assert replays
    train(
        CUDA,
        tmp_path / "plain",
        Images(samples=123, random=False),
        **options | {"cuda_graphs": False},
    )
    assert curve(tmp_path / "captured") == pytest.approx(
        curve(tmp_path / "plain"), rel=2e-2
    )


def test_a_captured_run_that_was_stopped_goes_on_as_if_it_was_not(
    replays, tmp_path
):
    options = OPTIONS | {"checkpoint__every_steps": 10}
    train(CUDA, tmp_path / "whole", Images(samples=123), **options)
    unbroken = len(replays)
    assert (
        train(
            CUDA, tmp_path / "cut", Images(samples=123), looks=2, **options
        ).status
        == "stopped"
    )
    assert (
        train(CUDA, tmp_path / "cut", Images(samples=123), **options).status
        == "done"
    )
    assert unbroken < len(replays) < 2 * unbroken  # it warms up anew
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


def test_a_compiled_model_is_captured(replays, tmp_path):
    pytest.importorskip("triton")
    options = OPTIONS | {"deterministic": False, "max_steps": 16}
    train(CUDA, tmp_path / "eager", Blobs(), **options)
    before = len(replays)
    train(CUDA, tmp_path / "compiled", Blobs(), compile="default", **options)
    assert len(replays) == 2 * before > 0
    assert curve(tmp_path / "compiled") == pytest.approx(
        curve(tmp_path / "eager"), rel=1e-2
    )


def test_a_gradient_that_is_not_finite_is_seen_in_a_replay():
    parts, config = make(CUDA, Blobs(samples=24 * 12), cuda_graphs=True)
    step = stepper(parts, config, 12)
    for _ in range(8):
        step()
    assert not bool(parts.step.bad)
    weights = [
        parameter.detach().clone() for parameter in parts.model.parameters()
    ]
    batch = next(
        iter(parts.train_feed.batches([torch.arange(24)], training=True))
    )
    parts.step(
        iter([(batch[0] * float("nan"), batch[1])]), [24], 24, idle=False
    )
    step()
    assert bool(parts.step.bad)
    assert all(
        torch.equal(ours, kept)
        for ours, kept in zip(parts.model.parameters(), weights, strict=True)
    )
    parts.close()
