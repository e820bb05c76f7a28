"""Whole runs: bit-equal repeats and resumes with `deterministic`, compiled
models, and what a run says of its GPU.
"""

import pytest
import torch
from torch import nn

from tests.gpu.runs import CUDA, Images, train
from tests.specs import curve
from tests.tasks import Blobs

OPTIONS = {"deterministic": True, "checkpoint__every_steps": 10}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_deterministic_runs_repeat_to_the_last_bit(
    precision, device, tmp_path
):
    """Dropout and a random transform on the device among them; another seed is
    another run.
    """
    for name, seed in (("one", 1), ("two", 1), ("other", 2)):
        train(
            device,
            tmp_path / name,
            Images(),
            precision=precision,
            seed=seed,
            **OPTIONS,
        )
    assert len(curve(tmp_path / "one")) == 30
    assert curve(tmp_path / "one") == curve(tmp_path / "two")
    assert curve(tmp_path / "one") != curve(tmp_path / "other")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "fp16"},
        {"data__num_workers": 2},
        {"checkpoint__async": True},
        {"microbatch_size": 7},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_a_resumed_run_is_the_unbroken_one(options, device, tmp_path):
    """The device's random state among what is kept: dropout goes on where it was."""
    chosen = OPTIONS | options
    whole = train(device, tmp_path / "whole", Images(), **chosen)
    assert (
        train(device, tmp_path / "cut", Images(), looks=1, **chosen).status
        == "stopped"
    )
    assert (
        train(device, tmp_path / "cut", Images(), looks=1, **chosen).status
        == "stopped"
    )
    resumed = train(device, tmp_path / "cut", Images(), **chosen)
    assert resumed.status == "done"
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    assert resumed.metrics == whole.metrics


class Attention(Blobs):
    """A convolution and a batched product: kernels whose TF32 switch
    torch.compile reads.
    """

    def model(self):
        return _Attention(self.features)


class _Attention(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.mix = nn.Conv1d(1, 16, 3, padding=1)
        self.head = nn.Linear(16 * features, 4)

    def forward(self, inputs):
        rows = self.mix(inputs.unsqueeze(1)).transpose(1, 2)
        weights = torch.bmm(rows, rows.transpose(1, 2)).softmax(-1)
        return self.head(torch.bmm(weights, rows).flatten(1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "precision"),
    [
        ("default", "fp32"),
        ("default", "tf32"),
        ("default", "bf16"),
        ("reduce-overhead", "bf16"),
        ("max-autotune", "tf32"),
    ],
)
def test_a_compiled_model_trains_the_same(mode, precision, tmp_path):
    pytest.importorskip("triton")
    options = {
        "precision": precision,
        "max_steps": 18,
    }  # with short steps: a second shape
    train(CUDA, tmp_path / "eager", Attention(), **options)
    torch._dynamo.reset()
    compiled = train(
        CUDA, tmp_path / "compiled", Attention(), compile=mode, **options
    )
    assert compiled.status == "done"
    tolerance = {"fp32": 1e-2, "tf32": 8e-2, "bf16": 0.15}[precision]
    assert curve(tmp_path / "compiled") == pytest.approx(
        curve(tmp_path / "eager"), rel=tolerance
    )


@pytest.mark.gpu
def test_the_gpu_trains_as_the_cpu_does(tmp_path):
    for name, device in (("gpu", CUDA), ("cpu", torch.device("cpu"))):
        train(
            device,
            tmp_path / name,
            Images(random=False),
            max_steps=10,
            deterministic=True,
        )
    assert curve(tmp_path / "gpu") == pytest.approx(
        curve(tmp_path / "cpu"), rel=2e-2
    )


@pytest.mark.gpu
def test_a_run_goes_on_on_another_device(tmp_path):
    """A checkpoint of the GPU on the CPU, and back."""
    task = Images(random=False)
    options = OPTIONS | {"max_steps": 30}
    cpu = torch.device("cpu")
    train(cpu, tmp_path / "whole", task, **options)
    assert (
        train(CUDA, tmp_path / "cut", task, looks=1, **options).status
        == "stopped"
    )
    assert (
        train(cpu, tmp_path / "cut", task, looks=1, **options).status
        == "stopped"
    )
    assert train(CUDA, tmp_path / "cut", task, **options).status == "done"
    assert curve(tmp_path / "cut") == pytest.approx(
        curve(tmp_path / "whole"), rel=5e-2
    )
