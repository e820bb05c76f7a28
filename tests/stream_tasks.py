"""Shards and streams of a small classification set, and the tasks that train on them."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor

from tests.tasks import Blobs
from trainers.data.shards import Shards

FEATURES = 12


def write_tar(path: Path, rows: Iterable[tuple[int, np.ndarray, int]]) -> None:
    """A WebDataset shard; compressed where the name says so."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w", format=tarfile.USTAR_FORMAT) as file:
        for number, features, label in rows:
            for field, data in (("bin", features.tobytes()), ("cls", b"%d" % label), ("number", b"%d" % number)):
                member = tarfile.TarInfo(f"{number:06d}.{field}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))


def write_jsonl(path: Path, rows: Iterable[tuple[int, np.ndarray, int]]) -> None:
    """A line a sample."""
    lines = [json.dumps({"bin": one.tolist(), "cls": label, "number": number}) for number, one, label in rows]
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_parquet(path: Path, rows: Iterable[tuple[int, np.ndarray, int]]) -> None:
    """A row a sample."""
    listed = list(rows)
    features = pa.array([one.tolist() for _, one, _ in listed], pa.list_(pa.float64()))
    labels, numbers = [label for _, _, label in listed], [number for number, _, _ in listed]
    pq.write_table(pa.table({"bin": features, "cls": labels, "number": numbers}), path)


def write_mds(path: Path, rows: Iterable[tuple[int, np.ndarray, int]]) -> None:
    """A shard of version 2 of the format, without its `index.json`."""
    samples = [
        struct.pack("<I", one.nbytes) + one.tobytes() + struct.pack("<qq", label, number) for number, one, label in rows
    ]
    kinds = {"bin": ("bytes", None), "cls": ("int", 8), "number": ("int", 8)}
    encodings, sizes = zip(*kinds.values(), strict=True)
    columns = {"column_names": [*kinds], "column_encodings": encodings, "column_sizes": sizes}
    header = json.dumps({"version": 2, "format": "mds", "compression": None, **columns}).encode()
    begin = 4 + 4 * (len(samples) + 1) + len(header)
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in samples])]).astype(np.uint32) + np.uint32(begin)
    path.write_bytes(struct.pack("<I", len(samples)) + offsets.tobytes() + header + b"".join(samples))


WRITERS: dict[str, Callable[[Path, Iterable[tuple[int, np.ndarray, int]]], None]] = {
    ".tar": write_tar,
    ".tar.gz": write_tar,
    ".jsonl": write_jsonl,
    ".jsonl.gz": write_jsonl,
    ".parquet": write_parquet,
    ".mds": write_mds,
}


def write(directory: Path, suffix: str, sizes: Iterable[int], split: str = "train") -> list[Path]:
    """Shards of these sizes with the samples of `Blobs`, in order."""
    sizes = list(sizes)
    features, labels = Blobs(samples=sum(sizes), dtype="float64").dataset(split).tensors
    directory.mkdir(parents=True, exist_ok=True)
    paths, start = [], 0
    for number, size in enumerate(sizes):
        paths.append(directory / f"{split}-{number:03d}{suffix}")
        rows = [(row, features[row].numpy(), int(labels[row])) for row in range(start, start + size)]
        WRITERS[suffix](paths[-1], rows)
        start += size
    return paths


def decode(sample: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Tensors of a sample in any of the formats."""
    features, label = sample["bin"], sample["cls"]
    values = np.frombuffer(features, np.float64).copy() if isinstance(features, bytes) else np.asarray(features)
    return torch.from_numpy(values), torch.tensor(int(label))


def numbered(sample: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and the sample's number."""
    return (*decode(sample), torch.tensor(int(sample["number"])))


class Sharded(Blobs):
    """Blobs that are read from shards."""

    def __init__(self, files: str, samples: int, cache: str | None = None, **shards: Any) -> None:
        super().__init__(samples=samples, dtype="float64")
        self.files, self.cache, self.shards = files, cache, shards

    def stream(self, split: str) -> Any:
        """The training split alone."""
        if split == "val":
            return None
        return Shards(self.files, decode=decode, cache=self.cache, **self.shards)


class Numbered:
    """The samples of `Blobs` one after another, begun anew by each `iter`."""

    def __init__(self, samples: int, split: str) -> None:
        self.rows = list(zip(*Blobs(samples=samples, dtype="float64").dataset(split).tensors, strict=True))

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows


class Stateful(Numbered):
    """The same, with an exact state of its own; `read` counts what was really read."""

    def __init__(self, samples: int, split: str) -> None:
        super().__init__(samples, split)
        self.place = self.start = 0

    def __iter__(self) -> Iterator[Any]:
        self.place, self.start = self.start, 0
        while self.place < len(self.rows):
            self.place += 1
            yield self.rows[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]


class ByRank(Numbered):
    """One that gives each rank its share, as libraries do: by torch.distributed, or by what torchrun sets."""

    def __iter__(self) -> Iterator[Any]:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        yield from self.rows[rank + int(os.environ.get("RANK", 0)) :: ranks * int(os.environ.get("WORLD_SIZE", 1))]


class OwnShare(Numbered):
    """One that is given a share by its task, after a head that all ranks have."""

    def __init__(self, samples: int, split: str, share: tuple[int, int], head: int = 0) -> None:
        super().__init__(samples, split)
        rank, ranks = share
        self.rows = self.rows[:head] + self.rows[head + rank :: ranks]


class Streamed(Blobs):
    """Blobs that can only be read forward."""

    def __init__(self, kind: str, samples: int = 203) -> None:
        super().__init__(samples=samples, dtype="float64")
        self.kind = kind
        self.share = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def stream(self, split: str) -> Any:
        if self.kind.startswith("own share"):
            if self.kind == "own share of val" and split == "train":
                return Numbered(self.samples, split)
            return OwnShare(self.samples, split, self.share, 50 * self.kind.endswith("later"))
        if self.kind == "generator":
            return iter(Numbered(self.samples, split)) if split == "train" else None
        kinds = {"numbered": Numbered, "stateful": Stateful, "by rank": ByRank}
        return kinds[self.kind](self.samples, split)
