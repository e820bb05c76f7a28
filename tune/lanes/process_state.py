"""The state of a lane's process: restored after each trial, and checked to be as before the first.

A Baseline is taken before the first trial. `restore` undoes what can be undone and returns what cannot (a thread that
still runs and is not known to be harmless, a replaced module, device memory above the floor): then the process must not
be used again. Modules beside the task are forgotten, so that each trial imports them anew. What a run sets itself
(seeds, threads, precision) is restored as well, since a task's module and its constructor run before that.
"""

import contextlib
import gc
import logging
import multiprocessing
import operator
import os
import signal
import sys
import sysconfig
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import thread as futures
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # every optimizer imports it
import torch.distributed as dist
from torch.nn.modules import module as hooks

import trainers.loop.fit  # noqa: F401 (all that a run imports belongs to the baseline)
from trainers.devices.rng import get_rng_state, set_rng_state
from trainers.step.cuda_graphs import capture_failed

_THREAD_GRACE_S = 0.5
_MEMORY_TOLERANCE_BYTES = 2**20
_OWN_PACKAGES = ("trainers", "cluster", "tune")
_LOGGERS = ("", "trainers", "cluster", "tune", "ray", "ray.train")
_WATCHED = (
    *("builtins", "copy", "functools", "itertools", "json", "math", "os", "random", "time", "numpy", "numpy.random"),
    *("torch", "torch.amp", "torch.autograd", "torch.cuda", "torch.distributed", "torch.linalg", "torch.utils.data"),
    *("torch.nn", "torch.nn.functional", "torch.nn.init", "torch.optim", "torch.optim.lr_scheduler"),
)
_METHODS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(type, property, staticmethod, classmethod, types.MethodType),
)
_HARMLESS = {
    "tqdm": "redraws progress bars, one for the process (so does `datasets`, through it)",
    "wandb": "sends what was logged, and the state of its run",
    "mlflow": "sends what was logged, and the machine's figures",
    "comet_ml": "sends what was logged",
    "neptune": "sends what was logged",
    "clearml": "sends what was logged",
    "trackio": "sends what was logged",
    "sentry_sdk": "sends the crashes of the libraries above",
    "tensorboard": "writes events to their file",
    "tensorboardX": "writes events to their file",
    "matplotlib": "says, after five seconds, that fonts are being looked for",
    "huggingface_hub": "shows and commits uploads",
    "torch._inductor": "collects compilations from their processes, which serve the next trial too",
}
"""Packages whose threads may outlive a trial, and what these do: nothing that a trial computes with."""
Setting = tuple[str, Callable[[], Any], Callable[[Any], Any]]


def _attribute(owner: Any, name: str, label: str = "") -> Setting:
    label = label or f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
    return label, partial(getattr, owner, name), partial(setattr, owner, name)


def _contents(label: str, mapping: Any) -> Setting:
    """A list or dict to which others refer: its contents are restored in place."""

    def write(value: Any) -> None:
        mapping.clear()
        (mapping.extend if isinstance(mapping, list) else mapping.update)(value)

    return label, lambda: type(mapping)(mapping), write


def _settings() -> Iterator[Setting]:
    """Label, reader and writer of everything that has a value, in the order in which it must be restored."""
    yield from _torch_settings()
    for owner in (hooks, sys.modules["torch.optim.optimizer"]):  # torch.optim hides the module
        for name in sorted(key for key in vars(owner) if key.startswith("_global_")):
            value = getattr(owner, name)
            yield _contents(name, value) if isinstance(value, dict) else _attribute(owner, name)
    yield "numpy's errors", np.geterr, lambda value: np.seterr(**value)
    yield "environment variables", lambda: dict(os.environ), _set_environment
    yield "working directory", Path.cwd, os.chdir
    yield _contents("sys.path", sys.path)
    for name in ("stdout", "stderr", "excepthook"):
        yield _attribute(sys, name)
    for number in signal.valid_signals():
        yield f"handler of signal {number}", partial(signal.getsignal, number), partial(signal.signal, number)
    yield "recursion limit", sys.getrecursionlimit, sys.setrecursionlimit
    yield "garbage collector", gc.isenabled, lambda value: gc.enable() if value else gc.disable()
    yield "stack size of threads", threading.stack_size, threading.stack_size
    yield _contents("warning filters", warnings.filters)
    yield _attribute(warnings, "showwarning")
    yield _attribute(logging.root.manager, "disable", "logging.disable")
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        yield f"level of logger {name or 'root'}", partial(getattr, logger, "level"), logger.setLevel
        yield _contents(f"handlers of logger {name or 'root'}", logger.handlers)
        yield _attribute(logger, "propagate")
        yield _attribute(logger, "disabled")


def _torch_settings() -> Iterator[Setting]:
    core: Any = torch._C
    backends: Any = torch.backends
    stack: Any = torch.overrides
    yield "default device", stack._len_torch_function_stack, lambda count: torch.set_default_device(None)
    yield "default dtype", torch.get_default_dtype, torch.set_default_dtype
    yield "threads", torch.get_num_threads, torch.set_num_threads
    yield "threads between operations", torch.get_num_interop_threads, torch.set_num_interop_threads
    yield (
        "deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    yield "gradients", torch.is_grad_enabled, torch.set_grad_enabled
    yield (
        "anomaly detection",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    )
    for kind in ("cpu", "cuda"):
        enabled = (partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind))
        dtype = (partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind))
        yield f"autocast enabled ({kind})", *enabled
        yield f"autocast dtype ({kind})", *dtype
    yield "autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    yield "fp32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield "TF32 in cuDNN", core._get_cudnn_allow_tf32, core._set_cudnn_allow_tf32
    mkldnn = [("mkldnn", operation) for operation in ("all", "matmul", "conv", "rnn")]
    cuda = [("cuda", operation) for operation in ("all", "matmul", "conv", "rnn")]
    for key in (("generic", "all"), *cuda, *mkldnn):
        read, write = partial(core._get_fp32_precision_getter, *key), partial(core._set_fp32_precision_setter, *key)
        yield f"fp32 precision ({' '.join(key)})", read, write
    for name in ("enabled", "benchmark", "deterministic", "benchmark_limit"):
        yield _attribute(backends.cudnn, name, f"cuDNN {name}")
    for name in ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction", "fp16_accumulation"):
        yield _attribute(backends.cuda.matmul, f"allow_{name}", f"allow_{name}")
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        read, write = getattr(backends.cuda, f"{name}_sdp_enabled"), getattr(backends.cuda, f"enable_{name}_sdp")
        yield f"{name} attention", read, write
    yield _attribute(torch._dynamo.config, "recompile_limit", "graphs of one function")
    yield "oneDNN", core._get_mkldnn_enabled, core._set_mkldnn_enabled


def _set_environment(wanted: dict[str, str]) -> None:
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})


class Baseline:
    """The state of a process before its first trial; every rank of a lane has its own."""

    def __init__(self, device: torch.device, path: Sequence[str]) -> None:
        """`path`: the directories of the task, whose modules are imported anew by each trial."""
        self._device, self._path = device, tuple(f"{Path(directory)}{os.sep}" for directory in path)
        self._settings = [(name, read, write, read()) for name, read, write in _settings()]
        self._random = get_rng_state(device)
        self._modules = dict(sys.modules)
        self._owners = [(owner, _methods(owner), len(vars(owner))) for owner in _owners()]
        self._threads = set(threading.enumerate())
        self._group = dist.group.WORLD if dist.is_initialized() else None
        self._frozen = 0
        self._collect()
        self._floor_bytes = self._memory_bytes()

    def restore(self) -> list[str]:
        """Restore everything; returns what could not be, in words."""
        replaced = self._restore_modules()
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        torch._dynamo.reset()
        for _, read, write, value in self._settings:
            if read() != value:
                with contextlib.suppress(Exception):  # `_remains` reports it
                    write(value)
        torch.set_flush_denormal(False)
        exchanged = [entry for entry in self._owners if _changed(*entry)]
        for entry in exchanged:
            _restore_methods(*entry)
        set_rng_state(self._random, self._device)
        self._collect()
        for entry in exchanged:
            replaced += [f"{entry[0].__name__}.{name} is another" for name in _changed(*entry)]
        return [*replaced, *self._remains()]

    def _remains(self) -> Iterator[str]:
        """What is still not as it was."""
        for name, read, _, value in self._settings:
            if (now := read()) != value:
                yield f"{name}: {now!s:.80} in place of {value!s:.80}"
        if (dist.group.WORLD if dist.is_initialized() else None) is not self._group:
            yield "the process group is another"
        if capture_failed():
            yield "a capture of CUDA graphs that failed, and what torch has not put back after it"
        memory_bytes = self._memory_bytes()
        if memory_bytes > self._floor_bytes + _MEMORY_TOLERANCE_BYTES:
            yield f"{(memory_bytes - self._floor_bytes) / 2**20:.1f} MiB of the device's memory are still held"
        if leaked := self._leaked_threads():
            yield f"still running: thread {', '.join(sorted(thread.name for thread in leaked))}"

    def _collect(self) -> None:
        gc.collect()
        if len(sys.modules) != self._frozen:
            gc.freeze()  # what was imported stays: later collections look only at what trials make
            self._frozen = len(sys.modules)

    def _restore_modules(self) -> list[str]:
        """Forget the task's modules; returns those replaced: they are restored, but others may refer to the new."""
        replaced = [name for name, module in self._modules.items() if sys.modules.get(name) is not module]
        for name in replaced:
            sys.modules[name] = self._modules[name]
        for name, module in list(sys.modules.items()):
            if name not in self._modules and self._is_of_task(name, module):
                del sys.modules[name]
        return [f"the module {name} was replaced" for name in replaced]

    def _is_of_task(self, name: str, module: Any) -> bool:
        file = getattr(module, "__file__", None)
        if not file or name.partition(".")[0] in _OWN_PACKAGES:
            return False
        # A module in C may refuse to be imported twice; a virtual environment may lie beside the task.
        return file.endswith(".py") and file.startswith(self._path) and not file.startswith(_INSTALLED)

    def _leaked_threads(self) -> list[threading.Thread]:
        """Threads of a trial that do not end within moments."""
        deadline = time.monotonic() + _THREAD_GRACE_S
        while True:
            new = set(threading.enumerate()) - self._threads
            # Threads that Python did not start (autograd's, once they ran a hook) show up as dummies.
            leaked = [one for one in new if not isinstance(one, threading._DummyThread) and not _is_harmless(one)]
            if not leaked or time.monotonic() > deadline:
                return leaked
            time.sleep(0.005)

    def _memory_bytes(self) -> int:
        """What is allocated on the device once caches are empty; 0 on a CPU."""
        if self._device.type != "cuda":
            return 0
        clear: Any = torch._C
        clear._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(self._device)


def _is_harmless(thread: threading.Thread) -> bool:
    """Whether a thread is a library's that does nothing that a trial computes with; never one of the task's own."""
    is_plain = type(thread).__module__ == "threading"
    code: Any = getattr(thread, "_target", None) or getattr(thread, "function", None) if is_plain else type(thread)
    module, name = getattr(code, "__module__", None) or "", getattr(code, "__qualname__", "")
    if code is futures._worker:  # of a pool: harmless while it only waits for work, whoever's pool it is
        frame = sys._current_frames().get(thread.ident or 0)
        return frame is not None and frame.f_code is futures._worker.__code__
    if thread.name == "fsspecIO" and (module, name) == ("asyncio.base_events", "BaseEventLoop.run_forever"):
        return True  # one for the process (s3fs, gcsfs and aiobotocore run in it); waits for files to be asked for
    return any(module == package or module.startswith(f"{package}.") for package in _HARMLESS)


_INSTALLED = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib", "stdlib"))
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def _owners() -> list[Any]:
    """Modules and classes whose functions a trial must not have exchanged."""
    names = [*_WATCHED, *(name for name in sys.modules if name.startswith("trainers."))]
    modules = [sys.modules[name] for name in names if name in sys.modules]
    classes = {
        value: None
        for module in modules
        for value in list(vars(module).values())
        if issubclass(type(value), type) and value.__module__.partition(".")[0] in ("torch", "trainers")
    }
    return [*modules, *classes]


def _methods(owner: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if issubclass(type(value), _METHODS)}


def _changed(owner: Any, methods: dict[str, Any], size: int) -> list[str]:
    """Names that are not what they were; for a class also those that are new."""
    now = vars(owner)
    is_class = isinstance(owner, type)
    same = all(map(operator.is_, map(now.get, methods), methods.values()))  # nearly always, and 20,000 in all
    if same and (len(now) == size or not is_class):
        return []
    changed = [name for name, value in methods.items() if now.get(name) is not value]
    if is_class:
        changed += [name for name, value in now.items() if name not in methods and type(value) is types.FunctionType]
    return [name for name in changed if not _by_torch(name, now)]


def _by_torch(name: str, now: Any) -> bool:
    """Whether torch itself has wrapped its own function, as it does with an optimizer's `step`."""
    value = now.get(name)
    code = getattr(value, "__code__", None)
    return code is not None and value.__name__ == name and code.co_filename.startswith(_TORCH)


def _restore_methods(owner: Any, methods: dict[str, Any], size: int) -> None:
    for name in _changed(owner, methods, size):
        with contextlib.suppress(AttributeError, TypeError):
            if name in methods:
                setattr(owner, name, methods[name])
            else:
                delattr(owner, name)
