"""The process group of Ray Train's workers, without torch in Ray's controller.

Ray's own TorchConfig does the same, imports torch wherever it is unpickled (in the controller and in Ray's own record
of the runs, too), and leaves the choice of a backend to the controller's node, which may be a head without a GPU.
"""

import os
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig

from trainers.launch.imports import without_collection

_LEAVE_S = 10.0


@dataclass
class GroupConfig(BackendConfig):
    """Takes the place of Ray's TorchConfig."""

    backend: str
    """nccl or gloo."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Read by Ray."""
        return _GroupBackend


class _GroupBackend(Backend):
    """Forms and dissolves the group, from the controller."""

    share_cuda_visible_devices = True  # NCCL's direct paths between GPUs of a node need to see them all

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called by Ray when all workers are there."""
        assert isinstance(backend_config, GroupConfig)
        address, port = worker_group.execute_single(0, get_address_and_port)
        host = f"[{address}]" if ":" in address else address
        worker_group.execute(_join, f"tcp://{host}:{port}", backend_config.backend)

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called by Ray before the workers end; some of them may be dead already."""
        if len(worker_group) > 1:
            ray.wait(worker_group.execute_async(_leave), num_returns=len(worker_group), timeout=_LEAVE_S)


def _join(init_method: str, backend: str) -> None:
    """On every worker at once."""
    with without_collection(own_process=True):
        from trainers.launch.local import join_group
        from trainers.on_ray.context import own_gpu

    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
    }
    join_group(backend, init_method, rank, world_size, own_gpu())


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
