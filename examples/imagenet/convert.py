"""Convert class folders of images to square images in memory-mapped files.

Run as: python -m examples.imagenet.convert FOLDER OUT [--stored 256]

FOLDER holds `train` and `val`, each with a folder per class (torchvision's
ImageFolder). In OUT, each of these two splits gets a `pixels.npy` and a
`labels.npy` (0.2 MB per image, 252 GB for all of ImageNet). A split that OUT
already has is not written again.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from examples.imagenet.pictures import Square

SPLITS = ("train", "val")


def read_pixels(path: str, stored: int) -> np.ndarray:
    """Return one image as uint8 [3, stored, stored]."""
    return Square(stored)(path).numpy()


def convert(folder: Path, out: Path, stored: int, workers: int) -> None:
    """Write every split that `out` does not have."""
    from torchvision.datasets import ImageFolder

    with ProcessPoolExecutor(workers) as pool:
        for split in SPLITS:
            target = out / split
            if target.exists():
                continue
            samples = ImageFolder(folder / split).samples
            aside = out / f"{split}.tmp"
            aside.mkdir(parents=True, exist_ok=True)
            np.save(aside / "labels.npy", [label for _, label in samples])
            pixels = np.lib.format.open_memmap(
                aside / "pixels.npy",
                mode="w+",
                dtype=np.uint8,
                shape=(len(samples), 3, stored, stored),
            )
            paths = [path for path, _ in samples]
            read = partial(read_pixels, stored=stored)
            for number, image in enumerate(
                pool.map(read, paths, chunksize=64)
            ):
                pixels[number] = image
            pixels.flush()
            aside.rename(target)
            print(f"{target}  {len(samples):,} images", flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stored", type=int, default=256)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    convert(given.folder, given.out, given.stored, given.workers)


if __name__ == "__main__":
    main()
