"""`python -m trainers memory`: the device memory that a run's steps will take.

The steps are taken, with tensors that have shapes and no memory (torch's
FakeTensorMode), and the storages that are alive meanwhile are counted. Fake tensors
stand for a rank's own: its shard of a sharded model, DDP's buckets as gradients that
stay. Resident data, what kernels take inside and fragments are not in it; without CUDA
the CPU's operators stand for a GPU's.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from torch.utils.data import Dataset

from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.data.batch import Batch, leaves_of, map_tensors, tensors_of
from trainers.devices.device import device_name, resolve_device, total_memory_bytes
from trainers.devices.group import Group
from trainers.errors import ConfigError
from trainers.launch.spec import RunSpec
from trainers.loop.build import make_trained, materialise
from trainers.loop.data import load_data, make_sampler
from trainers.model.precision import able_precisions, resolve_precision
from trainers.model.sharding import local
from trainers.model.torchao import NARROW
from trainers.step.microbatch import Probe
from trainers.step.phased_step import make_phases
from trainers.task import Task

ERROR = 0.1
"""How far predictions may be off, as a share."""
_ALIKE = (("fp32", "tf32"), ("bf16", "fp16", "fp8"), ("bf16-pure", "fp16-pure"))
"""Precisions whose tensors have the same sizes."""
_MODES = ("none", "selective", "full")
_BLOCK = 512
"""What CUDA's allocator rounds sizes up to; a CPU's are counted alike."""
_USABLE = 0.92 * 0.97
_CONTEXT_BYTES = 2**29
"""Of the memory in a card's name: what drivers leave of it, less what a probe wants to
spare; and a CUDA context.
"""
_KNOWN = (2, 3)
_CHECKED = 7
"""Samples of the batches whose shapes say those of any other, and of one that shows
whether they do.
"""
_WIDER = 4
_MOST_SAMPLES = 2**24
_MOST_READ = 2**12
"""The same of samples that have to be read to know their shapes, as text."""


def memory_page(spec: RunSpec, gpu: str | None) -> Iterator[str]:
    """Yield the lines: a row for each precision and mode that model and device take.

    `gpu` has its memory in its name ("H100 80GB"); None: the device that is here.
    Raises ConfigError.
    """
    config = spec.config
    device = resolve_device(config.device)
    if device.type == "mps":
        device = torch.device("cpu")  # whose operators take as much
    card = gpu or device_name(device)
    capacity = _free_bytes(device) if gpu is None else _named_bytes(gpu)
    if config.optimizer.name in NARROW:
        rule = "has steps that are compiled, which needs tensors with values"
        raise ConfigError(
            "optimizer.name",
            config.optimizer.name,
            rule,
            "predict with `--optimizer.name adamw`",
        )
    task = spec.load_task()
    alone = Group(0, 1, device)
    train, _ = load_data(task, config, RunContext(None, "memory"), alone)
    make_sampler(
        train, task, config, alone
    )  # which refuses data that cannot be trained
    world = config.scaling.min_workers
    share = -(-config.batch_size // world)
    size = (
        share
        if config.microbatch_size == "auto"
        else min(config.microbatch_size, share)
    )
    workers = "1 worker" if world == 1 else f"{world} workers"
    yield f"{spec.source}: {config.optimizer.name}, strategy {config.strategy}, {workers}; a microbatch of {size}"
    heads = ("parameters", "gradients", "optimizer", "activations", "peak")
    yield f"{'':36}{''.join(f'{head:>14}' for head in heads)}   largest microbatch on {card}"
    left_out: dict[str, list[str]] = {}
    with fake_world(world if config.strategy == "fsdp" else 1):
        for names, precision, mode in _combinations(device):
            is_own = (
                config.precision in names and mode == config.activation_checkpointing
            )
            tried = config.model_copy(
                update={"precision": precision, "activation_checkpointing": mode}
            )
            try:
                found, largest = _forecast(
                    spec.load_task,
                    tried,
                    train,
                    Group(0, world, device),
                    size,
                    capacity,
                )
            except ConfigError as error:
                if is_own or mode == "none":
                    raise
                modes = left_out.setdefault(error.rule, [])
                modes += [mode] if mode not in modes else []
                continue
            sizes = (
                found.parameters,
                found.gradients,
                found.optimizer,
                found.activations,
                found.peak,
            )
            figures = "".join(f"{f'{number / 2**20:,.1f} MiB':>14}" for number in sizes)
            yield f"{'*' if is_own else ' '} {', '.join(names):22}{mode:12}{figures}   {largest}"
    yield "* the configuration's own"
    for rule, modes in left_out.items():
        yield f"Without `activation_checkpointing: {' | '.join(modes)}`, which {rule}."
    yield (
        "Predicted, not measured: it goes by the sizes of tensors, without what kernels take inside, resident data and "
        f"fragments; largest microbatches within {ERROR:.0%}, on {card} of {capacity / 2**30:.1f} GiB for tensors."
    )


def _combinations(device: torch.device) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield for each row its precisions, the one that is taken, and the mode."""
    for names in _ALIKE:
        able = [name for name in names if name in able_precisions(device)]
        for mode in _MODES if able else ():
            yield names, able[0], mode


def _forecast(
    make_task: Callable[[], Task],
    config: TrainConfig,
    train: Dataset[Any],
    group: Group,
    size: int,
    capacity: int,
) -> tuple[Forecast, str]:
    """Return what a microbatch of `size` takes, and the largest that fits, in words."""
    try:
        forecaster = Forecaster(make_task, config, train, group)
        found = forecaster(size)
        most = max(size, forecaster.most)
        return found, _between(
            largest_microbatch(
                lambda other: forecaster(other).peak, size, capacity, most
            ),
            most,
        )
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        rule = (
            f"goes by the values of tensors ({error}), which a prediction does not have"
        )
        fix = "train some steps: what they take is in the result"
        raise ConfigError("task", config.task, rule, fix) from error


def _named_bytes(gpu: str) -> int:
    """What tensors may take of a card's memory."""
    told = re.search(r"(\d+(?:\.\d+)?) ?Gi?B\b", gpu)
    if told is None:
        raise ConfigError(
            "--gpu",
            gpu,
            "does not say how much memory it has",
            'write it like "H100 80GB"',
        )
    return int(float(told[1]) * 2**30 * _USABLE) - _CONTEXT_BYTES


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.97)
    return total_memory_bytes(device)


def _between(largest: int, most: int) -> str:
    if largest == 0:
        return "none: a single sample takes more"
    if largest == most:
        return f"{largest:,} or more"
    return f"{largest:,} ({int(largest * (1 - ERROR)):,} to {int(largest * (1 + ERROR)):,})"


@dataclass(frozen=True)
class Forecast:
    """Bytes on one rank's device for steps of one microbatch size."""

    parameters: int
    """With buffers, and a moving average's copies."""
    gradients: int
    optimizer: int
    """Its state."""
    activations: int
    """What the first backward pass begins with, beside the model: with the batch and
    its loss.
    """
    peak: int


class Forecaster:
    """Takes fake steps of one configuration; use it in a `fake_world`."""

    def __init__(
        self,
        make_task: Callable[[], Task],
        config: TrainConfig,
        train: Dataset[Any],
        group: Group,
    ) -> None:
        """Make model and optimizer; `make_task` is called anew for each model."""
        # Digests of frozen parameters would read them.
        config = config.model_copy(
            update={
                "checkpoint": config.checkpoint.model_copy(update={"parameters": "all"})
            }
        )
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        dtype = resolve_precision(config.precision, group.device).parameters
        task, model = fake_model(make_task, train, self._mode, dtype, group.device)
        with self._mode:
            trained = make_trained(task, model, config, group)
            phases = make_phases(trained.forward, trained.optimizer)
        self._probe = _FakeProbe(
            trained.forward, trained.optimizer, train, group, phases
        )
        self._meter = MemoryMeter()
        parameters = list(trained.model.parameters())
        self._averages = (
            trained.ema.tensors if trained.ema is not None else []
        )  # held: they stay in memory
        for tensor in (*parameters, *trained.model.buffers(), *self._averages):
            self._meter.count(tensor)
        self._parameters = self._meter.live
        self._gradients = sum(
            local(parameter).nbytes
            for parameter in parameters
            if parameter.requires_grad
        )
        self._share = -(-config.batch_size // group.world_size)

    @property
    def most(self) -> int:
        """The largest microbatch that is looked for."""
        return _MOST_READ if self._probe.reads else _MOST_SAMPLES

    def __call__(self, microbatch_size: int) -> Forecast:
        """Take the first two steps of this microbatch size."""
        optimizer = self._probe.optimizer
        meter = self._meter
        optimizer.zero_grad(set_to_none=True)
        meter.restart()
        with self._mode, meter:
            self._probe.take_steps(
                microbatch_size, accumulates=microbatch_size < self._share
            )
        state = sum(
            local(tensor).nbytes
            for tensor in tensors_of(list(optimizer.state.values()))
        )
        return Forecast(
            self._parameters, self._gradients, state, meter.activations or 0, meter.peak
        )


_Shapes = list[tuple[int, ...]]
"""Of a batch's tensors."""


@dataclass(frozen=True)
class _FakeProbe(Probe):
    """Takes steps of fake samples, as many as are asked for."""

    @torch.no_grad()
    def batch(self, size: int) -> Batch:
        like, known = self._few
        if known is None:
            like = self._real(size)
            shapes = iter(_shapes(like))
        else:
            shapes = iter(_extended(known, size))
        device = self.forward.device
        fakes = map_tensors(
            lambda tensor: torch.empty(next(shapes), dtype=tensor.dtype, device=device),
            like,
        )
        return self.forward.task.transform(fakes, True)

    @property
    def reads(self) -> bool:
        """Whether the shapes of a batch are known only by its samples."""
        return self._few[1] is None

    @functools.cached_property
    def _few(self) -> tuple[Batch, tuple[_Shapes, _Shapes] | None]:
        """A batch of a few samples, and the shapes of two sizes.

        None where those of a third do not follow: samples differ in length, have
        tensors of their own, or something else than tensors, as text.
        """
        first, second = (_shapes(self._real(size)) for size in _KNOWN)
        batch = self._real(_CHECKED)
        shapes = _shapes(batch)
        known = [tuple(map(len, found)) for found in (first, second, shapes)]
        follows = all(isinstance(leaf, Tensor) for leaf in leaves_of(batch))
        follows &= (
            known[0] == known[1] == known[2]
            and _extended((first, second), _CHECKED) == shapes
        )
        return batch, (first, second) if follows else None

    def _real(self, size: int) -> Batch:
        with _disable_current_modes():  # neither fake nor counted
            return self.forward.task.worst_case_batch(self.dataset, size)


def _shapes(batch: Batch) -> _Shapes:
    return [tuple(tensor.shape) for tensor in tensors_of(batch)]


def _extended(known: tuple[_Shapes, _Shapes], size: int) -> _Shapes:
    """The shapes of `size` samples, on the line through those of two sizes."""
    low, high = _KNOWN
    found = []
    for first, second in zip(*known, strict=True):
        steps = [
            (after - before) // (high - low)
            for before, after in zip(first, second, strict=True)
        ]
        found.append(
            tuple(
                max(0, start + step * (size - low))
                for start, step in zip(first, steps, strict=True)
            )
        )
    return found


@contextlib.contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a fake process group, which answers at once."""
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


def largest_microbatch(
    peak: Callable[[int], int], start: int, capacity: int, most: int
) -> int:
    """Return the largest microbatch whose peak fits `capacity` bytes, to within 1 %.

    At most `most` samples; 0 where a single sample takes more.

    It is searched from `start` on.

    A peak is the largest of several moments, each linear in the size: a line between
    two sizes lies above it, so that what is found by such lines fits.
    """
    fits = 0
    fits_bytes = 0
    above: tuple[int, int] | None = None
    size = start
    while fits < most:
        taken = peak(size)
        if taken <= capacity:
            fits = size
            fits_bytes = taken
        else:
            above = (size, taken)
        if above is None:
            size = min(size * _WIDER, most)
        elif fits == 0:
            if size == 1:
                break
            size = max(1, size // _WIDER)
        else:
            between = (
                (capacity - fits_bytes) * (above[0] - fits) // (above[1] - fits_bytes)
            )
            if between <= fits // 100:
                break
            size = fits + between
    return fits


def fake_model(
    make_task: Callable[[], Task],
    train: Dataset[Any],
    mode: FakeTensorMode,
    dtype: torch.dtype | None,
    device: torch.device,
) -> tuple[Task, Any]:
    """Make the model without its memory, or with it where it reads values, and drop it.

    It is on its device and in its format already, and stays: torch's `Module.to` is
    unsure of fake parameters.
    """
    task = make_task()
    try:
        with mode:
            model: Any = task.model()
            materialise(task, model, train)
    except Exception:
        task = make_task()
        model = task.model()
        materialise(task, model, train)
    made: dict[int, Tensor] = {}  # a parameter of several modules stays one
    with mode:
        for module in model.modules():
            tensors: Any
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = made.setdefault(
                            id(tensor), _faked(tensor, dtype, device)
                        )
    model.to = lambda *_: model
    return task, model


def _faked(tensor: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """Return the tensor without values, in `dtype` where it is of floating point."""
    kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kept, device=device)
    return (
        nn.Parameter(like, tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else like
    )


@dataclass
class _Storage:
    size: int
    reference: weakref.ref[torch.UntypedStorage]


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, real or fake.

    Those that are made inside it, and those that `count` was given.

    What is counted is storages, as torch's allocators give them: views and aliases are
    one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.live = self.peak = 0
        """Bytes."""
        self.activations: int | None = None
        """What the first backward pass began with, of all that was made since the
        start.
        """
        self._before = 0
        self._storages: dict[int, _Storage] = {}

    def __enter__(self) -> MemoryMeter:
        """Count from here on."""
        self._resize = torch.UntypedStorage.resize_
        meter = self

        @functools.wraps(self._resize)
        def resize(
            storage: torch.UntypedStorage, size: int
        ) -> Any:  # so FSDP takes and frees what it has gathered
            resized = meter._resize(storage, size)
            if (known := meter._storages.get(storage._cdata)) is not None:
                meter._grow(known, size)
            return resized

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call, unused-ignore]
        return self

    def __exit__(self, *raised: Any) -> None:
        """Count no more."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call, unused-ignore]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run every operation as it is, and count what it returns."""
        if (
            self.activations is None and torch._C._current_graph_task_id() != -1
        ):  # in the backward pass
            self.activations = self.live - self._before
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return made

    def restart(self) -> None:
        """Forget the peak; activations are those made from here on."""
        self.peak = self._before = self.live
        self.activations = None

    def count(self, tensor: Tensor) -> None:
        """Count a tensor while it lives, unless it is counted already."""
        part = local(tensor)
        if part.layout is not torch.strided:
            return
        storage = part.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is None or known.reference() is not storage:
            made = _Storage(0, weakref.ref(storage, lambda _: self._forget(key, made)))
            self._storages[key] = known = made
        self._grow(known, storage.nbytes())

    def _grow(self, storage: _Storage, size: int) -> None:
        rounded = -(-size // _BLOCK) * _BLOCK
        self.live += rounded - storage.size
        storage.size = rounded
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int, storage: _Storage) -> None:
        self._grow(storage, 0)
        if self._storages.get(key) is storage:
            del self._storages[key]
