"""Average gradients over ranks: by DDP, or quicker for small models on CPU workers.

gloo's all-reduce passes parts of a buffer around in turns, and hands each turn to a
thread of its own. For gradients of a few hundred kilobytes that waiting is the larger
part of a step. There every rank sends all it has to all others at once and adds up what
comes in the order of ranks: one turn, and the same bits on every rank (with two those
of gloo).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from trainers.devices.group import Group

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]

MAX_BYTES = 1 << 20
"""What a rank may receive of one step; above this all-reduce moves less (2 / n of it).
"""
_BUCKET_BYTES = 25 << 20  # DDP's own


def all_reduced(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP's own average, to the last bit."""
    buffer = bucket.buffer()
    buffer.mul_(
        1.0 / dist.get_world_size()
    )  # as the reducer does it: dividing rounds otherwise
    return (
        dist.all_reduce(buffer, async_op=True)
        .get_future()
        .then(lambda future: future.value()[0])
    )


def average_gradients(gradients: Sequence[Tensor], group: Group) -> None:
    """Replace gradients by their averages over ranks, for what is trained without DDP.

    Every rank must call it with as many, of the same shapes.
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

    A rank without one counts as zero; where no rank has one there is none.

    Waits for the device; every rank must call it with the same parameters.
    """
    if group.world_size == 1 or not parameters:
        return
    kinds = [
        0 if one.grad is None else 2 if one.grad.is_sparse else 1 for one in parameters
    ]
    found = group.max(
        torch.tensor(kinds, dtype=torch.uint8, device=group.device)
    ).tolist()
    dense: list[Tensor] = []
    for parameter, kind in zip(parameters, found, strict=True):
        if kind == 2:
            _average_rows(parameter, group)
        elif kind == 1:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dense.append(as_real(parameter.grad))
    average_gradients(dense, group)


def as_real(gradient: Tensor) -> Tensor:
    """Return a gradient's numbers as a dense real tensor, on its own memory."""
    values = gradient._values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def _average_rows(parameter: Tensor, group: Group) -> None:
    """Average a sparse gradient, by the places that it has on any rank."""
    own = None if parameter.grad is None else parameter.grad.coalesce()
    of_ranks = group.gather(None if own is None else own.indices().cpu())
    places = (
        torch.cat([one for one in of_ranks if one is not None], 1)
        .unique(dim=1)
        .to(parameter.device)
    )
    zeros = parameter.new_zeros(places.shape[1], *parameter.shape[len(places) :])
    total = torch.sparse_coo_tensor(
        places, zeros, parameter.shape, check_invariants=False
    )
    total = (total if own is None else total + own).coalesce()
    average_gradients([as_real(total)], group)
    parameter.grad = total


def exchanged(rank: int, world_size: int) -> Hook:
    """Send gradients that are all in one small bucket to every rank directly.

    A DDP communication hook.
    """
    peers = [peer for peer in range(world_size) if peer != rank]

    def average(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        own = bucket.buffer()
        if (
            bucket.index()
            or not bucket.is_last()
            or own.nbytes * len(peers) > MAX_BYTES
        ):
            return all_reduced(state, bucket)
        own.mul_(1.0 / world_size)
        parts = [
            own if one == rank else torch.empty_like(own) for one in range(world_size)
        ]
        works = [dist.irecv(parts[peer], peer) for peer in peers] + [
            dist.isend(own, peer) for peer in peers
        ]
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

    # DDP compares them with types, and here they are text
    average.__annotations__.clear()
    return average
