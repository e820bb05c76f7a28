"""A clock that charges all time of a thread to one name at a time, so that the parts add up to the whole.

`parts_timed` puts it around the parts of a training step; it reaches into torch and the task for a block, and never
runs in training.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import statistics
import sys
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trainers.devices.device import synchronize
from trainers.step.replica import Replica

HOST_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")
"""Methods of a tensor that wait for the device and give its values to the host."""
_OFTEN, _ROUNDS = 100, 9


class Segments:
    """Wall time of each name, and what of it the thread has waited of its own accord (slept, or waited for a lock, for
    input or output, for another process), in seconds. Where the device is asynchronous each change waits for it.

    A stretch in which the thread was only preempted has not waited: the kernel counts both kinds of switches apart. Of
    one in which it has, as much is left out as stretches of the other kind lose to preemption for their CPU time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.wall_s, self.waited_s = defaultdict[str, float](float), defaultdict[str, float](float)
        self.read_at = Counter[str]()
        """Where the task reads values of the device: `file:line`."""
        self._names, self._read_s = ["other"], 0.0
        self._lost_s, self._ran_s = 0.0, 0.0  # of stretches without a wait
        self._wall, self._cpu, self._waits = time.perf_counter(), time.process_time(), _waits()

    def charge(self) -> None:
        """Charge the time since the last change to the name at hand."""
        synchronize(self.device)
        wall, cpu, waits = time.perf_counter(), time.process_time(), _waits()
        self.wall_s[self._names[-1]] += wall - self._wall - self._read_s
        if self._read_s:
            self.wall_s["host reads"] += self._read_s
            self._read_s = 0.0
        ran_s = cpu - self._cpu
        off_s = wall - self._wall - ran_s
        if waits > self._waits:
            lost = max(0.0, self._lost_s / self._ran_s) if self._ran_s > 0 else 0.0
            self.waited_s[self._names[-1]] += off_s - lost * ran_s
        else:
            self._lost_s, self._ran_s = self._lost_s + off_s, self._ran_s + ran_s
        self._wall, self._cpu, self._waits = wall, cpu, waits

    def read(self, place: str, seconds: float) -> None:
        """Charge a part of the time since the last change to a host read: in a loop of them a change costs too much."""
        self._read_s += seconds
        self.read_at[place] += 1

    def become(self, name: str) -> None:
        """Go on under another name until the block at hand ends."""
        self.charge()
        self._names[-1] = name

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Charge a block to `name`, but for the blocks inside it."""
        self.charge()
        self._names.append(name)
        try:
            yield
        finally:
            self.charge()
            self._names.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function as one that is charged to `name`."""

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self.within(name):
                return function(*args, **kwargs)

        return called

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return wall and waited seconds by name since the last call."""
        self.charge()
        taken = dict(self.wall_s), dict(self.waited_s)
        self.wall_s.clear()
        self.waited_s.clear()
        return taken


def _waits() -> int:
    """How often this thread has given up its processor to wait."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw


@contextlib.contextmanager
def parts_timed(parts: Replica, segments: Segments) -> Iterator[None]:
    """Charge transform, backward pass, optimizer, communication (DDP's, after the rank's last gradient) and the task's
    host reads to their names, for a block.
    """
    with contextlib.ExitStack() as stack:
        feed = parts.train_feed
        if feed._transform is not None:
            _patch(stack, feed, "_transform", segments.timed("transform", feed._transform))
        _patch(stack, torch.autograd, "backward", segments.timed("backward", torch.autograd.backward))
        _patch(stack, parts.optimizer, "step", segments.timed("optimizer", parts.optimizer.step))
        clock_s = _clock_s(segments.device)

        def charge(place: str, seconds: float) -> None:
            segments.read(place, max(0.0, seconds - clock_s))

        stack.enter_context(_reads_through(_timing(segments.device, charge)))
        if isinstance(parts.step.forward.model, DistributedDataParallel):
            first = next(one for one in parts.model.parameters() if one.requires_grad)
            stack.callback(first.register_hook(lambda _: segments.become("communication")).remove)
        yield


def _timing(device: torch.device, tell: Callable[[str, float], None]) -> Callable[[str, Callable[[], Any]], Any]:
    """Return what answers a host read, and tells its place and the seconds that it took, once the device is done."""

    def take(place: str, read: Callable[[], Any]) -> Any:
        synchronize(device)
        began = time.perf_counter()
        found = read()
        tell(place, time.perf_counter() - began)
        return found

    return take


def _clock_s(device: torch.device) -> float:
    """What it adds to a read to time it, found by reads that wait for nothing: on a CPU nearly as much as they take."""
    scalar, timed = torch.zeros(()), list[float]()
    of_task = types.FunctionType(_read_often.__code__, {**globals(), "__name__": "task"})
    with _reads_through(_timing(device, lambda _, seconds: timed.append(seconds))):
        of_task(scalar)
    plain = list[float]()
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        _read_often(scalar)
        plain.append((time.perf_counter() - began) / _OFTEN)
    return max(0.0, statistics.median(timed) - statistics.median(plain))


def _read_often(scalar: torch.Tensor) -> None:
    for _ in range(_OFTEN):
        scalar.item()


@contextlib.contextmanager
def stale_reads(known: dict[tuple[str, int], Any]) -> Iterator[Callable[[], None]]:
    """Answer the task's host reads by what `known` has of the same place of an earlier step, without waiting for the
    device; what is not known yet is read, and remembered. The function that it gives is to be called before each step.
    """
    count = Counter[str]()

    def remembered(place: str, read: Callable[[], Any]) -> Any:
        key = (place, count[place])
        count[place] += 1
        if key not in known:
            known[key] = read()
        return known[key]

    with _reads_through(remembered):
        yield count.clear


@contextlib.contextmanager
def _reads_through(take: Callable[[str, Callable[[], Any]], Any]) -> Iterator[None]:
    """Have `take` answer each host read of the task's code, given its place; torch's and ours stay as they are."""

    def patched(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            module = str(frame.f_globals.get("__name__", ""))
            if module.partition(".")[0] in ("torch", "trainers") or torch.compiler.is_compiling():
                return method(tensor, *args, **kwargs)
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            return take(place, functools.partial(method, tensor, *args, **kwargs))

        return read

    with contextlib.ExitStack() as stack:
        for name in HOST_READS:
            _patch(stack, torch.Tensor, name, patched(getattr(torch.Tensor, name)))
        yield


def _patch(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack ends."""
    had, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    stack.callback(lambda: setattr(owner, name, before) if had else delattr(owner, name))
