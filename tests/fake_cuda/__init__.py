"""A CUDA that needs no GPU: torch's real CUDA build, with runtime and kernels on the CPU.

Run as: python -m tests.fake_cuda -m pytest tests/gpu      (any arguments of Python;
builds the libraries first: g++)

torch then sees one H100 whose memory is host memory. Allocator, limits, streams,
events, captures with what they refuse, replays, Philox offsets, mixed devices and the
sync debug mode are torch's own code:

    runtime.cpp    libcudart and libcuda, preloaded: memory, streams, events, captures
    absent.cpp     what they cannot do
    kernels.cpp    torch's CUDA operators, computed by its CPU kernels on the same bytes
    graph.h        a captured graph: the calls that a launch makes again

A kernel of CUDA that nothing computes is an error. What else cannot be seen here is
CANNOT, and a test that needs it is marked `real_gpu`.
"""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

SOURCES = Path(__file__).parent
BUILT = SOURCES.parents[1] / "build"
RUNTIME = "libfake_cuda.so"
KERNELS = "libfake_kernels.so"

IS_ON = RUNTIME in os.environ.get("LD_PRELOAD", "")
"""Whether this process runs on it."""

CANNOT = {
    "arithmetic": "the CPU computes in float32 what a GPU does in TF32 or float8",
    "speed": "a benchmark of it is one of the CPU, and takes minutes",
    "profiler": "no kernel runs that Kineto could record",
    "nccl": "NCCL needs the real driver",
    "nvml": "there is no NVML",
}
"""What only a GPU shows, by the word that `pytest.mark.real_gpu` names."""


class NotBuiltError(Exception):
    """The libraries cannot be built here; the message is one sentence."""


def environment(folder: Path) -> dict[str, str]:
    """Variables of a process that runs on the libraries of `folder`."""
    preloaded = str(folder / RUNTIME)
    return {
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": preloaded,
        "OMP_NUM_THREADS": "1",
    }


def build() -> Path:
    """Build the libraries for this Python's torch where they are missing or
    older than their sources.

    Returns the folder that has them. Raises NotBuiltError without g++ or
    torch's CUDA headers.
    """
    folder = BUILT / f"fake-cuda-{version('torch')}"
    newest = max(source.stat().st_mtime for source in SOURCES.iterdir())
    libraries = [folder / RUNTIME, folder / KERNELS]
    if all(
        library.exists() and library.stat().st_mtime > newest
        for library in libraries
    ):
        return folder
    if shutil.which("g++") is None:
        raise NotBuiltError("the fake CUDA needs g++: apt-get install g++")
    folder.mkdir(parents=True, exist_ok=True)
    headers = [f"-isystem{path}" for path in _cuda_headers()]
    _compile(folder / RUNTIME, "runtime.cpp", "absent.cpp", *headers)
    for name in (
        "libcuda.so.1",
        "libnvidia-ml.so.1",
    ):  # torch loads them by these names
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(RUNTIME)
    torch = _torch()
    found_in = [f"-isystem{torch / 'include'}", f"-L{torch / 'lib'}"]
    linked = [
        f"-l{name}" for name in ("torch_cpu", "torch_cuda", "c10", "c10_cuda")
    ]
    _compile(folder / KERNELS, "kernels.cpp", *headers, *found_in, *linked)
    return folder


def _compile(library: Path, *arguments: str) -> None:
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        "-Wall",
        "-Wextra",
        "-o",
        str(library),
        *arguments,
    ]
    subprocess.run(command, cwd=SOURCES, check=True)


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec.origin is not None
    return Path(spec.origin).parent


def _cuda_headers() -> list[Path]:
    """Folders of the CUDA headers that torch's own packages bring; those of
    nvcc (crt/) come with Triton.
    """
    packages = _torch().parent
    toolkits = list(packages.glob("nvidia/cu1[0-9]/include"))
    if not toolkits:
        raise NotBuiltError(
            f"the fake CUDA needs a torch with CUDA 13 and its headers: {version('torch')} has none"
        )
    return [
        toolkits[0],
        toolkits[0] / "cccl",
        packages / "triton" / "backends" / "nvidia" / "include",
    ]


def compile_without_kernels() -> None:
    """Let torch.compile trace, guard and differentiate as ever, and run the
    graphs with eager operators.
    """
    import torch

    def run_eagerly(
        self: object, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]
    ) -> object:
        from torch._dynamo.backends.debugging import (
            aot_eager,
        )  # seconds, for what compiles

        return aot_eager(graph, inputs)

    torch._TorchCompileInductorWrapper.__call__ = run_eagerly


def main(arguments: list[str]) -> NoReturn:
    """Become a Python with `arguments` that runs on the fake CUDA; exit code 2
    where it cannot be built.
    """
    try:
        folder = build()
    except NotBuiltError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    os.execve(  # noqa: S606
        sys.executable,
        [sys.executable, *arguments],
        os.environ | environment(folder),
    )
