"""Which samples belong to which step: a function of seed, epoch and batch sizes, never
of the machines.

Epoch e is one order, by default a seeded permutation; step t takes its next samples, as
many as trainers/data/batch_schedule.py says; ranks and microbatches only split that
set. So a run goes on mid-epoch on another number of workers and uses the same samples.
"""

from collections.abc import Sized

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from trainers.data.batch_schedule import BatchSchedule, Sizes
from trainers.data.order import Drawn, digest


class StepSampler(DistributedSampler[int]):
    """A torch DistributedSampler that also deals samples out by step.

    Iterating it gives what torch's class gives (padded, interleaved); `share` gives
    steps without padding. Call `set_epoch` before each epoch.
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
        global_batch_size: int | Sizes,
        drawn: Drawn | None = None,
        of_stream: bool = False,
    ) -> None:
        """`num_replicas` and `rank` default to the process group's, as in torch's
        class.

        `global_batch_size` may be several sizes that follow one another.

        `drawn`: steps are dealt out of its orders instead; it may give a sample twice,
        or never. With `of_stream` the samples are dealt out as they come, and the
        length is that of the run.
        """
        if not isinstance(dataset, Sized):
            raise TypeError(
                "the training dataset has no length: Paceline needs a map-style dataset (`__len__`)"
            )
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.drawn = drawn
        self.length = len(dataset) if drawn is None else drawn.length
        self._of_stream = of_stream
        self.batches = BatchSchedule(global_batch_size, self.length, drop_last)
        self._permutation: tuple[int, Tensor] | None = None

    @property
    def known_length(self) -> int:
        """Samples of one epoch; 0 of a stream, of which nobody knows them."""
        return 0 if self._of_stream else self.length

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of this epoch; the last may be short unless `drop_last`."""
        return self.batches.steps_in(self.epoch)

    def rows(self, start: int, stop: int) -> Tensor:
        """int64 [stop - start]: this epoch's samples from one place to another, the
        same on every rank and not to be changed.
        """
        if self.drawn is None and not self.shuffle:
            return torch.arange(start, min(stop, self.length))
        if self._permutation is None or self._permutation[0] != self.epoch:
            if self.drawn is not None:
                order = self.drawn(self.epoch)
            else:
                generator = torch.Generator().manual_seed(
                    self.seed + self.epoch
                )  # as torch's class seeds it
                order = torch.randperm(self.length, generator=generator)
            self._permutation = (self.epoch, order)
        return self._permutation[1][start:stop]

    def name(self) -> str:
        """What this epoch's order is, for a checkpoint: a run that goes on must go on
        in it.
        """
        if self._of_stream:
            return "stream"
        if self.drawn is not None:
            return f"{self.drawn.name} {digest(self.rows(0, self.length))}"
        return "shuffled" if self.shuffle else "in order"

    def step_size(self, step: int) -> int:
        """Samples of a step of this epoch over all ranks."""
        start, stop = self.batches.bounds(self.epoch, step)
        return stop - start

    def share(self, step: int) -> Tensor:
        """int64 [n]: this rank's samples of a step; n differs by at most one between
        ranks and may be 0.
        """
        start, stop = self.batches.bounds(self.epoch, step)
        size = stop - start
        first = size * self.rank // self.num_replicas
        last = size * (self.rank + 1) // self.num_replicas
        return self.rows(start + first, start + last)

    def anchor(self, step: int) -> Tensor:
        """int64 [1]: a sample of the step, for a rank without a share to take part with
        at weight zero.
        """
        start, _ = self.batches.bounds(self.epoch, step)
        return self.rows(start, start + 1)

    def plan(
        self, step: int, microbatch_size: int, even: bool = False
    ) -> tuple[list[Tensor], list[int]]:
        """Return this rank's microbatches of a step, and how many samples each of them
        counts: 0 for an anchor.

        `even`: as many on every rank, for a model whose forward is a collective.
        """
        share = self.share(step)
        largest = -(-self.step_size(step) // self.num_replicas) if even else len(share)
        chunks = split_share(share, microbatch_size, largest)
        idle = (
            share[-1:] if len(share) else self.anchor(step)
        )  # no row before its own: a stream only goes forward
        return [chunk if len(chunk) else idle for chunk in chunks], [
            len(chunk) for chunk in chunks
        ]


def split_share(
    share: Tensor, microbatch_size: int, largest: int | None = None
) -> list[Tensor]:
    """Split a share into as few microbatches as fit, of sizes that differ by at most
    one (so none is tiny).

    With `largest`, into as many as a share of that many samples needs; some may then be
    empty.
    """
    count = max(1, -(-(len(share) if largest is None else largest) // microbatch_size))
    return [share] if count == 1 else list(torch.tensor_split(share, count))
