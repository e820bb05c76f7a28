"""The memory that steps will take, found by taking them with tensors that have shapes and no memory (FakeTensorMode).

Fake tensors stand for a rank's own: its shard of a sharded model, DDP's buckets as gradients that stay. Resident data,
workspaces inside kernels and fragments are not in it; without CUDA the CPU's operators stand for a GPU's.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import Dataset

from trainers.config import TrainConfig
from trainers.data.batch import Batch, map_tensors, tensors_of
from trainers.devices.group import Group
from trainers.loop.trained import make_trained
from trainers.model.precision import resolve_precision
from trainers.model.sharding import local
from trainers.step.memory_meter import MemoryMeter
from trainers.step.microbatch import Probe
from trainers.step.phased_step import make_phases
from trainers.task import Task

_FEW, _CHECKED = (2, 3), 7
"""Samples of the batches whose shapes say those of any other, and of one that shows whether they do."""
_WIDER = 4
_USABLE, _CONTEXT_BYTES = 0.92 * 0.97, 2**29
"""Of the memory in a card's name: what drivers leave of it, less what a probe wants to spare; and a CUDA context."""
ERROR = 0.1
"""How far predictions may be off, as a share."""
_MOST = 2**24


@dataclass(frozen=True)
class Forecast:
    """Bytes on one rank's device for steps of one microbatch size."""

    parameters: int
    """With buffers, and a moving average's copies."""
    gradients: int
    optimizer: int
    """Its state."""
    activations: Counter[str]
    """By block of the model; under "" what loss and batch take."""
    peak: int


@dataclass(frozen=True)
class _FakeProbe(Probe):
    """Takes steps of fake samples, as many as are asked for."""

    @torch.no_grad()
    def batch(self, size: int) -> Batch:
        like, shapes = self._few
        if shapes is None:
            like = self._real(size)
            shapes = {size: _shapes(like)}
        left = iter(_between(shapes, size))
        device = self.forward.device
        fakes = map_tensors(lambda tensor: torch.empty(next(left), dtype=tensor.dtype, device=device), like)
        return self.forward.task.transform(fakes, True)

    @functools.cached_property
    def _few(self) -> tuple[Batch, _Shapes | None]:
        """A batch of a few samples, and the shapes of two sizes; None where those of a third do not follow from them:
        samples differ in length, or have tensors of their own.
        """
        batches = {number: self._real(number) for number in (*_FEW, _CHECKED)}
        shapes = {number: _shapes(batch) for number, batch in batches.items()}
        checked = shapes.pop(_CHECKED)
        alike = {tuple(map(len, found)) for found in (*shapes.values(), checked)}
        linear = len(alike) == 1 and _between(shapes, _CHECKED) == checked
        return batches[_CHECKED], shapes if linear else None

    def _real(self, size: int) -> Batch:
        with _disable_current_modes():  # neither fake nor counted
            return self.forward.task.worst_case_batch(self.dataset, size)


_Shapes = dict[int, list[tuple[int, ...]]]
"""Of a batch's tensors, by its number of samples."""


def _shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors_of(batch)]


def _between(known: _Shapes, size: int) -> list[tuple[int, ...]]:
    """Return the shapes of `size` samples: on the line through those of two sizes, or those of the only one."""
    (low, first), (high, second) = min(known.items()), max(known.items())
    share = (size - low) / (high - low) if high > low else 0.0
    return [
        tuple(max(0, round(a + (b - a) * share)) for a, b in zip(*pair, strict=True))
        for pair in zip(first, second, strict=True)
    ]


class Forecaster:
    """Takes fake steps of one configuration; use it in a `fake_world`."""

    def __init__(self, make_task: Callable[[], Task], config: TrainConfig, train: Dataset[Any], group: Group) -> None:
        """`make_task` is called anew for each model; `config` is resolved and its precision one of the device's."""
        # Digests of frozen parameters would read them.
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"parameters": "all"})})
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        dtype = resolve_precision(config.precision, group.device).parameters
        task, model = fake_model(make_task, self._mode, dtype, group.device)
        with self._mode:
            trained = make_trained(task, model, config, group)
            phases = make_phases(trained.forward, trained.optimizer)
        self._probe = _FakeProbe(trained.forward, trained.optimizer, train, group, phases)
        names = ((module, name) for name, module in trained.model.named_modules())
        self._meter = MemoryMeter({module: _block(name) for module, name in names})
        kept = [*trained.model.parameters(), *trained.model.buffers()]
        if trained.ema is not None:
            kept += trained.ema.tensors
        for tensor in kept:
            self._meter.count(tensor)
        self._parameters = self._meter.live
        self._gradients = sum(local(one).nbytes for one in trained.model.parameters() if one.requires_grad)
        self._share = -(-config.batch_size // group.world_size)

    def __call__(self, microbatch_size: int) -> Forecast:
        """Take the first two steps of this microbatch size."""
        self._meter.restart()
        with self._mode, self._meter:
            self._probe.take_steps(microbatch_size, accumulates=microbatch_size < self._share)
        state = tensors_of(list(self._probe.optimizer.state.values()))
        optimizer = sum(local(tensor).nbytes for tensor in state)
        return Forecast(self._parameters, self._gradients, optimizer, self._meter.activations, self._meter.peak)

    def peak(self, microbatch_size: int) -> int:
        """Return the most bytes that steps of this microbatch size take at once."""
        return self(microbatch_size).peak


@contextlib.contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a process group that answers at once and has no other rank."""
    if world_size == 1:
        yield
        return
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend)
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def usable_bytes(memory_bytes: float) -> int:
    """Return what tensors may take of a card's memory."""
    return int(memory_bytes * _USABLE) - _CONTEXT_BYTES


def largest_microbatch(peak: Callable[[int], int], start: int, capacity: int) -> int:
    """Return the largest microbatch whose peak is at most `capacity` bytes, to within 1 %, and at most some millions;
    0 where a single sample takes more. It is searched from `start` on.

    A peak is the largest of several moments, each linear in the size: a line between two sizes lies above it, so that
    what is found by such lines fits.
    """
    fits, above, size = (0, 0), None, start
    while size <= _MOST:
        taken = peak(size)
        if taken <= capacity:
            fits = size, taken
        else:
            above = size, taken
        if above is None:
            size *= _WIDER
        elif fits[0] == 0:
            if size == 1:
                break
            size = max(1, size // _WIDER)
        else:
            between = (capacity - fits[1]) * (above[0] - fits[0]) // (above[1] - fits[1])
            if between <= fits[0] // 100:
                break
            size = fits[0] + between
    return fits[0]


def fake_model(
    make_task: Callable[[], Task], mode: FakeTensorMode, dtype: torch.dtype | None, device: torch.device
) -> tuple[Task, Any]:
    """Make the model without its memory; where it reads values or files, with it, and take that away.

    It is on its device and in its format already, and stays: torch's `Module.to` is unsure of fake parameters.
    """
    try:
        with mode:
            task = make_task()
            model: Any = task.model()
    except Exception:
        task = make_task()
        model = task.model()
    made: dict[int, Tensor] = {}  # a parameter of several modules stays one
    with mode:
        for module in model.modules():
            tensors: Any
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and id(tensor) not in made:
                        kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
                        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kept, device=device)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        made[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if is_parameter else like
                    tensors[name] = None if tensor is None else made[id(tensor)]
    model.to = lambda *_: model
    return task, model


def _block(name: str) -> str:
    """The block that a module is in: its name up to the first number."""
    return re.sub(r"^(.*?\.\d+)\..*", r"\1", name) if re.search(r"\.\d+(\.|$)", name) else name.split(".")[0]
