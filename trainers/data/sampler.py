"""Which samples belong to which step: a function of seed, epoch and global batch size, never of the machines.

Epoch e is one seeded permutation; step t takes the next `global_batch_size` samples of it; ranks and microbatches
only split that set. So a run goes on mid-epoch on another number of workers and still uses each sample once.
"""

from collections.abc import Sized

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler


class StepSampler(DistributedSampler[int]):
    """A torch DistributedSampler that also deals samples out by step.

    Iterating it gives what torch's class gives (padded, interleaved); `share` gives steps without padding.
    Call `set_epoch` before each epoch.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        global_batch_size: int,
    ) -> None:
        """`num_replicas` and `rank` default to the process group's, as in torch's class."""
        if not isinstance(dataset, Sized):
            raise TypeError("the training dataset has no length: Paceline needs a map-style dataset (`__len__`)")
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.global_batch_size = global_batch_size
        self.length = len(dataset)
        self._permutation: tuple[int, Tensor] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch; the last may be short unless `drop_last`."""
        full, rest = divmod(self.length, self.global_batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def permutation(self) -> Tensor:
        """int64 [length]: this epoch's order, the same on every rank."""
        if self._permutation is None or self._permutation[0] != self.epoch:
            if self.shuffle:
                generator = torch.Generator().manual_seed(self.seed + self.epoch)  # as torch's class seeds it
                order = torch.randperm(self.length, generator=generator)
            else:
                order = torch.arange(self.length)
            self._permutation = (self.epoch, order)
        return self._permutation[1]

    def step_size(self, step: int) -> int:
        """Samples of a step of this epoch over all ranks."""
        return min(self.global_batch_size, self.length - step * self.global_batch_size)

    def share(self, step: int) -> Tensor:
        """int64 [n]: this rank's samples of a step; n differs by at most one between ranks and may be 0."""
        size = self.step_size(step)
        start = step * self.global_batch_size
        first = start + size * self.rank // self.num_replicas
        last = start + size * (self.rank + 1) // self.num_replicas
        return self.permutation()[first:last]

    def anchor(self, step: int) -> Tensor:
        """int64 [1]: a sample of the step, for a rank without a share to take part with at weight zero."""
        start = step * self.global_batch_size
        return self.permutation()[start : start + 1]

    def plan(self, step: int, microbatch_size: int, even: bool = False) -> tuple[list[Tensor], list[int]]:
        """Return this rank's microbatches of a step, and how many samples each of them counts: 0 for an anchor.

        `even`: as many on every rank, for a model whose forward is a collective.
        """
        share = self.share(step)
        largest = -(-self.step_size(step) // self.num_replicas) if even else len(share)
        chunks = split_share(share, microbatch_size, largest)
        return [chunk if len(chunk) else self.anchor(step) for chunk in chunks], [len(chunk) for chunk in chunks]


def split_share(share: Tensor, microbatch_size: int, largest: int | None = None) -> list[Tensor]:
    """Split a share into as few microbatches as fit, of sizes that differ by at most one (so none is tiny).

    With `largest`, into as many as a share of that many samples needs; some may then be empty.
    """
    count = max(1, -(-(len(share) if largest is None else largest) // microbatch_size))
    return [share] if count == 1 else list(torch.tensor_split(share, count))
