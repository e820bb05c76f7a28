"""What the card allows at most: each operator of a step takes its FLOPs at the peak, or its bytes at the bandwidth.

The roofline of Williams et al. 2009, an operator at a time, over one step of the product's own. Two ceilings: `eager`,
where every operator reads its inputs from the device's memory and writes its outputs there; and `fused`, where only
products, convolutions, attention and the optimizer do, and everything between them costs nothing: more than any
compiler can reach. Peaks are the data sheet's where it is known (trainers/step/peaks.csv), else what a large product
reached in the same run; the bandwidth is that of a large copy. What stays in a cache moves faster than that: steps over
small tensors may come out above their ceiling.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.runs import Runs
from trainers.data.batch import fetch, map_tensors
from trainers.devices.device import synchronize
from trainers.devices.group import Group
from trainers.loop.trained import make_trained
from trainers.model.strategy import wrap_model
from trainers.step.flops import device_peak
from trainers.step.train_step import TrainStep

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NOT_OF_A_STEP = {"compile": "off", "cuda_graphs": False}


@dataclass(frozen=True)
class Ceiling:
    """Seconds that a step takes at least."""

    eager_s: float
    fused_s: float


class Operator(NamedTuple):
    """One call of an operator that makes or changes a tensor."""

    name: str
    flops: int
    """Of products, convolutions and attention; 0 of all others."""
    bytes: int
    """That it reads and writes."""
    dtype: torch.dtype | None
    """The floating-point format that it reads."""


class Operators(TorchDispatchMode):
    """Notes the operators that run inside it; views are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.found: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run every operation as it is."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(("empty", "new_empty")):
            return out
        read = list(_tensors((args, kwargs)))
        there = {tensor.untyped_storage()._cdata for tensor in read}
        changed = [
            tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value)
        ]
        new = [tensor for tensor in _tensors(out) if tensor.untyped_storage()._cdata not in there]
        if not new and not changed:  # a view
            return out
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **kwargs, out_val=out) if count is not None else 0
        dtype = next((tensor.dtype for tensor in read if tensor.dtype.is_floating_point), None)
        self.found.append(Operator(name, flops, sum(map(_size, (*read, *changed, *new))), dtype))
        return out


def least_s(one: Operator, peaks: Mapping[torch.dtype, float], bytes_per_s: float) -> float:
    """Return what an operator takes at least: its FLOPs at the peak of its format, or its bytes at the bandwidth."""
    peak = peaks.get(one.dtype) if one.dtype is not None else None
    return max(one.flops / peak if peak else 0.0, one.bytes / bytes_per_s)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _size(tensor: Tensor) -> int:
    """Bytes of memory: of an expanded tensor what there is."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def rates(precision: str, device: torch.device, matmuls: Mapping[str, float]) -> dict[torch.dtype, float]:
    """FLOP/s by format, in a run of this precision; `matmuls` are those of a large product, by precision."""
    found: dict[torch.dtype, float] = {}
    for dtype, name in _NAMES.items():
        name = "tf32" if (name, precision) == ("fp32", "tf32") else name
        if rate := device_peak(device, name) or matmuls.get(name):
            found[dtype] = rate
    return found


def bandwidth(device: torch.device, size: int = 1 << 28, rounds: int = 9) -> float:
    """Bytes a second that a copy of `size` bytes reads and writes: the median of several."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * size / statistics.median(times)


def ceiling(runs: Runs, changes: dict[str, Any], peaks: Mapping[torch.dtype, float], bytes_s: float) -> Ceiling:
    """Take one step of a work with dotted changes, uncompiled, and add up its operators."""
    work, task, group = runs.work, runs.task, Group(0, 1, runs.device)
    config = work.config({"device": runs.device.type, **changes, **_NOT_OF_A_STEP})
    trained = make_trained(task, task.model(), config, group)
    forward = trained.forward
    wrapped = wrap_model(trained.model, group, config.strategy, config.ddp)
    step = TrainStep(type(forward)(wrapped, task, forward.spec, forward.device), trained.optimizer, group)
    batch = fetch(task.dataset("train"), list(range(work.batch)), task.collate)
    counted = Operators()

    def take() -> None:
        there = map_tensors(lambda tensor: tensor.to(runs.device, copy=True), batch)
        step(iter([task.transform(there, True)]), [work.batch], work.batch, False)

    take()  # the optimizer makes its state
    with counted:
        take()
    return lowest(counted.found, peaks, bytes_s)


def lowest(operators: Sequence[Operator], peaks: Mapping[torch.dtype, float], bytes_s: float) -> Ceiling:
    """Add up what operators take at least."""
    times = [(one, least_s(one, peaks, bytes_s)) for one in operators]
    fused = (time_s for one, time_s in times if one.flops or one.name.startswith("_fused_"))
    return Ceiling(sum(time_s for _, time_s in times), sum(fused))
