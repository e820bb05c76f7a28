"""How fast do samples of WebDataset tars arrive: through WebDataset's own loader, and through `Shards`?

Run as: python -m benchmarks.shards [ROUNDS] [--seconds 3] [--short] [--keep]
Local shards in the page cache, samples of 3 kB (uint8) and a label, shuffled shards and a shuffle buffer of 1,000,
batches of 64 collated by torch; each in the process itself and in two loader processes. Needs webdataset, of the extra
`peers`.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from benchmarks.input import Epoch, rate
from benchmarks.measure import interleave, save, show, summarize
from trainers.config.sections import DataConfig
from trainers.data.feed import Feed
from trainers.data.shards import Shards

_SHARDS, _SAMPLES, _BYTES, _BATCH, _BUFFER = 16, 500, 3072, 64, 1000
_CPU = torch.device("cpu")


def write(directory: Path) -> list[str]:
    """Shards of random bytes."""
    generator = torch.Generator().manual_seed(0)
    paths = []
    for shard in range(_SHARDS):
        path = directory / f"{shard:03d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as file:
            for number in range(_SAMPLES):
                pixels = torch.randint(256, (_BYTES,), dtype=torch.uint8, generator=generator).numpy().tobytes()
                for field, data in (("bin", pixels), ("cls", b"%d" % (number % 10))):
                    member = tarfile.TarInfo(f"{shard:03d}{number:06d}.{field}")
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
        paths.append(str(path))
    return paths


def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """The same for both."""
    return torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8), int(sample["cls"])


def theirs(paths: list[str], workers: int) -> Epoch:
    """As WebDataset's documentation has it."""
    import webdataset

    samples = webdataset.WebDataset(paths, shardshuffle=_SHARDS).shuffle(_BUFFER).map(decode)
    batches = samples.batched(_BATCH, collation_fn=default_collate)
    loader = webdataset.WebLoader(batches, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    return lambda: loader


def ours(paths: list[str], workers: int, cache: Path) -> Epoch:
    """The loop's own feed, in an epoch's shuffled order."""
    shards = Shards(paths, decode=decode, shuffle_buffer=_BUFFER, cache=cache)
    order, length = shards.order(0), len(shards)
    feed = Feed(shards, default_collate, None, DataConfig(num_workers=workers), _CPU, sharers=1, seed=0)
    return lambda: feed.batches(
        (order.rows(0, start, start + _BATCH) for start in range(0, length, _BATCH)), training=True
    )


def main(rounds: int, seconds: float, keep: bool) -> None:
    """Both, with and without loader processes."""
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory(prefix="shards-") as directory:
        paths = write(Path(directory))
        for workers in (0, 2):
            epochs = {
                "webdataset": theirs(paths, workers),
                "paceline": ours(paths, workers, Path(directory, "cache")),
                "webdataset again": theirs(paths, workers),
            }
            peers = {name: lambda epoch=epoch: rate(epoch, seconds) for name, epoch in epochs.items()}  # type: ignore[misc]
            summary = summarize(interleave(peers, rounds), "webdataset", "webdataset again")
            show(f"tar shards, {workers} loader processes", "samples/s", summary)
            results[f"{workers} loaders"] = summary
    print(f"\nkept in {save('shards', results, keep)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--short", action="store_true", help="two rounds of half a second each")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    given = parser.parse_args()
    rounds, seconds = (2, 0.5) if given.short else (given.rounds, given.seconds)
    main(rounds, seconds, given.keep)
