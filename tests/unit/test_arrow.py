"""Arrow and Parquet files against the table that they were written from: every value,
whatever the layout.
"""

import io
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainers import ArrowDataset
from trainers.config.sections import DataConfig
from trainers.data.batch import fetch
from trainers.errors import ConfigError
from trainers.task import Task, task_feed

torch.set_num_threads(1)
ROWS = 1000
WIDTH = 6
NUMBERS = ["int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64"]


def column(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    return (
        np.random.default_rng(len(dtype)).standard_normal((ROWS, *shape)) * 40
    ).astype(dtype)


def nested(values: np.ndarray[Any, Any]) -> pa.Array:
    array = pa.array(values.reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def table() -> pa.Table:
    words = [f"sample {i}" * (i % 4) for i in range(ROWS)]
    return pa.table(
        {
            **{name: column(name) for name in NUMBERS},
            "flag": np.arange(ROWS) % 3 == 0,
            "row": nested(column("float32", WIDTH)),
            "image": nested(column("uint8", 2, 3)),
            "raw": pa.array([bytes([i % 256] * 5) for i in range(ROWS)], pa.binary(5)),
            "text": words,
            "bytes": [word.encode() for word in words],
            "tokens": [list(range(i % 5)) for i in range(ROWS)],
        }
    )


def write_ipc(
    path: Path,
    data: pa.Table,
    rows: int | None = None,
    stream: bool = False,
    **options: Any,
) -> Path:
    opened = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opened(
        str(path), data.schema, options=pa.ipc.IpcWriteOptions(**options)
    ) as writer:
        writer.write_table(data, max_chunksize=rows)
    return path


def layouts(directory: Path, data: pa.Table) -> dict[str, Any]:
    """The same rows in every way that they may be kept."""
    parts = directory / "parts"
    parts.mkdir()
    for index, start in enumerate(range(0, ROWS, 301)):
        write_ipc(parts / f"{index}.arrow", data.slice(start, 301), 77)
    write_ipc(parts / "9.arrow", data.slice(0, 0))
    pq.write_table(data, directory / "groups.parquet", row_group_size=130)
    return {
        "one batch": write_ipc(directory / "one.arrow", data),
        "batches": write_ipc(directory / "many.arrow", data, 77),
        "stream": write_ipc(directory / "stream.arrow", data, 77, stream=True),
        "compressed": write_ipc(directory / "lz4.arrow", data, 77, compression="lz4"),
        "parquet": directory / "groups.parquet",
        "directory": parts,
        "glob": str(parts / "[0-9].arrow"),
        "uri": f"file://{directory}/one.arrow",
        "mixed": [
            write_ipc(directory / "head.arrow", data.slice(0, 400)),
            _tail(directory, data),
        ],
    }


def _tail(directory: Path, data: pa.Table) -> Path:
    pq.write_table(data.slice(400), directory / "tail.parquet")
    return directory / "tail.parquet"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("arrow")
    return {"cache": directory / "cache", **layouts(directory, table())}


@pytest.mark.parametrize(
    "layout",
    [
        "one batch",
        "batches",
        "stream",
        "compressed",
        "parquet",
        "directory",
        "glob",
        "uri",
        "mixed",
    ],
)
def test_every_value_comes_back_from_every_layout(
    layout: str, kept: dict[str, Any]
) -> None:
    dataset = ArrowDataset(kept[layout], cache=kept["cache"])
    assert len(dataset) == ROWS
    generator = torch.Generator().manual_seed(0)
    for rows in (
        torch.randperm(ROWS, generator=generator),
        torch.tensor([999, 0, 0, 76, 77]),
        torch.tensor([500]),
    ):
        batch = fetch(
            dataset,
            rows.tolist(),
            lambda samples: pytest.fail("collated a batch that was ready"),
        )
        for name in NUMBERS:
            assert torch.equal(batch[name], torch.from_numpy(column(name))[rows]), name
        assert torch.equal(
            batch["row"], torch.from_numpy(column("float32", WIDTH))[rows]
        )
        assert torch.equal(
            batch["image"], torch.from_numpy(column("uint8", 2, 3))[rows]
        )
        assert torch.equal(
            batch["raw"], (rows % 256).to(torch.uint8)[:, None].expand(-1, 5)
        )
        assert torch.equal(batch["flag"], rows % 3 == 0)
        assert batch["text"] == [f"sample {i}" * (i % 4) for i in rows.tolist()]
        assert batch["bytes"] == [text.encode() for text in batch["text"]]
        assert [tokens.tolist() for tokens in batch["tokens"]] == [
            list(range(i % 5)) for i in rows.tolist()
        ]


def test_a_batch_has_the_nesting_of_the_columns(kept: dict[str, Any]) -> None:
    as_tuple = ArrowDataset(
        kept["parquet"], [["float32", "float32"], "int64"], cache=kept["cache"]
    )
    pairs, labels = as_tuple.__getitems__([7, 3])
    assert torch.equal(
        pairs, torch.from_numpy(column("float32"))[[7, 3]][:, None].expand(-1, 2)
    )
    assert torch.equal(labels, torch.from_numpy(column("int64"))[[7, 3]])
    sample = as_tuple[-1]
    assert torch.equal(sample[0], pairs.new_tensor([column("float32")[-1]] * 2))
    as_dict = ArrowDataset(kept["one batch"], {"x": "row"})
    assert torch.equal(as_dict[4]["x"], torch.from_numpy(column("float32", WIDTH))[4])


def pad(tokens: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-1)


def test_decode_makes_tensors_of_what_has_no_width(kept: dict[str, Any]) -> None:
    dataset = ArrowDataset(kept["batches"], ["tokens"], decode={"tokens": pad})
    assert dataset.__getitems__([2, 4, 5])[0].tolist() == [
        [0, 1, -1, -1],
        [0, 1, 2, 3],
        [-1, -1, -1, -1],
    ]


@pytest.mark.parametrize("indices", [[ROWS], [-1], [3, ROWS + 5]])
def test_rows_that_are_not_there(indices: list[int], kept: dict[str, Any]) -> None:
    """A window over the file would give the bytes behind a column as its values."""
    for layout in ("one batch", "directory"):
        with pytest.raises(IndexError):
            ArrowDataset(kept[layout], ["row"]).__getitems__(indices)
    assert (
        len(list(ArrowDataset(kept["one batch"], ["int8"]))) == ROWS
    )  # iteration ends


class Rows(Task):
    def loss(self, outputs: Any, batch: Any) -> Tensor:
        raise AssertionError


@pytest.mark.parametrize(
    "config",
    [{"resident": True}, pytest.param({"num_workers": 2}, marks=pytest.mark.full), {}],
    ids=str,
)
def test_through_the_loader(config: dict[str, Any], kept: dict[str, Any]) -> None:
    dataset = ArrowDataset(kept["parquet"], ["row", "int64"], cache=kept["cache"])
    feed = task_feed(
        dataset, Rows(), DataConfig(**config), torch.device("cpu"), sharers=1, seed=0
    )
    if isinstance(feed._loader, DataLoader) and config.get("num_workers"):
        feed._loader.multiprocessing_context = multiprocessing.get_context("spawn")
    plan = list(torch.randperm(ROWS).split(96))
    assert (feed.resident is not None) == bool(config.get("resident"))
    for rows, (values, labels) in zip(
        plan, feed.batches(plan, training=True), strict=True
    ):
        assert torch.equal(values, torch.from_numpy(column("float32", WIDTH))[rows])
        assert torch.equal(labels, torch.from_numpy(column("int64"))[rows])
    feed.close()


def test_a_conversion_is_done_once_and_again_for_a_new_file(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    file = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": [1, 2, 3]}), file)
    for _ in range(2):
        ArrowDataset(file, ["x"], cache=cache)
        assert len(list(cache.glob("*.arrow"))) == 1
    pq.write_table(pa.table({"x": [4, 5, 6, 7]}), file)
    assert ArrowDataset(file, ["x"], cache=cache).__getitems__([0])[0].tolist() == [4]
    assert not list(cache.glob("*.tmp"))


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_mistakes_name_their_field(tmp_path: Path) -> None:
    good = write(tmp_path / "good.parquet", x=[1.0, 2.0], label=[0, 1], text=["a", "b"])
    holes = write(tmp_path / "holes.parquet", x=[1.0, None], label=[0, 1])
    other = write(tmp_path / "other.parquet", x=[1, 2], label=[0, 1])
    dates = write(tmp_path / "dates.parquet", x=pa.array([1, 2], pa.timestamp("s")))
    empty = write(tmp_path / "empty.parquet", x=pa.array([], pa.int64()))
    lists = write(
        tmp_path / "lists.parquet",
        x=pa.array([[1.0, None], [2.0, 3.0]], pa.list_(pa.float32(), 2)),
    )
    (tmp_path / "cut.parquet").write_bytes(good.read_bytes()[:-30])
    (tmp_path / "void").mkdir()

    cache = tmp_path / "cache"
    cases = [
        (tmp_path / "void", None, {}, "files"),
        (tmp_path / "cut.parquet", None, {}, "files"),
        (empty, ["x"], {}, "files"),
        (good, ["labl"], {}, "columns"),
        (holes, ["x"], {}, "column x"),
        (lists, ["x"], {}, "column x"),
        (dates, ["x"], {}, "column x"),
        ([good, other], ["x"], {}, "column x"),
        (good, [["x", "label"]], {}, "column label"),
        (good, ["x"], {"decode": {"x": pad}}, "decode"),
    ]
    for files, columns, options, field in cases:
        with pytest.raises(ConfigError) as met:
            ArrowDataset(files, columns, cache=cache, **options)
        assert met.value.field == field
    assert (
        ArrowDataset(holes, ["label"], cache=cache)[1][0] == 1
    )  # another column's nulls are of no matter


def test_no_code_in_a_file_is_run(tmp_path: Path) -> None:
    """An extension type of pickled Python, as pyarrow once wrote them, is read as its
    plain storage.
    """
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (marker,))

    stored = io.BytesIO()
    pickle.Pickler(stored).dump(Evil())
    metadata = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": stored.getvalue(),
    }
    schema = pa.schema(
        [pa.field("x", pa.int64(), metadata=metadata)], {"pandas": stored.getvalue()}
    )
    file = write_ipc(tmp_path / "evil.arrow", pa.table({"x": [1, 2]}, schema=schema))
    assert ArrowDataset(file, ["x"])[1][0] == 2
    assert not marker.exists()
