"""The order of an epoch's samples where a task gives a sampler: a function of seed and
epoch, on every rank alike.
"""

import hashlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from trainers.devices.device import seed_all
from trainers.devices.rng import get_rng_state, set_rng_state
from trainers.errors import ConfigError

_WINDOW_BATCHES = 50


class Drawn:
    """The samples that a sampler draws, epoch by epoch.

    It is asked under the run's seed and the epoch, so what it draws from Python's,
    numpy's or torch's own generator, or from a torch generator that it has as
    `generator`, is the same on every rank and after a resume; `set_epoch` is called
    where it has one. The caller's random state stays as it is.
    """

    def __init__(
        self, sampler: Iterable[int], num_samples: int, seed: int, device: torch.device
    ) -> None:
        self._sampler = sampler
        self._num_samples = num_samples
        self._seed = seed
        self._device = device
        self.name = type(sampler).__name__
        order = self(0)
        self.length = len(order)
        if not torch.equal(order, self(0)):
            fix = (
                "draw from torch's global generator, or from one that `set_epoch` seeds"
            )
            raise self._refused(
                "gives another order when it is asked again for the same epoch", fix
            )

    def __call__(self, epoch: int) -> Tensor:
        """int64 [n]: the samples of an epoch, in order.

        Raises ConfigError for what is no sample of the dataset.
        """
        kept = get_rng_state(self._device)
        sampler: Any = self._sampler
        try:
            seed_all(self._seed + epoch)
            if isinstance(getattr(sampler, "generator", None), torch.Generator):
                sampler.generator.manual_seed(self._seed + epoch)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            order = torch.from_numpy(
                np.fromiter(map(operator.index, sampler), np.int64)
            )
        except (TypeError, OverflowError) as error:
            raise self._refused(
                f"must give whole numbers, a sample each: {error}", "no batches of them"
            ) from error
        finally:
            set_rng_state(kept, self._device)
        if not len(order):
            raise self._refused("gives no sample", "give at least one")
        if order.min() < 0 or order.max() >= self._num_samples:
            rule = f"gives samples {order.min()} to {order.max()} of a dataset with {self._num_samples}"
            raise self._refused(rule, "give numbers from 0 to the dataset's length")
        if epoch and len(order) != self.length:
            rule = f"gives {len(order)} samples in epoch {epoch}, and {self.length} in the first"
            raise self._refused(rule, "give as many in every epoch")
        return order

    def _refused(self, rule: str, fix: str) -> ConfigError:
        return ConfigError("sampler", self.name, rule, fix)


def digest(order: Tensor) -> str:
    """What tells one order of samples from another."""
    return hashlib.blake2b(order.numpy().tobytes(), digest_size=8).hexdigest()


class GroupedByLength(Sampler[int]):
    """Batches of samples of about one length, which need little padding, in random
    order.

    `lengths`: of all samples. Of 50 batches at a time the samples are sorted; a last
    batch that is short stays last.
    """

    def __init__(self, lengths: Sequence[int] | Tensor, batch_size: int) -> None:
        self._lengths = torch.as_tensor(lengths)
        self._batch_size = batch_size

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        size = self._batch_size
        windows = torch.randperm(len(self)).split(_WINDOW_BATCHES * size)
        order = torch.cat(
            [
                window[self._lengths[window].argsort(descending=True, stable=True)]
                for window in windows
            ]
        )
        batches = order.split(size)
        whole = len(self) // size
        shuffled = [batches[number] for number in torch.randperm(whole).tolist()]
        yield from torch.cat([*shuffled, *batches[whole:]]).tolist()
