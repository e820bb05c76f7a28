"""The process group of Ray Train's workers, without torch in Ray's controller.

Ray's own TorchConfig does the same, imports torch wherever it is unpickled (in the
controller and in Ray's own record of the runs, too), leaves the choice of a backend to
the controller's node, which may be a head without a GPU, and lets the store in which
the ranks meet listen on every address of rank 0's node.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import ray.util
from ray.train.backend import Backend, BackendConfig

from trainers.launch.imports import without_collection
from trainers.on_ray.gpus import hide_unassigned_gpus, own_gpu

logger = logging.getLogger(__name__)

_LEAVE_S = 10.0
# Rank 0's, between `_listen` and `_join`: nobody else can take the port.
_listening: list[socket.socket] = []


@dataclass
class GroupConfig(BackendConfig):
    """Takes the place of Ray's TorchConfig."""

    backend: str
    """nccl or gloo."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Read by Ray."""
        return _GroupBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """Read by Ray: what it runs the training function in."""
        return _on_own_gpu if self.backend == "nccl" else nullcontext


class _GroupBackend(Backend):
    """Forms and dissolves the group, from the controller."""

    share_cuda_visible_devices = (
        True  # NCCL's direct paths between GPUs of a node need to see them all
    )

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called by Ray when all workers are there."""
        assert isinstance(backend_config, GroupConfig)
        address, port = worker_group.execute_single(0, _listen)
        worker_group.execute(_join, address, port, backend_config.backend)

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called by Ray before the workers end; some of them may be dead already."""
        if len(worker_group) > 1:
            ray.wait(
                worker_group.execute_async(_leave),
                num_returns=len(worker_group),
                timeout=_LEAVE_S,
            )


def _is_alone() -> bool:
    """Whether all ranks are on one node."""
    context = ray.train.get_context()
    return bool(context.get_local_world_size() == context.get_world_size())


def listen() -> tuple[socket.socket, str, int]:
    """Return, on rank 0, the socket of the ranks' store, its address and its port.

    It listens on the loopback where all ranks are on this node, else on the node's
    address in the cluster: whoever connects may read and write all of it.
    """
    address = "127.0.0.1" if _is_alone() else ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError:
        logger.warning(
            "%s is no address of this machine: the ranks' store listens on all that it has",
            address,
        )
        server = socket.create_server(("", 0), family=family)
    return server, address, int(server.getsockname()[1])


def _listen() -> tuple[str, int]:
    server, address, port = listen()
    _listening[:] = [server]
    return address, port


def _join(address: str, port: int, backend: str) -> None:
    """On every worker at once."""
    hide_unassigned_gpus()
    with without_collection(own_process=True):
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # (it is documented)

        from trainers.launch.local import TIMEOUT, join_group, keep_on_this_machine

    context = ray.train.get_context()
    rank = context.get_world_rank()
    world_size = context.get_world_size()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
    }
    if _is_alone():
        keep_on_this_machine()
    server = _listening.pop().detach() if rank == 0 else None
    store = TCPStore(
        address, port, world_size, rank == 0, TIMEOUT, master_listen_fd=server
    )
    join_group(backend, store, rank, world_size, own_gpu())


@contextmanager
def _on_own_gpu() -> Iterator[None]:
    """Set the CUDA device of this thread.

    It is each thread's own, and Ray trains in another thread than the one that has
    joined.
    """
    import torch

    torch.cuda.set_device(own_gpu())
    yield


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
