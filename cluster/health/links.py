"""What nodes measure together: the link from one to the next, and all-reduce between and within nodes."""

import contextlib
import socket
import threading
import time
from datetime import timedelta

_LINK_S = 0.5
_LINK_TIMEOUT_S = 15
_BLOCK_BYTES = 2**20


class Link:
    """One TCP connection's receiver: it counts what arrives until the sender closes."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0))
        self._listener.settimeout(_LINK_TIMEOUT_S)
        self.port: int = self._listener.getsockname()[1]
        self._mb_per_s = 0.0
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        with contextlib.suppress(OSError), self._listener, self._listener.accept()[0] as connection:
            connection.settimeout(_LINK_TIMEOUT_S)
            buffer, received, began = bytearray(_BLOCK_BYTES), 0, time.perf_counter()
            while num_bytes := connection.recv_into(buffer):
                received += num_bytes
            self._mb_per_s = received / (time.perf_counter() - began) / 1e6

    def rate(self) -> float:
        """Return the MB/s that arrived; 0 when nothing did."""
        self._thread.join(2 * _LINK_TIMEOUT_S)
        return self._mb_per_s


def send(address: str, port: int) -> None:
    """Send to another node's Link for half a second."""
    block, where = bytes(_BLOCK_BYTES), (address, port)
    with contextlib.suppress(OSError), socket.create_connection(where, timeout=_LINK_TIMEOUT_S) as connection:
        deadline = time.perf_counter() + _LINK_S
        while time.perf_counter() < deadline:
            connection.sendall(block)


def free_port(address: str) -> int:
    """Return a port that is free there now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def all_reduce(rank: int, world_size: int, address: str, port: int, timeout_s: float) -> tuple[bool, float]:
    """Return (whether the sum was right, MB/s of bus bandwidth) of an all-reduce over one device of each node.

    NCCL between GPUs, gloo where a node has none, or its own are in use; every rank must call it. Integers in float32
    have only one right sum.
    """
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout)  # type: ignore[attr-defined]
    store.set(f"gpu-{rank}", str(torch.cuda.is_available()))
    gpu = all(store.get(f"gpu-{other}") == b"True" for other in range(world_size))
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        pattern = torch.arange(2**26 if gpu else 2**21, device=device, dtype=torch.float32) % 251
        right = pattern * (world_size * (world_size + 1) // 2)
        best, correct = 0.0, True
        for _ in range(4):  # the first one connects
            tensor = pattern * (rank + 1)
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            if gpu:
                torch.cuda.synchronize(device)
            took_s = time.perf_counter() - began
            correct = correct and torch.equal(tensor, right)
            best = max(best, _bus_mb_per_s(tensor.nbytes, took_s, world_size))
        return correct, best
    finally:
        dist.destroy_process_group()


def all_reduce_within() -> tuple[int, bool, float] | None:
    """Return (GPUs, whether the sum was right, MB/s of bus bandwidth) over a node's GPUs; None with fewer than two."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus < 2:
        return None
    from torch.cuda import nccl

    def wait() -> None:
        for index in range(num_gpus):
            torch.cuda.synchronize(index)

    pattern = torch.arange(2**26, dtype=torch.float32) % 251
    right = pattern * (num_gpus * (num_gpus + 1) // 2)
    best, correct = 0.0, True
    for _ in range(4):
        tensors = [(pattern * (index + 1)).to(f"cuda:{index}") for index in range(num_gpus)]
        wait()
        began = time.perf_counter()
        nccl.all_reduce(tensors)
        wait()
        took_s = time.perf_counter() - began
        correct = correct and all(torch.equal(tensor.cpu(), right) for tensor in tensors)
        best = max(best, _bus_mb_per_s(pattern.nbytes, took_s, num_gpus))
    return num_gpus, correct, best


def _bus_mb_per_s(num_bytes: int, took_s: float, num_ranks: int) -> float:
    """Of an all-reduce, as NCCL's own tests define it."""
    return num_bytes / took_s * 2 * (num_ranks - 1) / num_ranks / 1e6
