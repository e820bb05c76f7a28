"""Counts the bytes of all tensors that are alive, real or fake ones, and the most there were at once.

What is counted is storages, as torch's allocators give them: views and aliases are one. Memory that a kernel takes and
gives back inside (workspaces of convolutions and products) is not seen, nor are fragments.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trainers.model.sharding import local

_BLOCK = 512
"""What CUDA's allocator rounds sizes up to; a CPU's are counted alike."""


@dataclass
class _Storage:
    size: int
    owner: str | None
    reference: weakref.ref[torch.UntypedStorage]


class MemoryMeter(TorchDispatchMode):
    """Counts what is made inside it, and what `count` was given."""

    def __init__(self, names: Mapping[nn.Module, str] | None = None) -> None:
        """`names` of the modules whose forward passes are told apart."""
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.live = self.peak = 0
        """Bytes."""
        self.activations: Counter[str] = Counter()
        """Bytes by the module whose forward pass made them, of all that the first backward pass began with."""
        self._names = names or {}
        self._running: list[str | None] = [None]
        self._in_backward = False
        self._storages: dict[int, _Storage] = {}

    def __enter__(self) -> MemoryMeter:
        """Count from here on."""
        self._hooks = [
            register_module_forward_pre_hook(lambda module, _: self._enter(module)),
            register_module_forward_hook(lambda module, *_: self._leave(module), always_call=True),
        ]
        self._resize = torch.UntypedStorage.resize_
        meter = self

        @functools.wraps(self._resize)
        def resize(storage: torch.UntypedStorage, size: int) -> Any:  # so FSDP takes and frees what it has gathered
            resized = meter._resize(storage, size)
            if (known := meter._storages.get(storage._cdata)) is not None:
                meter._grow(known, _rounded(size))
            return resized

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        self._running = [""]
        super().__enter__()  # type: ignore[no-untyped-call, unused-ignore]
        return self

    def __exit__(self, *raised: Any) -> None:
        """Count no more."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call, unused-ignore]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._running = [None]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run every operation as it is, and count what it returns."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not self._in_backward and not self.activations:
            for one in self._storages.values():
                if one.owner is not None:
                    self.activations[one.owner] += one.size
        self._in_backward = in_backward
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return made

    def restart(self) -> None:
        """Forget the peak, and whose passes what is there was made in."""
        self.peak, self.activations = self.live, Counter()
        for one in self._storages.values():
            one.owner = None

    def count(self, tensor: Tensor) -> None:
        """Count a tensor while it lives, unless it is counted already."""
        part = local(tensor)
        if part.layout is not torch.strided:
            return
        storage = part.untyped_storage()
        key = storage._cdata
        if (known := self._storages.get(key)) is not None and known.reference() is storage:
            self._grow(known, _rounded(storage.nbytes()))
            return
        one = _Storage(0, self._running[-1], weakref.ref(storage, lambda _: self._forget(key, one)))
        self._storages[key] = one
        self._grow(one, _rounded(storage.nbytes()))

    def _grow(self, one: _Storage, size: int) -> None:
        self.live += size - one.size
        one.size = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int, one: _Storage) -> None:
        self._grow(one, 0)
        if self._storages.get(key) is one:
            del self._storages[key]

    def _enter(self, module: nn.Module) -> None:
        self._running.append(self._names.get(module) or self._running[-1])

    def _leave(self, module: nn.Module) -> None:
        self._running.pop()


def _rounded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
