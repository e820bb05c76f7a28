"""Put one model on many devices: place, wrap and compile it by strategy.

| strategy | before the optimizer | after the probe | gradients of a step        |
|----------|----------------------|-----------------|----------------------------|
| ddp      | to the device        | DDP around it   | averaged over ranks        |
| fsdp     | sharded in place     | -               | averaged and scattered     |
| dp       | to the first GPU     | DP around it    | summed on the first GPU    |
| none     | to the device        | -               | as they are                |

With one rank (ddp, fsdp) or one GPU (dp) the model stays bare. The bare module
always keeps its parameters' names.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import (
    _flatten_dense_tensors,
    _take_tensors,
    _unflatten_dense_tensors,
)
from torch.nn.parallel import (
    DataParallel,
    DistributedDataParallel,
    parallel_apply,
)

from trainers.devices.group import Group
from trainers.errors import ConfigError, counted, shorten
from trainers.model.sharding import is_sharded, shard_units

logger = logging.getLogger(__name__)

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]

MAX_BYTES = 1 << 20
"""The most bytes that a rank sends in a step with `exchanged`. Above this,
all-reduce is used, which on n ranks sends 2 / n times as many.
"""
_BUCKET_BYTES = 25 << 20  # DDP's own
BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""torch's own layers, which in training normalise by the batch, and read no buffer."""
_BROADCAST_BYTES = 250 << 20  # DDP's own
_GRAPHS_OF_A_UNIT = (
    8  # torch's own `recompile_limit`, which is for one function
)
ANOTHER_WAY = "the loss does not go through the model that forward() was given"


def all_reduced(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket exactly as DDP itself does, to the last bit."""
    buffer = bucket.buffer()
    # As the reducer does it: dividing would round differently.
    buffer.mul_(1.0 / dist.get_world_size())
    reduced = dist.all_reduce(buffer, async_op=True).get_future()
    return reduced.then(lambda future: future.value()[0])


def average_gradients(gradients: Sequence[Tensor], group: Group) -> None:
    """Average gradients over ranks in place, for parameters trained without DDP.

    Every rank must call it with equally many gradients of the same shapes.
    """
    if group.world_size == 1:
        return
    for bucket in _take_tensors(gradients, _BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        flat.mul_(1.0 / group.world_size)
        dist.all_reduce(flat)
        torch._foreach_copy_(bucket, _unflatten_dense_tensors(flat, bucket))


def average_present(parameters: Sequence[Tensor], group: Group) -> None:
    """Average the gradients of `parameters` over ranks, in place.

    A missing gradient counts as zero; a parameter without a gradient on any
    rank gets none.

    Waits for the device; every rank must call it with the same parameters.
    """
    if group.world_size == 1 or not parameters:
        return
    kinds = torch.zeros(len(parameters), dtype=torch.uint8)
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None:
            kinds[index] = 2 if parameter.grad.is_sparse else 1
    found = group.max(kinds.to(group.device))
    dense: list[Tensor] = []
    for parameter, kind in zip(parameters, found.tolist(), strict=True):
        if kind == 2:
            _average_rows(parameter, group)
        elif kind == 1:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dense.append(as_real(parameter.grad))
    average_gradients(dense, group)


def as_real(gradient: Tensor) -> Tensor:
    """Return a gradient's values as a dense real tensor that shares its memory."""
    values = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def _average_rows(parameter: Tensor, group: Group) -> None:
    """Average a sparse gradient over the indices that it has on any rank."""
    own = None if parameter.grad is None else parameter.grad.coalesce()
    of_rank = None if own is None else own.indices().cpu()
    every = [places for places in group.gather(of_rank) if places is not None]
    places = torch.cat(every, 1).unique(dim=1).to(parameter.device)
    zeros = parameter.new_zeros(
        places.shape[1], *parameter.shape[len(places) :]
    )
    total = torch.sparse_coo_tensor(
        places, zeros, parameter.shape, check_invariants=False
    )
    total = (total if own is None else total + own).coalesce()
    average_gradients([as_real(total)], group)
    parameter.grad = total


def exchanged(rank: int, world_size: int) -> Hook:
    """Return a DDP hook that sends small gradients to every rank directly.

    The hook is for CPU workers, and applies if all gradients are in one small
    bucket. gloo's all-reduce passes parts of a buffer around in turns, and
    hands each turn to another thread; for gradients of a few hundred
    kilobytes, waiting for these threads takes most of a step. With this hook
    every rank sends everything to all others in a single turn, and adds up
    what it receives in the order of ranks, which gives the same bits on every
    rank (with two ranks, also the same as gloo's).
    """
    peers = [peer for peer in range(world_size) if peer != rank]

    def average(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        own = bucket.buffer()
        is_only = bucket.index() == 0 and bucket.is_last()
        if not is_only or own.nbytes * len(peers) > MAX_BYTES:
            return all_reduced(state, bucket)
        own.mul_(1.0 / world_size)
        parts = [torch.empty_like(own) for _ in range(world_size)]
        parts[rank] = own
        works = [dist.irecv(parts[peer], peer) for peer in peers]
        works += [dist.isend(own, peer) for peer in peers]
        for work in works:
            assert work is not None
            work.wait()
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        own.copy_(total)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(own)
        return done

    # DDP compares annotations with types, and here they are text
    average.__annotations__.clear()
    return average


def place_model(model: nn.Module, group: Group, strategy: str) -> nn.Module:
    """Move the model to the group's device, or shard it over all ranks (fsdp).

    Call it before building the optimizer.

    Every rank must call it with the same weights.
    """
    if strategy != "fsdp" or group.world_size == 1:
        return model.to(group.device)
    _check_shardable(model)
    # Imported here: it takes 0.4 s, and only fsdp needs it.
    from torch.distributed.device_mesh import (
        init_device_mesh,
    )
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(group.device.type, (group.world_size,))
    # FSDP2 needs this; batches may still be channels last.
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    # Moves one unit at a time: the whole model need not fit on the device.
    for unit in shard_units(model):
        fully_shard(unit, mesh=mesh)
    # By default the root stays gathered for the backward pass. Where none
    # follows, the next forward would not see what EMA has put into the shards.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


def _check_shardable(model: nn.Module) -> None:
    """Raise ConfigError for a parameter that FSDP2 cannot shard."""
    sparse = {m.weight for m in model.modules() if getattr(m, "sparse", False)}
    for name, parameter in model.named_parameters():
        if (
            parameter.ndim == 0
            or parameter.is_complex()
            or parameter in sparse
        ):
            raise ConfigError(
                "strategy",
                "fsdp",
                f"cannot shard a parameter that is a scalar, is complex or has sparse gradients, such as `{name}`",
                "set `strategy: ddp`, or make it a dense, real tensor of one dimension or more",
            )


def sync_batchnorm(model: nn.Module, group: Group) -> nn.Module:
    """Return the model with its BatchNorm layers replaced by torch's SyncBatchNorm.

    Parameters stay the same.

    With one worker, the model is not changed. On a CPU, torch refuses a
    SyncBatchNorm layer in the first pass.
    """
    if group.world_size == 1:
        return model
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def wrap_model(
    model: nn.Module, group: Group, strategy: str = "ddp"
) -> nn.Module:
    """Return the module that training calls: the bare one, or a wrapper around it."""
    if strategy == "dp":
        gpus = torch.cuda.device_count() if group.device.type == "cuda" else 0
        if gpus > 1:
            return _DataParallel(model, device_ids=list(range(gpus)))
        logger.warning(
            "strategy dp has %s here: the model is trained as with strategy none",
            counted(gpus, "GPU"),
        )
        return model
    # Without trained parameters DDP has nothing to average.
    is_trained = any(
        parameter.requires_grad for parameter in model.parameters()
    )
    if strategy != "ddp" or group.world_size == 1 or not is_trained:
        return model
    ids = [group.device.index] if group.device.type == "cuda" else None
    apart = [
        name for name, buffer in model.named_buffers() if not _is_sent(buffer)
    ]
    if apart:
        Replicated._set_params_and_buffers_to_ignore_for_model(model, apart)  # type: ignore[no-untyped-call]
    wrapped = Replicated(model, device_ids=ids, gradient_as_bucket_view=True)
    norms = _batchnorms(model)
    if norms:
        wrapped.register_forward_pre_hook(
            functools.partial(_share_what_is_read, norms)
        )
    if group.device.type == "cpu":
        wrapped.register_comm_hook(
            None, exchanged(group.rank, group.world_size)
        )
    return wrapped


class Replicated(DistributedDataParallel):
    """DDP that records whether a pass went through it; if not, DDP averages nothing.

    The module's methods and parts (such as `model.encode`) are accessible, but
    calling them bypasses DDP.
    """

    called = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; DDP averages the gradients of its outputs."""
        self.called |= torch.is_grad_enabled()
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def unfit(self) -> str | None:
        """Return why DDP cannot average the last pass's gradients; None if it can."""
        if not self.called:
            return ANOTHER_WAY
        names = unused_parameters(self.module)
        if names:
            return f"the loss of a batch does not depend on {shorten(names)}"
        for parameter in self.module.parameters():
            gradient = parameter.grad
            if gradient is not None and (
                gradient.is_sparse or gradient.is_complex()
            ):
                return "some gradients are sparse or complex"
        return None

    def check_finished(self) -> None:
        """Raise ConfigError if DDP still waits for a gradient."""
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError as error:
            names = shorten(unused_parameters(self.module))
            raise ConfigError(
                "strategy",
                "ddp",
                f"waits for gradients of {names}: the loss of this batch does not depend on these parameters, and that of other batches does",
                "use them in every batch (`0 * output.sum()` is a use), or freeze them with `requires_grad_(False)`",
            ) from error


def _batchnorms(model: nn.Module) -> list[nn.Module]:
    """Return all modules with buffers if each is torch's BatchNorm; else none."""
    owners = []
    for module in model.modules():
        if list(module.buffers(recurse=False)):
            owners.append(module)
            if type(module) not in BATCHNORMS:
                return []
    return owners


def _share_what_is_read(
    norms: Sequence[nn.Module],
    wrapped: DistributedDataParallel,
    inputs: object,
) -> None:
    """Let DDP broadcast rank 0's buffers only before a forward that reads them.

    BatchNorm in training does not read them, and evaluations and checkpoints
    use rank 0's anyway.
    """
    wrapped.broadcast_buffers = not all(norm.training for norm in norms)


class _DataParallel(DataParallel[nn.Module]):
    """Keeps the caller's autocast format in replicas' threads, instead of float16."""

    def parallel_apply(
        self, replicas: Any, inputs: Any, kwargs: Any
    ) -> list[Any]:
        in_format = functools.partial(
            _in_format, torch.get_autocast_dtype("cuda")
        )
        calls: Any = [
            functools.partial(in_format, replica) for replica in replicas
        ]
        return parallel_apply(
            calls, inputs, kwargs, self.device_ids[: len(replicas)]
        )


def _in_format(
    dtype: torch.dtype, replica: nn.Module, *inputs: Any, **kwargs: Any
) -> Any:
    torch.set_autocast_dtype("cuda", dtype)
    return replica(*inputs, **kwargs)


def compile_model(model: nn.Module, mode: str, fullgraph: bool) -> None:
    """Compile in place: the module keeps its class and its names.

    Shapes are static (dynamic=False), because every size recurs.

    A sharded model is compiled one unit at a time, inside FSDP's hooks, which
    a graph cannot contain; what the root does between its units stays eager.
    """
    compiled = functools.partial(
        torch.compile, mode=mode, fullgraph=fullgraph, dynamic=False
    )
    if not is_sharded(model):
        # What `model.compile` sets.
        model._compiled_call_impl = compiled(_in_own_frame(model._call_impl))
        return
    sharded = [module for module in model.modules() if is_sharded(module)]
    units = sharded[1:] or sharded
    limits = torch._dynamo.config
    # Equal units share their graphs; unequal units of one class share a limit,
    # which they would soon reach.
    limits.recompile_limit = max(
        limits.recompile_limit, _GRAPHS_OF_A_UNIT * len(units)
    )
    for unit in units:
        unit.forward = compiled(_in_own_frame(unit.forward))


def _in_own_frame(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in this file that calls `call`.

    torch 2.11 does not compile frames of torch's own modules, nor anything
    called from them.
    """

    def called(*inputs: Any, **kwargs: Any) -> Any:
        return call(*inputs, **kwargs)

    return called


def unused_parameters(model: nn.Module) -> list[str]:
    """Name the parameters that require a gradient but got none in backward."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which backward does not reduce gradients over ranks.

    The context is for all microbatches of a step except the last.
    """
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return _unreduced(model) if is_sharded(model) else contextlib.nullcontext()


@contextlib.contextmanager
def _unreduced(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def share_tensors(tensors: list[Tensor], group: Group) -> None:
    """Copy rank 0's tensors to every rank, in place."""
    detached = [tensor.detach() for tensor in tensors if _is_sent(tensor)]
    if group.world_size > 1 and detached:
        everyone = dist.group.WORLD
        assert everyone is not None
        send = dist._broadcast_coalesced  # type: ignore[attr-defined]
        send(everyone, detached, _BROADCAST_BYTES, 0)


def _is_sent(tensor: Tensor) -> bool:
    """Whether a broadcast can send a tensor; each rank makes sparse buffers itself."""
    return tensor.layout is torch.strided and not tensor.is_quantized
