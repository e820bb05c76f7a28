"""What a run shows of itself: profiled steps, compilation, and memory on out
of memory; CUDA's calls are faked.
"""

import functools
import gzip
import json
import logging
import shutil

import pytest
import torch
from torch import nn

from tests.specs import curve, kept_result
from tests.tasks import Blobs
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.errors import TooLargeError
from trainers.launch.local import LocalContext
from trainers.loop.fit import fit
from trainers.measure import profiler
from trainers.measure.clock import WARMUP_STEPS
from trainers.measure.profiler import memory_watched, save_memory_report
from trainers.model.strategy import compile_model
from trainers.storage import Storage

GPU = torch.device("cuda", 1)
OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def config(**changes):
    tree = {
        "task": "tests.tasks:Blobs",
        "max_steps": 20,
        "global_batch_size": 29,  # 203 samples: no shorter step
        "log_every_steps": 1,
        "optimizer": {"name": "adamw", "lr": 0.01},
        "evaluate": {"every_steps": 99},
        "checkpoint": {"every_steps": 99},
        "device": "cpu",
    }
    return build(TrainConfig, tree | changes, "test")


def train(path, task=None, **changes):
    return fit(
        task or Blobs(),
        config(**changes),
        LocalContext(Storage(path) if path else None, "local"),
    )


def profiled_steps(path):
    with gzip.open(path / "profile" / "trace.json.gz", "rt") as stream:
        events = json.load(stream)["traceEvents"]
    return {
        event["name"]
        for event in events
        if str(event.get("name")).startswith("ProfilerStep")
    }


@pytest.fixture
def log(caplog):
    with caplog.at_level(logging.INFO, logger="trainers"):
        yield caplog


def test_the_steps_after_warm_up_are_recorded_and_left_out(tmp_path, log):
    result = train(tmp_path / "profiled", profile_steps=3)
    plain = train(tmp_path / "plain")

    first = WARMUP_STEPS + 1
    assert profiled_steps(tmp_path / "profiled") == {
        f"ProfilerStep#{first + index}" for index in range(3)
    }
    assert result.throughput.steps == 20 - WARMUP_STEPS - 1 - 3
    assert plain.throughput.steps == 20 - WARMUP_STEPS
    assert curve(tmp_path / "profiled") == curve(tmp_path / "plain")
    assert not (tmp_path / "plain" / "profile").exists()
    table = next(line for line in log.messages if "profile of 3 steps" in line)
    assert "aten::addmm" in table
    assert "Self CPU" in table


def test_a_run_that_ends_inside_the_window_keeps_what_there_is(tmp_path, log):
    train(tmp_path, profile_steps=50, max_steps=WARMUP_STEPS + 1 + 2)
    assert "profile of 2 steps" in log.text
    assert len(profiled_steps(tmp_path)) >= 2


def test_a_failure_inside_the_window_leaves_no_profiler_running(tmp_path):
    with pytest.raises(ValueError, match="injected"):
        train(tmp_path, Blobs(fail_at=WARMUP_STEPS + 1 + 3), profile_steps=50)
    assert not torch.autograd._profiler_enabled()
    train(tmp_path / "next", profile_steps=2)
    assert len(profiled_steps(tmp_path / "next")) == 2


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path, log):
    (tmp_path / "profile").write_text("in the way")
    assert train(tmp_path, profile_steps=2).status == "done"
    assert "the profile is lost: could not write" in log.text


@pytest.fixture
def cuda(monkeypatch):
    """CUDA's memory calls, where there is no device."""
    monkeypatch.setattr(
        torch.cuda, "memory_summary", lambda device: f"|summary of {device}|"
    )
    monkeypatch.setattr(profiler, "resolve_device", lambda name, index: GPU)


@pytest.mark.parametrize(
    ("error", "device"),
    [
        (ValueError("no"), GPU),
        (MemoryError(), GPU),
        (OOM, torch.device("cpu")),
    ],
)
def test_nothing_else_is_reported(error, device, cuda, tmp_path):
    save_memory_report(error, device, Storage(tmp_path), 0)
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize(
    "error", [OOM, TooLargeError(64, "CUDA out of memory")]
)
def test_a_run_that_ends_out_of_memory_leaves_a_report(
    error, cuda, tmp_path, log
):
    context = LocalContext(Storage(tmp_path), "local")
    with pytest.raises(type(error)), memory_watched(config(), context):
        raise error
    memory = tmp_path / "memory"
    assert (memory / "rank-0-summary.txt").read_text() == "|summary of cuda:1|"
    assert f"{memory}/rank-0-summary.txt" in log.text


class Broken(nn.Sequential):
    """Its graph breaks once."""

    def forward(self, inputs):
        hidden = self[0](inputs)
        torch._dynamo.graph_break()
        return self[1](hidden)


class BreakingBlobs(Blobs):
    def model(self):
        return Broken(nn.Linear(self.features, 8), nn.Linear(8, 4))


class FlatBlobs(Blobs):
    def model(self):
        return nn.Linear(self.features, 4)


@pytest.fixture
def dynamo(monkeypatch):
    """Graphs are traced and guarded as they always are, and then run as they
    are: no compiler, in a second.
    """
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager")
    )
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_training_and_evaluation_are_one_graph_each(tmp_path, dynamo):
    result = train(tmp_path, compile="default")
    assert result.compile == {"graphs": 2}
    assert result.throughput is not None
    assert result.first_step_s is not None


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    ],
)
def test_a_model_of_torchs_own_class_is_one_graph(model, dynamo):
    """By itself torch 2.11 leaves such a module eager, and says nothing."""
    compile_model(model, "default", fullgraph=True)
    watch = profiler.CompileWatch()
    model(torch.ones(4, 8, 8)).sum().backward()
    assert watch.graphs() == 1


@pytest.mark.full
@pytest.mark.skipif(
    shutil.which("g++") is None,
    reason="torch.compile needs a C++ compiler on a CPU",
)
def test_so_they_are_where_code_is_generated(tmp_path):
    """Of a model that needs one kernel: how many are compiled is torch's."""
    from torch._inductor import config as inductor

    torch._dynamo.reset()
    with inductor.patch(
        {"compile_threads": 1, "cpp_cache_precompile_headers": False}
    ):
        result = train(tmp_path, FlatBlobs(), compile="default")
    assert result.compile == {"graphs": 2}
    torch._dynamo.reset()


def test_a_broken_graph_is_two(tmp_path, dynamo):
    result = train(tmp_path, BreakingBlobs(), compile="default")
    assert result.compile["graphs"] >= 2
    stored = kept_result(tmp_path)
    assert stored.compile == result.compile
    assert stored.first_step_s == result.first_step_s


@pytest.mark.full
def test_a_step_that_compiles_again_is_no_measure_of_speed(tmp_path, dynamo):
    # The ninth step of an epoch is another shape.
    late = train(
        tmp_path / "late",
        compile="default",
        global_batch_size=24,
        max_steps=18,
    )  # 203 = 8 x 24 + 11
    assert late.throughput.steps == 18 - WARMUP_STEPS - 1
