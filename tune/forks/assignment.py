"""What a trial's process is given: its configuration, and its place among the ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from trainers.storage import Storage
from tune.config import Target


@dataclass(frozen=True)
class Begun:
    """A training function's newest report that came with a checkpoint."""

    number: int
    """The report's number, from 1 on."""
    checkpoint: str
    """The checkpoint's path on the sweep's storage."""
    train_time_s: float


@dataclass(frozen=True)
class Assignment:
    """A trial, as it is handed to a lane."""

    ticket: str
    """Identifies the submission: Tune may start two actors for a trial, and drop one."""
    trial: str
    tree: dict[str, Any]
    """The trial's whole configuration: a TrainConfig, or a FunctionConfig."""
    microbatch_ceiling: int | None = None
    """The largest microbatch to try, after a larger one did not fit; None: no limit."""
    microbatch_bounds: tuple[int | None, int | None] = (None, None)
    """The largest microbatch known to fit, and the smallest known not to fit."""
    target: Target | None = None
    """The target that ends the trial early; None: the trial runs to its last step."""
    watches: tuple[str, ...] = ()
    """The metrics on which the sweep's decisions depend."""
    source: Storage | None = None
    """Where the state to continue from is stored; None: the trial starts from scratch."""
    refuge: Storage | None = None
    """Where the trial saves its state if its node is about to be taken away."""
    attempt: int = 0
    """How often the trial was lost, or its function failed, before this start."""
    begun: Begun | None = None
    """The report after which a restarted training function continues, if any."""

    @property
    def keeps_state(self) -> bool:
        """Whether the configuration sets a checkpoint interval, so that state is kept."""
        chosen = self.tree.get("checkpoint", {})
        return any(
            value and key.startswith("every_") for key, value in chosen.items()
        )


@dataclass(frozen=True)
class Place:
    """A process's place in a group of ranks."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device_index: int
    address: str = ""
    """Where the ranks rendezvous; empty if they form no process group.

    Rank 0 inherits the listening socket as an open file.
    """
    port: int = 0
    backend: str = ""
    """Backend of the process group; empty: NCCL if there is a GPU, else gloo."""
    timeout_s: float = 1800.0
    """How long a rank waits for the others in a collective."""

    def form_group(self, files: Sequence[int]) -> None:
        """Set `environment`, which a task may read at its import; form the process group.

        Rank 0's first open file is the listening socket.
        """
        os.environ.update(self.environment)
        # The driver and the lanes' workers, which import this file, run
        # without torch.
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # (it is documented)

        from trainers.devices.group import join_group, keep_on_this_machine

        if self.local_world_size == self.world_size:
            keep_on_this_machine()
        server = (
            socket.socket(fileno=files[0]).detach() if self.rank == 0 else None
        )
        timeout = timedelta(seconds=self.timeout_s)
        store = TCPStore(
            self.address,
            self.port,
            self.world_size,
            self.rank == 0,
            timeout,
            master_listen_fd=server,
        )
        backend = self.backend or (
            "nccl" if torch.cuda.is_available() else "gloo"
        )
        join_group(
            backend,
            store,
            self.rank,
            self.world_size,
            self.device_index,
            timeout,
        )

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that torchrun would set."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }
