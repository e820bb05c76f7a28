"""Run as: python -m tests.distributed.stream_kills DIRECTORY [KILLS].

Streams, killed again and again.

Prints, as JSON, what came of KILLS kills of each kind of stream (default 2) on
1, 2 and 3 workers in turn, and of half as many on two.
"""

import io
import json
import multiprocessing
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import fs

from tests.distributed.kills import (
    EPOCHS,
    SAMPLES,
    Recorded,
    count_steps,
    run_killed,
)
from tests.faults.s3 import bucket
from tests.tasks import Blobs
from trainers.loop import watchdog

PARQUET = "datasets over Parquet"
LINES = "lines"
LINES_WITH_STATE = "lines with a state"
KINDS = [LINES_WITH_STATE]
"""What the suite kills; a campaign has the others, too."""
_SUITE = 2
_FILES = 4
BYTES_PER_S = 200_000.0


def samples():
    """Those of `Blobs`, in order."""
    features, labels = (
        Blobs(samples=SAMPLES, dtype="float64").dataset("train").tensors
    )
    pairs = zip(features.tolist(), labels.tolist(), strict=True)
    return [
        {"features": values, "label": label, "number": number}
        for number, (values, label) in enumerate(pairs)
    ]


class Lines:
    """JSON lines, read forward from the object store by a client of its own."""

    def __init__(self, uri):
        self.uri = uri

    def __iter__(self):
        filesystem, path = fs.FileSystem.from_uri(self.uri)
        for info in filesystem.get_file_info(fs.FileSelector(path)):
            with filesystem.open_input_stream(info.path) as stream:
                yield from map(json.loads, io.TextIOWrapper(stream))


class LinesWithState(Lines):
    """The same, with its place as its state."""

    place = start = 0

    def __iter__(self):
        self.place = self.start
        self.start = 0
        for number, sample in enumerate(super().__iter__()):
            if number >= self.place:
                self.place += 1
                yield sample

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.start = state["place"]


class RecordedStream(Recorded):
    """Reads its training samples forward: from Parquet files, or lines from
    the object store.
    """

    def __init__(self, uri, kind):
        super().__init__()
        self.uri = uri
        self.kind = kind

    def stream(self, split):
        if split == "val":
            return None
        if self.kind == PARQUET:
            import datasets

            return datasets.load_dataset(
                "parquet", data_dir=self.uri, split="train", streaming=True
            )
        return (LinesWithState if self.kind == LINES_WITH_STATE else Lines)(
            self.uri
        )

    def collate(self, samples):
        if isinstance(samples[0], tuple):  # of the validation split
            return super().collate(samples)
        columns = {
            name: torch.tensor([sample[name] for sample in samples])
            for name in samples[0]
        }
        return (
            columns["features"].double(),
            columns["label"],
            columns["number"],
        )


def serve(directory, uris):
    """Fill a bucket with lines and keep it up."""
    with bucket(bytes_per_s=BYTES_PER_S) as (_, uri, _):
        filesystem, path = fs.FileSystem.from_uri(uri)
        for number in range(_FILES):
            with filesystem.open_output_stream(
                f"{path}/{number}.jsonl"
            ) as file:
                file.write(
                    "".join(
                        json.dumps(sample) + "\n" for sample in _part(number)
                    ).encode()
                )
        uris.put(uri)
        uris.get()


def _part(number):
    return samples()[
        number * SAMPLES // _FILES : (number + 1) * SAMPLES // _FILES
    ]


def main(directory, kills):
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
    }
    forking = multiprocessing.get_context("fork")
    uris = forking.SimpleQueue()
    # A process of its own, because threads of a server do not go with forks.
    server = forking.Process(target=serve, args=(directory, uris))
    server.start()
    uri = uris.get()
    parquet = directory / "parquet"
    parquet.mkdir()
    for number in range(_FILES):
        pq.write_table(
            pa.Table.from_pylist(_part(number)),
            parquet / f"train-{number}.parquet",
        )
    count_steps()
    watchdog.CAUSE_S = 0.0  # there is no launcher to see who was first
    found = {}
    epochs = EPOCHS if kills == _SUITE else 3 * EPOCHS
    for kind in [*KINDS, PARQUET, LINES] if kills > _SUITE else KINDS:
        args = {"uri": str(parquet) if kind == PARQUET else uri, "kind": kind}
        changes = {
            "task": "tests.distributed.stream_kills:RecordedStream",
            "task_args": args,
        }
        name = kind.replace(" ", "-")
        found[kind] = {
            "unbroken": run_killed(
                directory, f"{name}-unbroken", [2], 0, epochs, **changes
            ),
            "moved": run_killed(
                directory, f"{name}-moved", [1, 2, 3], kills, epochs, **changes
            ),
            "fixed": run_killed(
                directory, f"{name}-fixed", [2], kills // 2, epochs, **changes
            ),
        }
    uris.put(None)
    server.join()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else _SUITE)
