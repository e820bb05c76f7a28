"""What a dataset does that takes part in how its batches are read: one of shards, or a stream."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset

from trainers.data.batch import Rows


class FedDataset(Dataset[Any]):
    """A dataset that a Feed asks for more than samples."""

    one_process = False
    """Whether a single process must read it, so that more than one loader process makes no sense."""

    def held(self, batches: Iterable[Rows]) -> Iterator[Rows]:
        """Yield the rows of each batch, in the process that trains, once they can be read in any."""
        yield from batches

    def release(self) -> None:
        """Let go of what the oldest of these batches needed."""

    def send(self) -> Any:
        """Return what this process, which reads, has to tell the one that trains: plain data, beside each batch."""

    def receive(self, told: Any) -> None:
        """Take in what `send` gave."""

    def close(self) -> None:
        """Let go of everything."""
