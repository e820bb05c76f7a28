"""The device of a worker on a machine without an accelerator: its flags,
figures and seeds.
"""

import mmap
import random

import numpy as np
import pytest
import torch

from trainers.devices.device import (
    peak_memory_bytes,
    reset_peak_memory,
    resolve_device,
    seed_all,
    set_flags,
    synchronize,
    total_memory_bytes,
)
from trainers.errors import ConfigError
from trainers.versions import environment

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def flags_come_back():
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.deterministic = False


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without CUDA"
)
def test_without_an_accelerator():
    assert resolve_device("auto").type in ("cpu", "mps")
    with pytest.raises(ConfigError) as raised:
        resolve_device("cuda")
    assert str(raised.value).startswith('`device: "cuda"` is not available')
    assert "device: auto" in str(raised.value)


def test_flags_are_set_whatever_they_were(caplog):
    torch.set_default_dtype(torch.float64)
    set_flags(CPU, threads=2, deterministic=True)
    assert "default dtype is set back" in caplog.text
    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert torch.get_default_dtype() is torch.float32
    set_flags(CPU, threads=1, deterministic=False)
    assert torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark


def test_memory_figures_are_of_this_process():
    reset_peak_memory(CPU)
    before = peak_memory_bytes(CPU)
    block = mmap.mmap(
        -1, 50_000_000
    )  # pages that no earlier test's freed memory can stand in for
    block.write(b"1" * 50_000_000)
    after = peak_memory_bytes(CPU)
    assert 10_000_000 < before < total_memory_bytes(CPU)
    assert after >= before + 40_000_000
    del block
    synchronize(CPU)


def test_the_environment_says_what_a_figure_depends_on():
    report = environment(CPU)
    assert {
        "python",
        "platform",
        "cpus",
        "torch",
        "ray",
        "pyarrow",
        "device",
    } <= set(report)
    assert report["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert all(isinstance(value, str) for value in report.values())


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        torch.rand(3).tolist(),
        float(
            np.random.randn()
        ),  # an odd number of these: numpy keeps the second of a pair
    )


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**32 + 5, 2**63 - 1])
def test_any_seed_seeds_all_three(seed):
    seed_all(seed)
    first = draw()
    draw()
    seed_all(seed)
    assert draw() == first
    seed_all(seed + 1 if seed < 2**63 - 1 else 0)
    other = draw()
    assert all(
        value != before for value, before in zip(other, first, strict=True)
    )
