"""How fast do batches arrive?

The DataLoader of PyTorch's guides is compared with Paceline's ways to feed batches, and
with the limit: copying slices of a tensor in memory.

Run as: python -m benchmarks.input [ROUNDS] [--only mnist,cifar,imagenet,rows]
[--seconds 0.5] [--short] [--keep]

Samples need no decoding. They are in memory or in a mapped file, and are read in random
order, on one core, with one thread of torch:

    loader        as in the guides: a Dataset like torchvision's, which makes a PIL image
                  of each sample and transforms it, in a DataLoader; for rows, a
                  TensorDataset in a DataLoader. Measured twice, for the A/A floor
    loader xN     the same with N worker processes, which may use N cores
    resident      Paceline: whole batches, indexed from resident tensors, as stored
    memory        Paceline: the same through its loader, for data that does not fit on
                  the device
    mapped        Paceline: whole batches, indexed from a mapped file
    + transform   Paceline, including the transform to the model's input, which `loader`
                  includes, too: normalized floats; CIFAR-10's images are cropped and
                  mirrored at random (and get a blank square), ImageNet's are cropped and
                  scaled at random. Here, the transform runs on the CPU
    slice         the limit: consecutive slices of the tensor are copied, in order and
                  without an index
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from benchmarks.measure import interleave, save, show, summarize
from trainers.config.sections import DataConfig
from trainers.task import Task, task_feed

Epoch = Callable[[], Iterable[Any]]
_CPU = torch.device("cpu")
_WORKERS = 2


@dataclass(frozen=True)
class Kind:
    """A kind of samples: their shape and number, and the batch size."""

    shape: tuple[int, ...]
    samples: int
    batch: int
    looked_at: int
    """How many samples one pass of the guides' loader reads, because it is slow."""


KINDS = {
    "mnist": Kind((1, 28, 28), 60_000, 64, 2048),
    "cifar": Kind((3, 32, 32), 50_000, 128, 2048),
    "imagenet": Kind((3, 256, 256), 1024, 64, 128),
    "rows": Kind((64,), 200_000, 256, 20_480),
}


class PerSample(Dataset[Any]):
    """A dataset of single samples, like torchvision's MNIST and CIFAR10."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        transform: Callable[[Any], Tensor],
    ) -> None:
        channels_last = images.permute(0, 2, 3, 1).numpy()
        self.images = (
            channels_last[..., 0]
            if images.shape[1] == 1
            else channels_last.copy()
        )
        self.labels = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), int(
            self.labels[index]
        )


def task_of(name: str) -> Task:
    """Return the task whose `transform` makes the model's input."""
    from examples.cifar10.task import Cifar10
    from examples.imagenet.task import ImageNet
    from examples.mnist.task import Mnist

    tasks = {
        "mnist": lambda: Mnist(synthetic=True),
        "cifar": lambda: Cifar10(synthetic=True),
        "imagenet": lambda: ImageNet(synthetic=True),
    }
    return tasks.get(name, Task)()


def guides_transform(name: str) -> Callable[[Any], Tensor]:
    """Return the transform that the guides use for these images."""
    from torchvision import transforms as T

    recipes = {
        "mnist": [T.ToTensor(), T.Normalize((0.1307,), (0.3081,))],
        "cifar": [
            T.RandomCrop(32, padding=4),
            T.RandomHorizontalFlip(),
            T.ToTensor(),
            T.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        ],
        "imagenet": [
            T.RandomResizedCrop(224),
            T.RandomHorizontalFlip(),
            T.ToTensor(),
            T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ],
    }
    found: Callable[[Any], Tensor] = T.Compose(recipes[name])
    return found


def make_data(kind: Kind) -> TensorDataset:
    """Return random samples with labels: uint8 images, or rows of floats."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (kind.samples,), generator=generator)
    if len(kind.shape) == 1:
        return TensorDataset(
            torch.randn(kind.samples, *kind.shape, generator=generator), labels
        )
    pixels = torch.randint(
        256,
        (kind.samples, *kind.shape),
        dtype=torch.uint8,
        generator=generator,
    )
    return TensorDataset(pixels, labels)


def write_mapped(data: TensorDataset, directory: Path) -> TensorDataset:
    """Write the samples to files; return them as tensors that are mapped from these."""
    mapped = []
    for number, tensor in enumerate(data.tensors):
        file = directory / f"{number}.npy"
        np.save(file, tensor.numpy())
        mapped.append(torch.from_numpy(np.load(file, mmap_mode="c")))
    return TensorDataset(*mapped)


def guides_loader(
    name: str, kind: Kind, data: TensorDataset, workers: int
) -> Epoch:
    """Return a function that returns the guides' DataLoader, in random order."""
    dataset: Dataset[Any] = data
    if len(kind.shape) == 3:
        dataset = PerSample(*data.tensors, guides_transform(name))
    sampler = RandomSampler(
        data, num_samples=min(kind.looked_at, kind.samples)
    )
    loader = DataLoader(
        dataset,
        batch_size=kind.batch,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda: loader


def feed(data: Dataset[Any], task: Task, kind: Kind, resident: bool) -> Epoch:
    """Return a function that yields Paceline's batches of one epoch."""
    source = task_feed(
        data, task, DataConfig(resident=resident), _CPU, sharers=1, seed=0
    )
    order = torch.randperm(
        kind.samples, generator=torch.Generator().manual_seed(0)
    )
    return lambda: source.batches(order.split(kind.batch), training=True)


def slices(data: TensorDataset, kind: Kind) -> Epoch:
    """Return a function that yields copies of consecutive slices."""
    starts = range(0, kind.samples, kind.batch)
    return lambda: (
        [tensor[start : start + kind.batch].clone() for tensor in data.tensors]
        for start in starts
    )


def rate(epoch: Epoch, seconds: float) -> float:
    """Return the samples/s over whole epochs."""
    samples = 0
    began = time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds or samples == 0:
        for batch in epoch():
            samples += len(batch[1])
    return samples / elapsed


def measure(
    name: str, kind: Kind, rounds: int, seconds: float, workers: int = _WORKERS
) -> dict[str, Any]:
    """Return the figures of one kind of samples, and Paceline's shares of the limit."""
    data = make_data(kind)
    with tempfile.TemporaryDirectory(prefix="input-") as directory:
        mapped = write_mapped(data, Path(directory))
        epochs = {
            "loader": guides_loader(name, kind, data, 0),
            f"loader x{workers}": guides_loader(name, kind, data, workers),
            "resident": feed(data, Task(), kind, resident=True),
            "memory": feed(data, Task(), kind, resident=False),
            "mapped": feed(mapped, Task(), kind, resident=False),
            "loader again": guides_loader(name, kind, data, 0),
            "slice": slices(data, kind),
        }
        if len(kind.shape) == 3:
            epochs["resident + transform"] = feed(
                data, task_of(name), kind, resident=True
            )
            epochs["mapped + transform"] = feed(
                mapped, task_of(name), kind, resident=False
            )
        peers = {
            peer: lambda epoch=epoch: rate(epoch, seconds)
            for peer, epoch in epochs.items()
        }  # type: ignore[misc]
        found = interleave(peers, rounds)
    summary = summarize(found, "loader", "loader again")
    show(
        f"{name}: {list(kind.shape)}, batch {kind.batch}", "samples/s", summary
    )
    shares = {
        peer: statistics.median(
            value / limit
            for value, limit in zip(values, found["slice"], strict=True)
        )
        for peer, values in found.items()
        if peer in ("resident", "memory", "mapped")
    }
    print(
        "  share of slice: "
        + "   ".join(f"{peer} {share:.2f}" for peer, share in shares.items())
    )
    return {**summary, "share_of_slice": shares}


def main(rounds: int, kinds: list[str], seconds: float, keep: bool) -> None:
    """Measure these kinds of samples."""
    torch.set_num_threads(1)
    results = {
        name: measure(name, KINDS[name], rounds, seconds) for name in kinds
    }
    print(f"\nkept in {save('input', results, keep)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(KINDS)
    )
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument(
        "--short",
        action="store_true",
        help="two rounds of a tenth of a second each",
    )
    parser.add_argument(
        "--keep", action="store_true", help="write to benchmarks/results"
    )
    given = parser.parse_args()
    rounds, seconds = (
        (2, 0.1) if given.short else (given.rounds, given.seconds)
    )
    main(rounds, given.only, seconds, given.keep)
