"""What needs a CUDA device: each test says at the end whether it was executed,
and on which GPU, or skipped.

Run as: python -m pytest tests/gpu, on a machine with torch, pydantic, PyYAML
and pyarrow; Ray is not needed. Without a GPU: python -m tests.fake_cuda -m
pytest tests/gpu
"""

import gc
import multiprocessing
import os

import pytest
import torch

from tests import fake_cuda

# cuBLAS reads it once, at its first call: deterministic runs need it then.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


if fake_cuda.IS_ON:
    fake_cuda.compile_without_kernels()


def pytest_collection_modifyitems(items):
    """A test of the GPU is skipped where there is none; the same test on a CPU
    runs anywhere.
    """
    for item in items:
        if (
            not item.get_closest_marker("gpu")
            or "tests/gpu/" not in item.nodeid
        ):
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif (
            fake_cuda.IS_ON
            and (real := item.get_closest_marker("real_gpu")) is not None
        ):
            item.add_marker(
                pytest.mark.skip(
                    reason=f"not on the fake CUDA: {fake_cuda.CANNOT[real.args[0]]}"
                )
            )


def pytest_terminal_summary(terminalreporter):
    """One line a test: executed or not, and where."""
    gpu = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    )
    if fake_cuda.IS_ON:
        gpu = "the fake CUDA"
    lines = []
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.getreports(outcome):
            if "tests/gpu/" not in report.nodeid or (
                report.when != "call" and outcome == "passed"
            ):
                continue
            name = report.nodeid.split("tests/gpu/")[-1]
            if outcome == "skipped":
                reason = (
                    report.longrepr[2]
                    if isinstance(report.longrepr, tuple)
                    else str(report.longrepr)
                )
                lines.append(
                    f"skipped: {reason.removeprefix('Skipped: ')}: {name}"
                )
            else:
                where = (
                    "the CPU"
                    if "cpu" in name.partition("[")[2].strip("]").split("-")
                    else gpu
                )
                lines.append(f"executed on {where}: {name}: {outcome}")
    if lines:
        terminalreporter.section("where the GPU tests ran")
        for line in sorted(lines):
            terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind():
    """The suite's own, for a machine that has no more than torch: loader
    processes are all that is started here.
    """
    yield
    assert not multiprocessing.active_children()


@pytest.fixture(autouse=True)
def switches_come_back():
    """What a test has set for the whole process, and the memory that it has left."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


CPU_AND_GPU = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=CPU_AND_GPU)
def device(request):
    """Both: the same test body on the CPU, where it can be tried anywhere, and
    on the GPU.
    """
    return (
        torch.device("cuda", 0)
        if request.param == "cuda"
        else torch.device("cpu")
    )
