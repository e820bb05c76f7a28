"""Counts what operators compute and move, real ones or fake ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


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
