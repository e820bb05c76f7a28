"""Checkpoint activations: a block keeps its inputs, and computes the rest again.

Chen et al. 2016 (arXiv:1604.06174); `selective` keeps the products too, and computes
only what is cheap again, as in Korthikanti et al. 2022 (arXiv:2205.05198), by
torch.utils.checkpoint's policies.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as _selective

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
_kept_whole = False


def checkpoint_activations(model: nn.Module, mode: str, compiled: bool) -> None:
    """Let blocks that a ModuleList or Sequential repeats compute activations again.

    In place: classes and names stay.

    `mode` is full or selective; none does nothing. Raises ConfigError where there is no
    such block.

    What is drawn in a block is drawn again alike. Its buffers (BatchNorm's statistics)
    change in its first pass alone.
    """
    if mode == "none":
        return
    blocks = [
        block
        for block in shard_units(model)
        if next(block.children(), None) is not None
    ]
    if not blocks:
        rule = "finds no block to compute again: the modules that a ModuleList or Sequential of the model repeats"
        raise ConfigError(
            "activation_checkpointing",
            mode,
            rule,
            "put the layers into one, or set it to none",
        )
    for block in blocks:
        block.forward = _Recomputed(block, block.forward, mode, compiled)


@contextlib.contextmanager
def activations_kept() -> Iterator[None]:
    """Keep all activations inside, for a pass that counts what the model computes."""
    global _kept_whole
    before, _kept_whole = _kept_whole, True
    try:
        yield
    finally:
        _kept_whole = before


class _Recomputed:
    """A block's forward, computed again in the backward pass."""

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], mode: str, compiled: bool
    ) -> None:
        self._block = block
        self._forward = forward
        self._mode = mode
        self._compiled = compiled
        self._context_fn = functools.partial(_contexts, block, mode)
        # Of a graph, which takes no contexts but torch's own, and moves BatchNorm's
        # statistics once.
        self._graph: dict[str, Any] = (
            {"context_fn": functools.partial(_selective, _policy)}
            if mode != "full"
            else {}
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it as it is where no gradient is wanted.

        Raises ConfigError, in a pass before the model is compiled, for a buffer that a
        graph would not have again as it was.
        """
        if _kept_whole or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(
                self._forward, *args, use_reentrant=False, **self._graph, **kwargs
            )
        before = (
            {name: one._version for name, one in _buffers(self._block).items()}
            if self._compiled
            else {}
        )
        outputs = checkpoint(
            self._forward,
            *args,
            use_reentrant=False,
            context_fn=self._context_fn,
            **kwargs,
        )
        for name, one in _buffers(self._block).items() if before else ():
            if one._version != before[name]:
                rule = f"computes a graph with its buffer `{name}` as it is then, and forward() has changed that"
                fix = "set `compile: off`, or `activation_checkpointing: none`"
                raise ConfigError("activation_checkpointing", self._mode, rule, fix)
        return outputs


def _buffers(block: nn.Module) -> dict[str, Tensor]:
    """Return a block's buffers by name, without BatchNorm's statistics.

    No pass in training reads those.
    """
    statistics = {id(one) for norm in _norms(block) for one in norm.buffers()}
    return {
        name: one for name, one in block.named_buffers() if id(one) not in statistics
    }


def _norms(block: nn.Module) -> list[Any]:
    return [one for one in block.modules() if type(one) in BATCHNORMS and one.training]


def _contexts(block: nn.Module, mode: str) -> tuple[Any, Any]:
    """Return the context of a block's first pass and that of its second."""
    plain = contextlib.nullcontext(), contextlib.nullcontext()
    first, second = plain if mode == "full" else _selective(_policy)
    return first, _as_before(block, second)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if operator in _KEPT_PRODUCTS
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


@contextlib.contextmanager
def _second_pass(
    norms: list[Any], buffers: list[tuple[Tensor, Tensor]], inner: Any
) -> Iterator[None]:
    after = [buffer.clone() for buffer, _ in buffers]
    kept = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = (
            0.0,
            None,
        )  # it moves no statistics then
    try:
        _copy((buffer, before) for buffer, before in buffers)
        with inner:
            yield
    finally:
        for norm, momentum, count in kept:
            norm.momentum = momentum
            norm.num_batches_tracked = count
        _copy(
            (buffer, value) for (buffer, _), value in zip(buffers, after, strict=True)
        )


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in pairs:
            buffer.copy_(value)


def _as_before(block: nn.Module, inner: Any) -> Any:
    """Return the context of the second pass, with the buffers as the first found them.

    They stay as it left them.

    To be called before the first pass.
    """
    buffers = [(one.detach(), one.detach().clone()) for one in _buffers(block).values()]
    return _second_pass(_norms(block), buffers, inner)
