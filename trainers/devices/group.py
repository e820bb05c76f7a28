"""The ranks of one run: how they join, and the few collectives that the loop needs."""

import contextlib
import functools
import gc
import os
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed.distributed_c10d import GroupMember, PrefixStore
from torch.distributed.rendezvous import rendezvous

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# As a share of the largest value: rounding differs by far less between
# processors of different kinds.
_TOLERANCE = 1e-4
_ROUNDINGS = 16  # rounding errors of the format

T = TypeVar("T")
_RANKS = re.compile(
    "((LOCAL|GROUP|NODE|ROLE)_)?(RANK|WORLD_SIZE)|(OMPI_COMM_WORLD|PMI)_(RANK|SIZE)|SLURM_(PROCID|NTASKS|LOCALID)"
)
"""Variables in which launchers pass a process its rank."""
TIMEOUT = timedelta(seconds=1800)
"""How long a rank waits for the others, in a collective or when joining."""


class Group:
    """The ranks of one run.

    With one rank every method returns immediately, and no process group is
    needed.

    Every rank must call every method equally often.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, on the tensor's own device."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Return the maximum over ranks, on the tensor's own device."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.world_size == 1:
            return tensor
        moved = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(moved, operation)
        return moved.to(tensor.device)

    def gather(self, value: T) -> list[T]:
        """Return plain data of every rank, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def collect(self, value: T) -> list[T]:
        """Gather plain data of every rank on rank 0, in rank order; empty elsewhere."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = []
        if self.rank == 0:
            values = [None] * self.world_size
        dist.gather_object(value, values or None, dst=0)
        return values

    def first(self, value: T) -> T:
        """Return rank 0's plain data on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)


@contextlib.contextmanager
def answered_locally() -> Iterator[None]:
    """Complete every collective within the block with this rank's own tensors.

    Collectives of a task's forward pass (SyncBatchNorm, gathered features)
    then take as much memory as they will in training, and a rank that fails or
    runs alone leaves no rank waiting. Groups created within the block are real
    ones.
    """
    swapped: list[tuple[Any, Any, Any]] = []
    if dist.is_initialized() and dist.get_world_size() > 1:
        types: Any = dist.Backend.backend_type_map
        for group in list(dist.distributed_c10d._world.pg_map):
            for device in group._device_types:
                kind = types[group._get_backend(device).name()]
                swapped.append((group, device, kind))
    names = {group: group.group_name for group, _, _ in swapped}
    try:
        for group, device, _ in swapped:
            _answer_alone(group, device, group.rank(), group.size())
            # The group's name is stored in its backends.
            group._set_group_name(names[group])
        yield
    finally:
        for group, device, kind in swapped:
            # None: the group's own backend of this kind.
            group._register_backend(device, kind, None)


def _answer_alone(
    group: Any, device: torch.device, rank: int, size: int
) -> None:
    """Let this rank complete a group's collectives on `device` without other ranks."""
    from torch._C._distributed_c10d import FakeProcessGroup

    local: Any = FakeProcessGroup._create_internal(rank, size)
    group._register_backend(
        device, dist.ProcessGroup.BackendType.CUSTOM, local
    )


@contextlib.contextmanager
def as_one_rank() -> Iterator[None]:
    """Within the block, present a world of one rank.

    This changes torch.distributed and the environment: otherwise many data
    libraries would give each rank only its share.

    Use it only while no other thread uses torch.distributed or the
    environment.
    """
    world: Any = GroupMember.WORLD if dist.is_initialized() else None
    names = list(filter(_RANKS.fullmatch, os.environ))
    places = {name: os.environ.pop(name) for name in names}
    if world is not None:
        GroupMember.WORLD = _alone()
    try:
        yield
    finally:
        if world is not None:
            GroupMember.WORLD = world
        os.environ.update(places)


@functools.cache
def _alone() -> Any:
    """Return a group of one rank, which completes every collective immediately."""
    store: Any = dist.HashStore  # type: ignore[attr-defined]
    group: Any = dist.ProcessGroup(store(), 0, 1)
    for device in ("cpu", "cuda"):
        _answer_alone(group, torch.device(device), 0, 1)
    group._set_group_name("one rank")
    return group


def find_unlike(
    tensors: Mapping[str, Tensor], group: Group
) -> tuple[str, float] | None:
    """Find a tensor that differs between ranks by more than rounding.

    Returns the tensor's name, and the difference as a share of its largest
    value; None if all are alike.

    Waits for the device; every rank must call it with the same names.

    Only a sum of each tensor's bits is sent, and the tensor itself if the sums
    differ. Tensors of a library's own types are skipped.
    """
    named = []
    for name, tensor in tensors.items():
        if type(tensor) in (Tensor, nn.Parameter):
            named.append((name, _real(tensor)))
    if group.world_size == 1 or not named:
        return None
    sums = torch.stack(
        [_bits(tensor).sum(dtype=torch.int64) for _, tensor in named]
    )
    most, least = group.max(torch.stack([sums, -sums]))
    for index in (most != -least).nonzero().flatten().tolist():
        name, tensor = named[index]
        share = _difference(tensor, group)
        if share > _tolerance(tensor):
            return name, share
    return None


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])


def _real(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return torch.view_as_real(detached) if tensor.is_complex() else detached


def _difference(own: Tensor, group: Group) -> float:
    first = own.clone()
    dist.broadcast(first, src=0)
    scale = (
        first.double().abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    )
    most = (own.double() - first.double()).abs().max() / scale
    return float(group.max(most.reshape(1)))


def _tolerance(own: Tensor) -> float:
    if not own.is_floating_point():
        return 0.0
    return max(_TOLERANCE, _ROUNDINGS * torch.finfo(own.dtype).eps)


def keep_on_this_machine() -> None:
    """Let a group of local ranks use the loopback, unless the user chose otherwise."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")


def join_group(
    backend: str,
    place: Any,
    rank: int,
    world_size: int,
    device_index: int,
    timeout: timedelta = TIMEOUT,
) -> None:
    """Join the run's process group.

    `device_index` is this process's GPU under nccl.

    `place` is where the ranks meet: a URL, or a torch.distributed.Store.
    """
    if "nccl" in backend:
        torch.cuda.set_device(device_index)
    store = place
    if isinstance(place, str):
        store, *_ = next(rendezvous(place, rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
    # A store that outlives a group, such as torchrun's, keeps old addresses.
    number = store.add(f"joined/{rank}", 1)
    store = PrefixStore(str(number), store)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout
    )


def leave_group(failed: bool) -> None:
    """Leave the run's process group; after a failure, without waiting for others."""
    # A DDP reducer in a reference cycle would outlive the group: the process
    # then aborts one time in eight.
    gc.collect()
    # NCCL's destroy waits for the kernels in flight (pytorch issue 163546).
    if failed and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
