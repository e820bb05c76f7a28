"""Class folders of images as shards that a whole batch is read from.

Run as: python -m examples.imagenet.convert FOLDER OUT [--format parquet|arrow]
[--stored 256] [--shard 4096] FOLDER holds `train` and `val`, each with a folder for
each class (torchvision's ImageFolder). `parquet`: the files as they are, decoded by
loader processes; for object stores. `arrow`: squares of `stored` pixels, mapped from a
local disk and never decoded again (0.2 MB an image: 252 GB for all of ImageNet). A
shard that is there is not written again, so a conversion that was cut off goes on with
the same command.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from examples.imagenet.pictures import Square

SPLITS = ("train", "val")


def read_bytes(path: str) -> bytes:
    """A file as it is."""
    return Path(path).read_bytes()


def read_pixels(path: str, stored: int) -> np.ndarray:
    """uint8 [3, stored, stored]."""
    return Square(stored)(path).numpy()


def table_of(
    samples: list[tuple[str, int]], kind: str, stored: int, pool: Executor
) -> pa.Table:
    """One shard: `encoded` or `pixels`, and `label`."""
    paths = [path for path, _ in samples]
    labels = pa.array([label for _, label in samples], pa.int64())
    if kind == "parquet":
        return pa.table(
            {
                "encoded": pa.array(
                    pool.map(read_bytes, paths, chunksize=64), pa.binary()
                ),
                "label": labels,
            }
        )
    read: Callable[[str], np.ndarray] = partial(read_pixels, stored=stored)
    pixels = np.stack(list(pool.map(read, paths, chunksize=64)))
    return pa.table(
        {"pixels": pa.FixedShapeTensorArray.from_numpy_ndarray(pixels), "label": labels}
    )


def convert(
    folder: Path, out: Path, kind: str, stored: int, shard: int, workers: int
) -> list[Path]:
    """Write every shard that is not there; returns all of them."""
    from torchvision.datasets import ImageFolder

    written = []
    with ProcessPoolExecutor(workers) as pool:
        for split in SPLITS:
            samples = ImageFolder(folder / split).samples
            parts = [
                samples[first : first + shard]
                for first in range(0, len(samples), shard)
            ]
            (out / split).mkdir(parents=True, exist_ok=True)
            for number, part in enumerate(parts):
                target = out / split / f"{number:05d}-of-{len(parts):05d}.{kind}"
                written.append(target)
                if target.exists():
                    continue
                table = table_of(part, kind, stored, pool)
                aside = target.with_name(f".{target.name}.tmp")
                if kind == "parquet":
                    pq.write_table(
                        table, aside, compression="none"
                    )  # the images are compressed already
                else:
                    with pa.ipc.new_file(str(aside), table.schema) as writer:
                        writer.write_table(table)
                aside.replace(target)
                print(
                    f"{target}  {len(part):,} images  {target.stat().st_size / 1e6:,.0f} MB",
                    flush=True,
                )
    return written


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", choices=("parquet", "arrow"), default="parquet")
    parser.add_argument("--stored", type=int, default=256)
    parser.add_argument("--shard", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    convert(
        given.folder, given.out, given.format, given.stored, given.shard, given.workers
    )


if __name__ == "__main__":
    main()
