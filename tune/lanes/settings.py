"""All that has a value for a whole process, or for its main thread: how it is read, and how it is put back."""

import asyncio
import contextlib
import copyreg
import faulthandler
import gc
import locale
import logging
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch._dynamo  # every optimizer imports it
import torch._functorch.config
import torch._inductor.config
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tune.lanes.snapshots import with_changes

Setting = tuple[str, Callable[[], Any], Callable[[Any], Any]]
_CONFIGS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")
_IN_SYS = (
    *("stdin", "stdout", "stderr", "argv", "excepthook", "unraisablehook", "displayhook", "breakpointhook"),
    *("dont_write_bytecode", "tracebacklimit"),
)
_SIGNALS = sorted(signal.valid_signals())
_LIMITS = {name: getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")}


class Settings:
    """What each setting is, from now on; what an import sets belongs to the import, and stays."""

    def __init__(self) -> None:
        self._entries = list(settings())
        self._kept = self.read()

    def read(self) -> list[Any]:
        """What each is now; words, where there is nothing to read: the working directory was deleted, say."""
        try:
            return [read() for _, read, _ in self._entries]
        except Exception:
            return [_value_of(read) for _, read, _ in self._entries]

    def restore(self) -> list[int]:
        """Put back what has changed; returns which."""
        changed = [index for index, (now, kept) in enumerate(zip(self.read(), self._kept, strict=True)) if now != kept]
        for index in changed:
            with contextlib.suppress(Exception):  # `remains` tells of it
                self._entries[index][2](self._kept[index])
        return changed

    def remains(self, changed: Sequence[int]) -> list[str]:
        """What of these is still not as it was, in words."""
        now = {index: _value_of(self._entries[index][1]) for index in changed}
        return [
            f"{self._entries[index][0]}: {value!s:.80} in place of {self._kept[index]!s:.80}"
            for index, value in now.items()
            if value != self._kept[index]
        ]

    def absorb(self, before: list[Any]) -> None:
        """Take what has changed since `before` (as `read` gave it) for what has been from the first."""
        for index, (then, now) in enumerate(zip(before, self.read(), strict=True)):
            if then != now:
                kept = self._kept[index]
                can_merge = isinstance(now, (dict, list, set)) and type(kept) is type(then) is type(now)
                self._kept[index] = with_changes(kept, then, now) if can_merge else now if kept == then else kept


def _value_of(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:
        return repr(error)


def settings() -> Iterator[Setting]:
    """Label, reader and writer of each, in the order in which they must be restored."""
    yield from _torch_settings()
    yield from _compiler_settings()
    for owner in (hooks, sys.modules["torch.optim.optimizer"]):  # torch.optim hides the module
        for name in sorted(key for key in vars(owner) if key.startswith("_global_")):
            value = getattr(owner, name)
            yield _contents(name, value) if isinstance(value, dict) else _attribute(owner, name)
    yield "numpy's errors", np.geterr, lambda value: np.seterr(**value)
    yield "numpy's print options", np.get_printoptions, lambda value: np.set_printoptions(**value)
    yield from _python_settings()
    yield from _process_settings()
    yield from _logging_settings()


def _attribute(owner: Any, name: str, label: str = "") -> Setting:
    label = label or f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
    return label, partial(getattr, owner, name, None), partial(setattr, owner, name)


def _contents(label: str, mapping: Any) -> Setting:
    """A list or dict to which others refer: its contents are restored in place."""

    def write(value: Any) -> None:
        mapping.clear()
        (mapping.extend if isinstance(mapping, list) else mapping.update)(value)

    return label, lambda: type(mapping)(mapping), write


def _python_settings() -> Iterator[Setting]:
    for name in ("path", "meta_path", "path_hooks", "warnoptions"):
        yield _contents(f"sys.{name}", getattr(sys, name))
    for name in _IN_SYS:
        yield _attribute(sys, name)
    yield "recursion limit", sys.getrecursionlimit, sys.setrecursionlimit
    yield "switch interval of threads", sys.getswitchinterval, sys.setswitchinterval
    yield "trace function", sys.gettrace, sys.settrace
    yield "profile function", sys.getprofile, sys.setprofile
    yield "trace function of threads", threading.gettrace, threading.settrace
    yield "profile function of threads", threading.getprofile, threading.setprofile
    yield _attribute(threading, "excepthook")
    yield "stack size of threads", threading.stack_size, threading.stack_size
    yield "garbage collector", gc.isenabled, lambda value: gc.enable() if value else gc.disable()
    yield "thresholds of the garbage collector", gc.get_threshold, lambda value: gc.set_threshold(*value)
    yield "debug flags of the garbage collector", gc.get_debug, gc.set_debug
    yield _contents("callbacks of the garbage collector", gc.callbacks)
    yield _contents("warning filters", warnings.filters)
    yield _attribute(warnings, "showwarning")
    yield "sharing strategy of tensors", torch.multiprocessing.get_sharing_strategy, _set_sharing_strategy
    asyncio.get_event_loop_policy()  # there is none before somebody asks
    yield _attribute(asyncio.events, "_event_loop_policy", "event loop policy")
    yield _contents("copyreg.dispatch_table", copyreg.dispatch_table)


def _set_sharing_strategy(value: str) -> None:
    torch.multiprocessing.set_sharing_strategy(value)


def _process_settings() -> Iterator[Setting]:
    environment: Any = os.environ
    yield "environment variables", lambda: dict(environment._data), _set_environment
    yield "time zone", lambda: time.tzname, lambda _: time.tzset()  # of the environment, which is back by now
    yield "working directory", os.getcwd, os.chdir
    yield "umask", _umask, os.umask
    yield "locale", partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)
    yield "signal handlers", _signal_handlers, _set_signal_handlers
    yield "blocked signals", partial(signal.pthread_sigmask, signal.SIG_BLOCK, ()), _set_blocked
    for name in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"):
        timer: int = getattr(signal, name)
        yield f"timer {name}", partial(_is_running, timer), partial(_stop_timer, timer)
    yield "faulthandler", faulthandler.is_enabled, lambda on: faulthandler.enable() if on else faulthandler.disable()
    yield "niceness", partial(os.getpriority, os.PRIO_PROCESS, 0), partial(os.setpriority, os.PRIO_PROCESS, 0)
    if hasattr(os, "sched_getaffinity"):
        yield "processors", partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0)
    yield "limits of resources", _limits, _set_limits
    for number, stream in enumerate(("standard input", "standard output", "standard error")):
        yield f"the file of {stream}", partial(_file_of, number), lambda _: None


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _signal_handlers() -> dict[int, Any]:
    """Those that are not the default."""
    found = zip(_SIGNALS, map(signal.getsignal, _SIGNALS), strict=True)
    return {number: handler for number, handler in found if handler is not signal.SIG_DFL}


def _set_signal_handlers(wanted: dict[int, Any]) -> None:
    now = _signal_handlers()
    for number in now.keys() | wanted.keys():
        if now.get(number) is not wanted.get(number):
            signal.signal(number, wanted.get(number, signal.SIG_DFL))


def _limits() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(limit) for name, limit in _LIMITS.items()}


def _set_limits(wanted: dict[str, tuple[int, int]]) -> None:
    for name, value in wanted.items():
        resource.setrlimit(_LIMITS[name], value)


def _set_blocked(value: Any) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, value)


def _is_running(timer: int) -> bool:
    return signal.getitimer(timer) != (0.0, 0.0)


def _stop_timer(timer: int, was_running: bool) -> None:
    if not was_running:
        signal.setitimer(timer, 0)


def _file_of(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _set_environment(wanted: dict[bytes, bytes]) -> None:
    environment: Any = os.environ
    now = dict(environment._data)
    for name in now.keys() - wanted.keys():
        del os.environ[os.fsdecode(name)]
    for name, value in wanted.items():
        if now.get(name) != value:
            os.environ[os.fsdecode(name)] = os.fsdecode(value)


def _logging_settings() -> Iterator[Setting]:
    manager = logging.root.manager
    yield _attribute(manager, "disable", "logging.disable")
    yield _attribute(manager, "loggerClass", "class of loggers")
    yield "factory of log records", logging.getLogRecordFactory, logging.setLogRecordFactory
    yield "what loggers do", _loggers, _set_loggers


_Logger = tuple[int, bool, bool, tuple[Any, ...], tuple[Any, ...]]
_NEW: _Logger = (logging.NOTSET, True, False, (), ())


def _loggers() -> dict[str, _Logger]:
    """Level, propagation, whether disabled, handlers and filters of all loggers that have anything but the default."""
    loggers = {"root": logging.root, **logging.root.manager.loggerDict}
    found = {
        name: (one.level, one.propagate, one.disabled, tuple(one.handlers), tuple(one.filters))
        for name, one in loggers.items()
        if type(one) is not logging.PlaceHolder and isinstance(one, logging.Logger)
    }
    return {name: state for name, state in found.items() if state != _NEW}


def _set_loggers(wanted: dict[str, _Logger]) -> None:
    now = _loggers()
    for name in now.keys() | wanted.keys():
        state = wanted.get(name, _NEW)
        if now.get(name, _NEW) == state:
            continue
        logger = logging.getLogger(name)
        level, logger.propagate, logger.disabled, handlers, filters = state
        logger.setLevel(level)
        logger.handlers[:], logger.filters[:] = handlers, filters


def _torch_settings() -> Iterator[Setting]:
    core: Any = torch._C
    backends: Any = torch.backends
    yield "function modes (the default device is one)", core._len_torch_function_stack, _pop_function_modes
    yield "dispatch modes", core._len_torch_dispatch_stack, _pop_dispatch_modes
    yield "hooks of saved tensors", lambda: core._autograd._top_saved_tensors_default_hooks(True), _pop_saved_hooks
    yield "default dtype", torch.get_default_dtype, torch.set_default_dtype
    yield "threads", torch.get_num_threads, torch.set_num_threads
    yield "threads between operations", torch.get_num_interop_threads, torch.set_num_interop_threads
    yield (
        "deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    yield "filling of new memory", core._get_deterministic_fill_uninitialized_memory, _set_fill
    yield "inference mode", torch.is_inference_mode_enabled, lambda _: None
    yield "gradients", torch.is_grad_enabled, torch.set_grad_enabled
    yield "threads of the backward pass", core._is_multithreading_enabled, core._set_multithreading_enabled
    yield (
        "anomaly detection",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    )
    yield "warnings each time", torch.is_warn_always_enabled, torch.set_warn_always
    options: Any = torch._tensor_str.PRINT_OPTS
    yield "torch's print options", lambda: dict(vars(options)), vars(options).update
    yield "what torch.load may make", lambda: set(torch.serialization.get_safe_globals()), _set_safe_globals
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
    yield "oneDNN", core._get_mkldnn_enabled, core._set_mkldnn_enabled
    for name in ("enabled", "strategy"):
        yield _attribute(backends.opt_einsum, name, f"opt_einsum {name}")
    yield _attribute(backends.quantized, "engine", "engine of quantized operations")
    future: Any = torch.__future__
    for name in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion"):
        yield name, getattr(future, f"get_{name}"), getattr(future, f"set_{name}")


def _pop_function_modes(count: int) -> None:
    """`set_default_device(None)` also forgets which mode it was."""
    core: Any = torch._C
    if core._len_torch_function_stack() > count:
        torch.set_default_device(None)
    while core._len_torch_function_stack() > count:
        core._pop_torch_function_stack()


def _pop_dispatch_modes(count: int) -> None:
    core: Any = torch._C
    for mode in reversed(_get_current_dispatch_mode_stack()[count:]):
        core._pop_torch_dispatch_stack(getattr(mode, "_mode_key", None))


def _pop_saved_hooks(wanted: Any) -> None:
    core: Any = torch._C._autograd
    while (top := core._top_saved_tensors_default_hooks(True)) is not None and top != wanted:
        core._pop_saved_tensors_default_hooks()


def _set_fill(value: bool) -> None:
    core: Any = torch._C
    core._set_deterministic_fill_uninitialized_memory(value)


def _set_safe_globals(value: set[Any]) -> None:
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(list(value))


def _compiler_settings() -> Iterator[Setting]:
    """What was set in the configuration of each part; a list or dict that was changed in place counts as set."""
    for name in _CONFIGS:
        entries: dict[str, Any] = vars(sys.modules[name])["_config"]
        values = [entry.user_override for entry in entries.values()]
        yield name, partial(_overrides, values), partial(_set_overrides, values)


def _overrides(values: list[Any]) -> list[Any]:
    return [one.get() for one in values]


def _set_overrides(values: list[Any], wanted: list[Any]) -> None:
    for one, value in zip(values, wanted, strict=True):
        one.set(value)
