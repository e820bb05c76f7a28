"""Checkpoint activations: a block keeps its inputs and recomputes the rest.

`full` follows Chen et al. 2016 (arXiv:1604.06174). `selective` also keeps the
results of matrix products, convolutions and attention, and recomputes only
what is cheap, as in Korthikanti et al. 2022 (arXiv:2205.05198).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import (
    create_selective_checkpoint_contexts as _selective,
)

from trainers.errors import ConfigError
from trainers.model.sharding import shard_units
from trainers.model.strategy import BATCHNORMS

_KEPT_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)


def checkpoint_activations(
    model: nn.Module, mode: str, compiled: bool
) -> None:
    """Let repeated blocks of a ModuleList or Sequential recompute their activations.

    The model is changed in place; classes and names stay.

    `mode` is `full`, `selective`, or `none`, which does nothing. Raises
    ConfigError if there is no such block.

    A block draws the same random numbers when it is recomputed. Its buffers
    (BatchNorm's statistics) change in the first pass only.
    """
    if mode == "none":
        return
    blocks = [block for block in shard_units(model) if list(block.children())]
    if not blocks:
        raise ConfigError(
            "activation_checkpointing",
            mode,
            "needs blocks in a ModuleList or Sequential, each with submodules of its own, and the model has none",
            "put the blocks into a ModuleList, or set `activation_checkpointing: none`",
        )
    for block in blocks:
        block.forward = _Recomputed(block, block.forward, mode, compiled)


@contextlib.contextmanager
def activations_kept(model: nn.Module) -> Iterator[None]:
    """Keep all activations within the block, so that FLOPs are counted only once."""
    recomputed = []
    for module in model.modules():
        if isinstance(module.forward, _Recomputed):
            recomputed.append((module, module.forward))
            module.forward = module.forward.plain
    try:
        yield
    finally:
        for module, forward in recomputed:
            module.forward = forward


class _Recomputed:
    """A block's forward that is recomputed in the backward pass."""

    def __init__(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        mode: str,
        compiled: bool,
    ) -> None:
        self._block = block
        self.plain = forward
        self._mode = mode
        self._compiled = compiled
        self._context_fn = functools.partial(_contexts, block, mode)
        # Options for a compiled graph, which takes only torch's own contexts,
        # and updates BatchNorm's statistics once.
        self._graph: dict[str, Any] = {}
        if mode == "selective":
            self._graph["context_fn"] = functools.partial(_selective, _policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; if gradients are enabled, keep only what the mode keeps.

        If the model will be compiled, raises ConfigError in an eager pass that
        changes a buffer: a compiled graph could not restore the buffer for
        recomputation.
        """
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        options = self._graph
        if not torch.compiler.is_compiling():
            options = {"context_fn": self._context_fn}
        before = self._versions()
        outputs = checkpoint(
            self.plain, *args, use_reentrant=False, **options, **kwargs
        )
        for name, version in self._versions().items():
            if version != before[name]:
                raise ConfigError(
                    "activation_checkpointing",
                    self._mode,
                    f"cannot recompute a compiled block whose forward() changes a buffer, here `{name}`",
                    "set `compile: off`, or `activation_checkpointing: none`",
                )
        return outputs

    def _versions(self) -> dict[str, int]:
        """Return how often each buffer was written to.

        Empty unless this is an eager pass of a model that will be compiled.
        """
        if not self._compiled or torch.compiler.is_compiling():
            return {}
        return {
            name: buffer._version
            for name, buffer in _buffers(self._block).items()
        }


def _buffers(block: nn.Module) -> dict[str, Tensor]:
    """Return a block's buffers by name, without BatchNorm's statistics.

    In training, no pass reads these statistics.
    """
    statistics = {
        buffer for norm in _norms(block) for buffer in norm.buffers()
    }
    buffers = block.named_buffers()
    return {
        name: buffer for name, buffer in buffers if buffer not in statistics
    }


def _norms(block: nn.Module) -> list[Any]:
    return [
        module
        for module in block.modules()
        if type(module) in BATCHNORMS and module.training
    ]


def _contexts(block: nn.Module, mode: str) -> tuple[Any, Any]:
    """Return the contexts of a block's first pass and of its recomputation.

    Call this before the first pass. Within the second context, buffers have
    the values from before the first pass; afterwards they get their later
    values back.
    """
    first: Any = contextlib.nullcontext()
    second: Any = contextlib.nullcontext()
    if mode == "selective":
        first, second = _selective(_policy)
    buffers = [buffer.detach() for buffer in _buffers(block).values()]
    before = [buffer.clone() for buffer in buffers]
    return first, _as_before(_norms(block), buffers, before, second)


def _policy(
    context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if operator in _KEPT_PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _as_before(
    norms: list[Any], buffers: list[Tensor], before: list[Tensor], inner: Any
) -> Iterator[None]:
    after = [buffer.clone() for buffer in buffers]
    kept = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:  # so that recomputing updates no statistics
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        _copy(buffers, before)
        with inner:
            yield
    finally:
        for norm, momentum, count in kept:
            norm.momentum = momentum
            norm.num_batches_tracked = count
        _copy(buffers, after)


def _copy(buffers: list[Tensor], values: list[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
