"""Which shards there are, and how many samples an index beside them says that they have."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trainers.data.arrow_files import listed
from trainers.data.shard_formats import SUFFIXES
from trainers.errors import CheckpointError
from trainers.storage import Storage

_FORMAT = 1  # of the copies of shards: part of their names
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_INDEX = "index.json"


@dataclass(frozen=True)
class ShardFile:
    """A shard where it is stored, as it was listed."""

    directory: Storage
    """That it was found in; not always the one just above it."""
    file: str
    size_bytes: int
    mtime_ns: int | None
    """None for one that is not there."""

    @property
    def name(self) -> str:
        """Its place, for messages."""
        return self.directory.locate(self.file)

    @property
    def path(self) -> Path:
        """Where a local one is."""
        return Path(self.directory.path, self.file)

    @property
    def storage(self) -> Storage:
        """To read it by."""
        return Storage(self.name)

    @property
    def key(self) -> str:
        """The name of its copies: another one when it was written anew."""
        text = f"{_FORMAT} {self.name} {self.size_bytes} {self.mtime_ns}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def list_shards(files: str | Path | Sequence[str | Path]) -> list[ShardFile]:
    """Return the shards of paths, URIs, globs, directories or numbered braces (`train-{000..146}.tar`), in order.

    Raises ConfigError where there is none; one of some numbers may be missing.
    """
    found: list[ShardFile] = []
    for given in [files] if isinstance(files, (str, Path)) else files:
        location = str(given)
        there = [
            ShardFile(directory, name, info.size, info.mtime_ns)
            for directory, name, info in listed(_BRACES.sub("*", location), SUFFIXES)
        ]
        if _BRACES.search(location):
            by_name = {file.name: file for file in there}
            there = [by_name.get(name) or _missing(name) for name in _numbered(location)]
        found += there
    return found


def _missing(name: str) -> ShardFile:
    storage = Storage(name)
    return ShardFile(storage.parent, storage.name, 0, None)


def _numbered(location: str) -> list[str]:
    """Expand the braces, as a shell would."""
    place = location if "://" in location else os.path.abspath(os.path.expanduser(location))  # noqa: PTH100, PTH111 (no symlink is resolved)
    texts = _BRACES.split(place)  # text, first, last, text, first, last, text
    ranges = [
        [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        for first, last in zip(texts[1::3], texts[2::3], strict=True)
    ]
    return ["".join(_woven(texts[::3], numbers)) for numbers in itertools.product(*ranges)]


def _woven(texts: Sequence[str], numbers: Iterable[str]) -> list[str]:
    return [part for pair in itertools.zip_longest(texts, numbers, fillvalue="") for part in pair]


def counts_beside(files: Sequence[ShardFile]) -> dict[str, int]:
    """Return the samples of shards, by name, of which an `index.json` in their directory (of MDS, or of WebDataset's
    wids) says so.
    """
    known: dict[str, int] = {}
    for place, within in dict.fromkeys((file.directory.uri, file.file.rpartition("/")[0]) for file in files):
        directory = Storage(place).child(within) if within else Storage(place)
        if not directory.exists(_INDEX):
            continue
        with contextlib.suppress(CheckpointError, AttributeError, KeyError, TypeError):  # an index of something else
            index: dict[str, Any] = directory.read_json(_INDEX, dict[str, Any])
            for entry in index.get("shards", []):
                for part in filter(None, (entry.get("raw_data"), entry.get("zip_data"))):
                    known[directory.locate(part["basename"])] = int(entry["samples"])
            for entry in index.get("shardlist", []):
                known[directory.locate(PurePosixPath(entry["url"]).name)] = int(entry["nsamples"])
    return known
