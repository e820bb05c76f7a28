"""Run as: python -m tests.distributed.stream_kills DIRECTORY [KILLS]. Streams on an S3 server, killed again and again.

Prints, as JSON, what came of KILLS kills of each kind of stream (default 2) on 1, 2 and 3 workers in turn, and of half
as many on two.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyarrow import fs

from tests.distributed.kills import EPOCHS, Recorded, count_steps, run_killed
from tests.faults.s3 import bucket
from tests.stream_tasks import numbered, write
from trainers.data.shards import Shards
from trainers.loop import watchdog

SHARDS = [".tar", ".tar.gz", ".jsonl.gz", ".parquet", ".mds"]
LINES = ["lines with a state", "lines"]
_SUITE = 2
IN_SUITE = [".tar", "lines with a state"]
"""Without those of which only the reading of bytes, or of a place, is another: unit tests have each of them."""
SIZES = [17, 30, 2, 25, 25]
BYTES_PER_S = 200_000.0


class Lines:
    """JSON lines, read forward from the object store by a client of its own."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def __iter__(self) -> Iterator[Any]:
        filesystem, path = fs.FileSystem.from_uri(self.uri)
        for info in filesystem.get_file_info(fs.FileSelector(path)):
            with filesystem.open_input_stream(info.path) as stream:
                yield from map(numbered, map(json.loads, io.TextIOWrapper(stream)))


class LinesWithState(Lines):
    """The same, with its place as its state."""

    place = start = 0

    def __iter__(self) -> Iterator[Any]:
        self.place, self.start = self.start, 0
        for number, sample in enumerate(super().__iter__()):
            if number >= self.place:
                self.place += 1
                yield sample

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]


class RecordedStream(Recorded):
    """Reads its training samples from the object store."""

    def __init__(self, uri: str, kind: str, cache: str) -> None:
        super().__init__()
        self.uri, self.kind, self.cache = uri, kind, cache

    def stream(self, split: str) -> Any:
        if split == "val":
            return None
        if self.kind in LINES:
            return (LinesWithState if self.kind == LINES[0] else Lines)(self.uri)
        place, mark, options = self.uri.partition("?")
        names = {".tar": "/train-{000..004}.tar", ".parquet": "/train-*.parquet"}.get(self.kind, "")
        return Shards(
            f"{place}{names}{mark}{options}", decode=numbered, shuffle_buffer=20, cache=self.cache, cache_bytes=40_000
        )


def serve(directory: Path, uris: Any) -> None:
    """Fill a bucket and keep it up."""
    with bucket(directory, (), BYTES_PER_S) as uri:
        for suffix in [*SHARDS, ".jsonl"]:
            write(directory / f"data{suffix}", suffix, SIZES)
            filesystem, path = fs.FileSystem.from_uri(_below(uri, suffix))
            fs.copy_files(str(directory / f"data{suffix}"), path, destination_filesystem=filesystem)
        uris.put(uri)
        uris.get()


def _below(uri: str, suffix: str) -> str:
    place, mark, options = uri.partition("?")
    return f"{place}/{suffix.strip('.')}{mark}{options}"


def main(directory: Path, kills: int) -> None:
    os.environ |= {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    spawning = multiprocessing.get_context("spawn")  # threads of a server do not go with forks
    uris = spawning.SimpleQueue()
    server = spawning.Process(target=serve, args=(directory, uris))
    server.start()
    uri = uris.get()
    count_steps()
    watchdog.CAUSE_S = 0.0  # there is no launcher to see who was first
    found, epochs = {}, EPOCHS if kills == _SUITE else 2 * EPOCHS
    for kind in [*SHARDS, *LINES] if kills > _SUITE else IN_SUITE:
        place = _below(uri, ".jsonl" if kind in LINES else kind)
        args = {"uri": place, "kind": kind, "cache": str(directory / "cache")}
        changes = {"task": "tests.distributed.stream_kills:RecordedStream", "task_args": args}
        name = kind.strip(".").replace(" ", "-").replace(".", "-")
        found[kind] = {
            "unbroken": run_killed(directory, f"{name}-unbroken", [2], 0, epochs, **changes),
            "moved": run_killed(directory, f"{name}-moved", [1, 2, 3], kills, epochs, **changes),
            "fixed": run_killed(directory, f"{name}-fixed", [2], kills // 2, epochs, **changes),
        }
    uris.put(None)
    server.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else _SUITE)
