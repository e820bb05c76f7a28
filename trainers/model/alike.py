"""Whether replicas are alike: ranks that apply the same gradients to the same parameters have the same bits."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers.devices.group import Group

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TOLERANCE = 1e-4  # of the largest value: ranks on unlike processors round otherwise, and drift by far less
_ROUNDINGS = 16  # of the format itself


def find_unlike(tensors: Mapping[str, Tensor], group: Group) -> tuple[str, float] | None:
    """Return the name of a tensor that differs between ranks by more than rounding, and by which part of its largest
    value; None where all are alike. Waits for the device; every rank must call it with the same names.

    A sum of each tensor's bits goes around, and the tensor itself where those differ. Tensors of a library's own kind
    are left out.
    """
    tensors = {name: one for name, one in tensors.items() if type(one) in (Tensor, nn.Parameter)}
    if group.world_size == 1 or not tensors:
        return None
    sums = torch.stack([_bits(tensor).sum(dtype=torch.int64) for tensor in tensors.values()])
    most, least = group.max(torch.stack([sums, -sums]))
    for (name, tensor), differs in zip(tensors.items(), (most != -least).tolist(), strict=True):
        if differs and (share := _difference(tensor, group)) > _tolerance(tensor):
            return name, share
    return None


def _bits(tensor: Tensor) -> Tensor:
    real = _real(tensor)
    return real.view(_INTEGERS[real.element_size()])


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _difference(tensor: Tensor, group: Group) -> float:
    own = _real(tensor)
    first = own.clone()
    dist.broadcast(first, src=0)
    scale = first.double().abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    return float(group.max(((own.double() - first.double()).abs().max() / scale).reshape(1)))


def _tolerance(tensor: Tensor) -> float:
    own = _real(tensor)
    return max(_TOLERANCE, _ROUNDINGS * torch.finfo(own.dtype).eps) if own.is_floating_point() else 0.0
