"""Streams of a small classification set, and the tasks that train on them."""

import os

import torch.distributed as dist

from tests.tasks import Blobs


class Numbered:
    """The samples of `Blobs` one after another, begun anew by each `iter`."""

    def __init__(self, samples, split):
        self.rows = list(
            zip(
                *Blobs(samples=samples, dtype="float64")
                .dataset(split)
                .tensors,
                strict=True,
            )
        )

    def __iter__(self):
        yield from self.rows


class Stateful(Numbered):
    """The same, with an exact state of its own; `read` counts what was really read."""

    def __init__(self, samples, split):
        super().__init__(samples, split)
        self.place = self.start = 0

    def __iter__(self):
        self.place = self.start
        self.start = 0
        while self.place < len(self.rows):
            self.place += 1
            yield self.rows[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.start = state["place"]


class ByRank(Numbered):
    """One that gives each rank its share, as libraries do: by
    torch.distributed, or by what torchrun sets.
    """

    def __iter__(self):
        rank, ranks = (
            (dist.get_rank(), dist.get_world_size())
            if dist.is_initialized()
            else (0, 1)
        )
        yield from self.rows[
            rank + int(os.environ.get("RANK", 0)) :: ranks
            * int(os.environ.get("WORLD_SIZE", 1))
        ]


class OwnShare(Numbered):
    """One that is given a share by its task, after a head that all ranks have."""

    def __init__(self, samples, split, share, head=0):
        super().__init__(samples, split)
        rank, ranks = share
        self.rows = self.rows[:head] + self.rows[head + rank :: ranks]


class Streamed(Blobs):
    """Blobs that can only be read forward."""

    def __init__(self, kind, samples=203):
        super().__init__(samples=samples, dtype="float64")
        self.kind = kind
        self.share = (
            (dist.get_rank(), dist.get_world_size())
            if dist.is_initialized()
            else (0, 1)
        )

    def stream(self, split):
        if self.kind.startswith("own share"):
            if self.kind == "own share of val" and split == "train":
                return Numbered(self.samples, split)
            return OwnShare(
                self.samples,
                split,
                self.share,
                50 * self.kind.endswith("later"),
            )
        if self.kind == "generator":
            return (
                iter(Numbered(self.samples, split))
                if split == "train"
                else None
            )
        kinds = {"numbered": Numbered, "stateful": Stateful, "by rank": ByRank}
        return kinds[self.kind](self.samples, split)
