"""What needs a CUDA device: each test says at the end whether it was executed, and on which GPU, or skipped.

Run as: python -m pytest tests/gpu, on a machine with torch, pydantic, PyYAML and pyarrow; Ray is not needed.
"""

import gc
import multiprocessing
import os
from collections.abc import Iterator

import pytest
import torch

# cuBLAS reads it once, at its first call: deterministic runs need it then.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of the GPU is skipped where there is none; the same test on a CPU runs anywhere."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") and "tests/gpu/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a test: executed or not, and where."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    lines = []
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.getreports(outcome):
            if "tests/gpu/" not in report.nodeid or (report.when != "call" and outcome == "passed"):
                continue
            name = report.nodeid.split("tests/gpu/")[-1]
            if outcome == "skipped":
                reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
                lines.append(f"skipped: {reason.removeprefix('Skipped: ')}: {name}")
            else:
                where = "the CPU" if "cpu" in name.partition("[")[2].strip("]").split("-") else gpu
                lines.append(f"executed on {where}: {name}: {outcome}")
    if lines:
        terminalreporter.section("where the GPU tests ran")
        for line in sorted(lines):
            terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """The suite's own, for a machine that has no more than torch: loader processes are all that is started here."""
    yield
    assert not multiprocessing.active_children()


@pytest.fixture(autouse=True)
def switches_come_back() -> Iterator[None]:
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


CPU_AND_GPU = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=CPU_AND_GPU)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Both: the same test body on the CPU, where it can be tried anywhere, and on the GPU."""
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")
