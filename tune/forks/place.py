"""What a trial's process is given: its place among the ranks, and what the sweep knows."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    """Where the ranks meet: rank 0 gets the listening socket as an open file.

    Empty: they form no process group.
    """
    port: int = 0
    backend: str = ""
    """Of the process group; empty: NCCL where there is a GPU, else gloo."""
    timeout_s: float = 1800.0
    """How long a rank waits for the others in a collective."""

    def meeting_at(self, address: str, port: int) -> Place:
        """Return it in a group that meets somewhere."""
        return replace(self, address=address, port=port)

    @property
    def environment(self) -> dict[str, str]:
        """What torchrun would set."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


@dataclass(frozen=True)
class Given:
    """What a trial is given besides its configuration; as RunContext has it."""

    microbatch_ceiling: int | None
    microbatch_bounds: tuple[int | None, int | None]
    source: str | None
    refuge: str | None
    watches: tuple[str, ...]
