"""A Ray Train worker group: its ranks' contexts, GPUs, metrics and process group (Ray).

This module also decides, for Ray's controller, whether the group restarts
after a failure. The controller's process does not import torch.
"""

import logging
import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import ray.util
from ray.train import Checkpoint, CheckpointUploadMode, UserCallback
from ray.train.backend import Backend, BackendConfig
from ray.util.metrics import Gauge

from trainers.causes import failure_of
from trainers.config.model import Tree
from trainers.config.sections import FailureConfig
from trainers.context import RunContext
from trainers.errors import POLICIES, RunFailedError, last_line
from trainers.launch.process import without_collection
from trainers.loop.watchdog import read_hang, saved_hangs
from trainers.on_ray.internals import (
    CONTROLLER_LOGGER,
    FAILURE_LOGGER,
    is_leaving,
    kv_delete,
    kv_exists,
    kv_put,
)
from trainers.storage import Storage

logger = logging.getLogger(__name__)

PREEMPTION_POLL_S = 2.0
"""Seconds between two checks for a drained node; each is a small collective of
Ray's own.
"""
REPORT_EVERY_S = 20.0
"""Seconds between two reports to Ray's controller; each blocks for up to the
controller's polling interval of 0.5 s.
"""
FIGURES: dict[str, tuple[str, ...]] = {
    "samples_per_s": ("run",),
    "step_time_s": ("run",),
    "loss": ("run",),
    "mfu": ("run",),
    "data_wait_share": ("run", "rank"),
    "gpu_memory_bytes": ("run", "rank"),
}
"""The tags of each of a run's figures that are exported to Prometheus; rank 0
sends the figures without the tag `rank`.
"""
_LEAVE_S = 10.0


class FailurePolicy(UserCallback):
    """Gives each kind of failure its own budget of restarts.

    Ray itself is set to retry for ever (`max_failures=-1`); an exception
    raised here ends the run.
    """

    def __init__(self, budgets: FailureConfig, storage: Storage) -> None:
        self._budgets = budgets
        self._met: Counter[str] = Counter()
        self._storage = storage
        self._hangs = saved_hangs(storage)

    def after_exception(
        self, run_context: Any, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Called by Ray with the exception of each failed rank.

        Raises:
            RunFailedError: no restart is left for this kind of failure.
        """
        cause = RunFailedError.first(
            [
                as_failure(rank, error)
                for rank, error in worker_exceptions.items()
            ]
        )
        before = self._hangs
        self._hangs = saved_hangs(self._storage)
        new = sorted(set(self._hangs) - set(before))
        # To Ray, a watchdog's exit is a worker's death.
        if new and (cause.status in ("node_lost", "hung") or cause.follows):
            cause = RunFailedError.first(
                [read_hang(self._storage, name) for name in new]
            )
        status = cause.status
        self._met[status] += 1
        met = self._met[status]
        budget = getattr(self._budgets, status, POLICIES[status].restarts)
        if cause.config:
            budget = 0
        # Microbatches halve each time, so the restarts end.
        elif cause.smaller:
            budget = -1
        # Ray would log tracebacks of its controller, and the ranks' errors
        # with their secrets.
        logging.getLogger(FAILURE_LOGGER).setLevel(logging.CRITICAL)
        if budget != -1 and met > budget:
            logging.getLogger(CONTROLLER_LOGGER).setLevel(logging.CRITICAL)
            raise cause
        most = "no limit" if budget == -1 else budget
        failed = f"worker group failed as {status} ({cause.message})"
        restart = f"restart {met} of {most} from the newest checkpoint"
        logger.warning("%s; %s", failed, restart)


def as_failure(rank: int, error: BaseException) -> RunFailedError:
    """Convert a rank's exception, inside Ray's wrappers, to RunFailedError."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RunFailedError):
            return seen
        error = seen
        # A worker that died is reported as a failed health check, whose cause
        # Ray keeps in an attribute.
        inner = (
            getattr(seen, "health_check_failure", None)
            or getattr(seen, "cause", None)
            or seen.__cause__
        )
        seen = (
            inner
            if isinstance(inner, BaseException) and inner is not seen
            else None
        )
    failure = failure_of(error, rank)
    if failure.status == "node_lost":  # Ray's last line has the cause
        words = f"rank {rank}: {last_line(error)}"
        return RunFailedError("node_lost", words, failure.when)
    return failure


def hide_unassigned_gpus() -> None:
    """Hide all GPUs from torch in a process to which Ray has assigned none.

    Ray 2.60 does not hide them, and all such workers of a node would train on
    the first GPU.

    Call it before torch looks for GPUs.
    """
    if not ray.get_runtime_context().get_accelerator_ids()["GPU"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def own_gpu() -> int:
    """Return the index of this worker's GPU among the visible ones; 0 without any."""
    given = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible.index(given[0]) if given and given[0] in visible else 0


def own_ranks() -> tuple[int, int, int, int, int]:
    """Return rank, world size, local rank, local world size and this node's rank."""
    context = ray.train.get_context()
    return (
        context.get_world_rank(),
        context.get_world_size(),
        context.get_local_rank(),
        context.get_local_world_size(),
        context.get_node_rank(),
    )


class WorkerContext(RunContext):
    """RunContext of a TorchTrainer's worker, with its ranks as Ray assigns them."""

    def __init__(self, storage: Storage | None, launcher: str) -> None:
        super().__init__(storage, launcher, *own_ranks()[:4], own_gpu())
        self._asked_s = -math.inf

    def preempted(self, elapsed_s: float) -> bool:
        """Whether Ray knows that a node of the group will be drained.

        Ray is asked every two seconds, by all ranks.
        """
        if elapsed_s - self._asked_s < PREEMPTION_POLL_S:
            return False
        self._asked_s = elapsed_s
        return is_leaving()


class RayContext(WorkerContext):
    """RunContext of a run on Ray; Ray tells it of stops and drained nodes."""

    def __init__(self, storage: Storage | None) -> None:
        super().__init__(storage, "ray")
        self._told_s = -math.inf
        self._untold: tuple[Tree, str | None] | None = None
        self._gauges = Gauges(storage.name, self.rank) if storage else None

    def report(
        self, metrics: Tree, checkpoint: str | None, elapsed_s: float
    ) -> None:
        """Report metrics to Ray, and a reference to a checkpoint on storage.

        Reports at most every 20 s, because Ray's report waits for its
        controller's next poll; `flush` sends what is then left.
        """
        known = self._untold[1] if self._untold else None
        self._untold = (metrics, checkpoint or known)
        if elapsed_s - self._told_s >= REPORT_EVERY_S:
            self._told_s = elapsed_s
            self.flush()

    def flush(self) -> None:
        """Report to Ray what has not been reported yet. Every rank calls it."""
        if self._untold is None:
            return
        (metrics, checkpoint), self._untold = self._untold, None
        reference = None
        if checkpoint is not None and self.rank == 0:
            where = Storage(checkpoint)
            reference = Checkpoint(where.path, filesystem=where.filesystem)
        ray.train.report(
            metrics,
            checkpoint=reference,
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )

    def observe(self, figures: dict[str, float]) -> None:
        """Set the figures as Ray metrics, which Prometheus reads."""
        if self._gauges is not None:
            # Workers of lanes run without torch.
            from trainers.devices.device import with_gpu_memory

            self._gauges.set(with_gpu_memory(figures))

    def should_stop(self, elapsed_s: float) -> bool:
        """Whether the driver was asked to stop (Ctrl-C, `ray job stop`).

        Only rank 0 looks; the loop tells the other ranks.
        """
        if self.rank != 0 or self.storage is None:
            return False
        return bool(kv_exists(_stop_key(self.storage)))


class Gauges:
    """The newest figures of one worker as Ray metrics.

    Prometheus reads them as `ray_paceline_...`, named as in metrics.csv.
    """

    def __init__(self, run: str, rank: int) -> None:
        self.run = run
        self._rank = str(rank)
        self._names = {
            name: keys
            for name, keys in FIGURES.items()
            if rank == 0 or "rank" in keys
        }
        self._known: dict[str, Gauge] = {}

    def set(self, figures: dict[str, float]) -> None:
        """Set the gauges of the figures that are exported to Prometheus."""
        for name in figures.keys() & self._names.keys():
            keys = self._names[name]
            if name not in self._known:
                self._known[name] = Gauge(f"paceline_{name}", tag_keys=keys)
            tags = {"run": self.run, "rank": self._rank}
            self._known[name].set(
                figures[name], {key: tags[key] for key in keys}
            )


def _stop_key(storage: Storage) -> bytes:
    return f"paceline-stop {storage.uri}".encode()


def request_stop(storage: Storage, wanted: bool) -> None:
    """Ask the workers of the run in this directory to stop, or withdraw the request."""
    if wanted:
        kv_put(_stop_key(storage), b"1", overwrite=True)
    else:
        kv_delete(_stop_key(storage))


@dataclass
class GroupConfig(BackendConfig):
    """Replaces Ray's TorchConfig.

    TorchConfig does the same, but imports torch wherever it is unpickled (also
    in the controller and in Ray's own record of runs), lets the controller's
    node choose the backend, which may be a head without a GPU, and lets the
    ranks' store listen on every address of rank 0's node.
    """

    backend: str
    """nccl or gloo."""

    @property
    def backend_cls(self) -> type[Backend]:
        """Read by Ray."""
        return _GroupBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """The context in which Ray, which reads this, runs the training function."""
        return _on_own_gpu if self.backend == "nccl" else nullcontext


class SharingBackend(Backend):
    """Lets each rank see the GPUs of all ranks on its node, as Ray's TorchConfig does.

    NCCL's direct paths between a node's GPUs need this, and so does a function
    that chooses its GPU by LOCAL_RANK.
    """

    share_cuda_visible_devices = True


class _GroupBackend(SharingBackend):
    """Forms and dissolves the process group, at the controller's request."""

    def on_start(
        self, worker_group: Any, backend_config: BackendConfig
    ) -> None:
        """Called by Ray when all workers are running."""
        assert isinstance(backend_config, GroupConfig)
        place = worker_group.execute_single(0, _listen)
        worker_group.execute(_join, *place, backend_config.backend)

    def on_shutdown(
        self, worker_group: Any, backend_config: BackendConfig
    ) -> None:
        """Called by Ray before the workers end; some may be dead already."""
        count = len(worker_group)
        if count > 1:
            leaving = worker_group.execute_async(_leave)
            ray.wait(leaving, num_returns=count, timeout=_LEAVE_S)


def _is_alone() -> bool:
    """Whether all ranks are on one node."""
    context = ray.train.get_context()
    return bool(context.get_local_world_size() == context.get_world_size())


def listen() -> tuple[socket.socket, str, int]:
    """Return, on rank 0, the socket of the ranks' store, its address and its port.

    The socket listens on the loopback if all ranks are on this node, else on
    the node's address in the cluster, because whoever can connect may read and
    write the whole store. If that is not an address of this machine, the
    socket listens on all addresses, and a warning says so.
    """
    address = "127.0.0.1" if _is_alone() else ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError:
        logger.warning(
            "%s is not an address of this machine: the ranks' store listens on all of its addresses",
            address,
        )
        server = socket.create_server(("", 0), family=family)
    return server, address, int(server.getsockname()[1])


def _listen() -> tuple[str, int, int]:
    """Return the store's address, its port, and the descriptor of its socket.

    Runs on rank 0. The socket stays open until `_join`, so that no other
    process can take the port.
    """
    server, address, port = listen()
    return address, port, server.detach()


def _join(address: str, port: int, descriptor: int, backend: str) -> None:
    """Join the process group; runs on all workers at the same time."""
    hide_unassigned_gpus()
    with without_collection(own_process=True):
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # (it is documented)

        from trainers.devices.group import (
            TIMEOUT,
            join_group,
            keep_on_this_machine,
        )

    rank, world_size, *of_node = own_ranks()
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
    )
    for name, number in zip(names, (rank, world_size, *of_node), strict=True):
        os.environ[name] = str(number)
    if _is_alone():
        keep_on_this_machine()
    is_first = rank == 0
    listening = descriptor if is_first else None
    store = TCPStore(
        address,
        port,
        world_size,
        is_first,
        TIMEOUT,
        master_listen_fd=listening,
    )
    join_group(backend, store, rank, world_size, own_gpu())


@contextmanager
def _on_own_gpu() -> Iterator[None]:
    """Set the CUDA device of this thread.

    Each thread has its own current device, and Ray trains in another thread
    than the one that joined the group.
    """
    import torch

    torch.cuda.set_device(own_gpu())
    yield


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
