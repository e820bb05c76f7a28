"""Shards of every format against the samples that they were written from, and what is damaged against one sentence."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainers.data import shard_files
from trainers.data.shard_files import Shard
from trainers.data.shard_formats import SUFFIXES, count, kind_of, make_local, needs_no_copy, open_shard
from trainers.errors import ConfigError, SampleError, ShardError, StorageError
from trainers.storage import Storage

ROWS = 40


def tar(names: list[str], form: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar whose members hold their own names; one that ends in / is a directory."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=form) as archive:
        for name in names:
            member = tarfile.TarInfo(name.rstrip("/"))
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            member.size = 0 if name.endswith("/") else len(name.encode())
            archive.addfile(member, io.BytesIO(name.encode()))
    return whole.getvalue()


def mds(columns: dict[str, tuple[str, int | None]], samples: list[list[bytes]]) -> bytes:
    """After the documented format: count, offsets, description, samples."""
    described = {"version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": 1 << 26}
    described["column_names"] = list(columns)
    described["column_encodings"] = [encoding for encoding, _ in columns.values()]
    described["column_sizes"] = [size for _, size in columns.values()]
    head = json.dumps(described, sort_keys=True).encode()
    fixed = [size is not None for _, size in columns.values()]
    bodies = [
        b"".join(len(v).to_bytes(4, "little") for v, f in zip(sample, fixed, strict=True) if not f) + b"".join(sample)
        for sample in samples
    ]
    offsets = np.cumsum([4 * (len(samples) + 2) + len(head), *map(len, bodies)]).astype("<u4")
    return len(samples).to_bytes(4, "little") + offsets.tobytes() + head + b"".join(bodies)


def arrow(table: pa.Table, stream: bool = False, **options: Any) -> bytes:
    whole = io.BytesIO()
    opened = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opened(whole, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=7)
    return whole.getvalue()


def parquet(table: pa.Table) -> bytes:
    whole = io.BytesIO()
    pq.write_table(table, whole, row_group_size=11)
    return whole.getvalue()


NAMES = [f"d.v1/s{i:03d}.{field}" for i in range(ROWS) for field in ("jpg", "CLS", "meta.json")]
TAR_SAMPLES = [
    {"__key__": f"d.v1/s{i:03d}"}
    | {field.lower(): f"d.v1/s{i:03d}.{field}".encode() for field in ("jpg", "CLS", "meta.json")}
    for i in range(ROWS)
]
LINES = [{"text": "ä" * i, "i": i} for i in range(ROWS)]
JSONL = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in LINES)
TABLE = pa.table(
    {
        "image": pa.array([{"bytes": bytes([i] * i), "path": f"{i}.jpg"} for i in range(ROWS)]),
        "word": pa.array([f"w{i % 3}" for i in range(ROWS)]).dictionary_encode(),
        "label": [None if i % 5 == 0 else i for i in range(ROWS)],
    }
)
TABLE_SAMPLES = TABLE.to_pylist()
MDS = mds(
    {"text": ("str", None), "n": ("int", 8)}, [[b"x" * i, i.to_bytes(8, "little", signed=True)] for i in range(ROWS)]
)
MDS_SAMPLES = [{"text": "x" * i, "n": i} for i in range(ROWS)]
SHARDS: dict[str, tuple[bytes, list[dict[str, Any]]]] = {
    "a.tar": (tar(NAMES), TAR_SAMPLES),
    "a.tar.gz": (gzip.compress(tar(NAMES, tarfile.GNU_FORMAT)), TAR_SAMPLES),
    "a.tgz": (gzip.compress(tar(NAMES)), TAR_SAMPLES),
    "a.tar.zst": (pa.compress(tar(NAMES), "zstd").to_pybytes(), TAR_SAMPLES),
    "a.jsonl": (JSONL, LINES),
    "a.ndjson.gz": (gzip.compress(JSONL[:300]) + gzip.compress(JSONL[300:]), LINES),
    "a.jsonl.zst": (pa.compress(JSONL, "zstd").to_pybytes(), LINES),
    "a.parquet": (parquet(TABLE), TABLE_SAMPLES),
    "a.arrow": (arrow(TABLE), TABLE_SAMPLES),
    "a.feather": (arrow(TABLE, compression="lz4"), TABLE_SAMPLES),
    "a.ipc": (arrow(TABLE, stream=True), TABLE_SAMPLES),
    "a.mds": (MDS, MDS_SAMPLES),
    "a.mds.zstd": (pa.compress(MDS, "zstd").to_pybytes(), MDS_SAMPLES),
}


def opened(directory: Path, name: str, data: bytes) -> Shard:
    """By the way that a caller goes: as it lies, or by its local form."""
    file, local = directory / name, directory / f"{name}.local"
    file.write_bytes(data)
    if needs_no_copy(file):
        return open_shard(file, name)
    with Storage(str(directory)).reader(name) as source:
        make_local(source, name, local)
    return open_shard(local, name)


def read(directory: Path, name: str, data: bytes) -> list[dict[str, Any]]:
    shard = opened(directory, name, data)
    with contextlib.closing(shard):
        return shard.take(range(len(shard)))


@pytest.mark.parametrize("name", SHARDS)
def test_every_sample_comes_back_in_any_order(name: str, tmp_path: Path) -> None:
    data, samples = SHARDS[name]
    with contextlib.closing(opened(tmp_path, name, data)) as shard:
        assert len(shard) == ROWS
        for rows in (list(range(ROWS)), [39, 0, 7, 6, 7]):
            assert shard.take(rows) == [samples[row] for row in rows]
        for row in (-1, ROWS):
            with pytest.raises(IndexError):
                shard.take([row])


@pytest.mark.parametrize("name", ["a.tar", "a.jsonl", "a.arrow"])
def test_an_index_that_was_saved_is_all_that_the_next_one_needs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, samples = SHARDS[name]
    first = opened(tmp_path, name, data)
    assert first.index is not None
    np.save(tmp_path / "index.npy", first.index, allow_pickle=False)
    for searched in (shard_files.TarShard, shard_files.JsonLinesShard):
        monkeypatch.setattr(searched, "_scan", lambda self: pytest.fail("searched again"))
    file = Path(first._file.name)
    index = np.load(tmp_path / "index.npy")
    assert open_shard(file, name, index).take(range(ROWS)) == samples
    with file.open("ab") as more:
        more.write(bytes(512))
    with pytest.raises(ShardError, match=r"shard a\..* damaged: it has .* bytes, and had .* when it was indexed"):
        open_shard(file, name, index)


@pytest.mark.parametrize("name", ["a.tar", "a.jsonl", "a.arrow", "a.mds"])
def test_a_child_reads_on_beside_its_parent(name: str, tmp_path: Path) -> None:
    data, samples = SHARDS[name]
    shard = opened(tmp_path, name, data)
    child = os.fork()
    good = all(shard.take([row]) == [samples[row]] for _ in range(20) for row in range(ROWS))
    if child == 0:
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert good


@pytest.mark.parametrize(("name", "expected"), [("a.parquet", ROWS), ("a.mds", ROWS), ("a.mds.zstd", ROWS)])
def test_a_shard_is_counted_by_what_it_says(name: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(SHARDS[name][0])
    assert count(Storage(f"{tmp_path}/{name}")) == expected
    (tmp_path / name).write_bytes(SHARDS[name][0][:3])
    with pytest.raises(ShardError, match=name):
        count(Storage(f"file://{tmp_path}/{name}"))


def test_names_say_what_a_shard_is(tmp_path: Path) -> None:
    assert [kind_of(name) for name in SHARDS] == ["tar"] * 4 + ["jsonl"] * 3 + ["arrow"] * 4 + ["mds"] * 2
    assert all(name.endswith(SUFFIXES) for name in SHARDS)
    assert count(Storage(f"{tmp_path}/a.tar")) is None
    with pytest.raises(ConfigError, match=r'"a.zip", but is no shard by its name; give files that end in \.tar, '):
        kind_of("a.zip")
    for name, (data, _) in SHARDS.items():
        (tmp_path / name).write_bytes(data)
        assert needs_no_copy(tmp_path / name) == (name in ("a.tar", "a.jsonl", "a.arrow", "a.mds")), name


LONG = ["x" * 150 + ".jpg", "y" * 90 + "/" + "z" * 120 + ".jpg", "é" * 80 + ".jpg"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.jpg", "b.jpg", "a.cls", "a.txt"], [("a", "jpg"), ("b", "jpg"), ("a", "cls", "txt")]),
        (["a.jpg", "b.jpg", "a.jpg"], [("a", "jpg"), ("b", "jpg"), ("a", "jpg")]),
        (["a.jpg", "README", "a/", "a.cls"], [("a", "jpg", "cls")]),
        (["__m__/a.jpg", "__a__", "__a.b__", "__x.jpg"], [("__x", "jpg")]),
        ([".a.jpg", "d/a.jpg", "d/._a.jpg", "d/a.cls", ".h/c.x"], [("d/a", "jpg", "cls"), (".h/c", "x")]),
        (["./d.jpg", "d.v1/e.Tar.GZ", "dir.x/noext"], [("./d", "jpg"), ("d.v1/e", "tar.gz")]),
        (LONG, [(name[:-4], "jpg") for name in LONG]),
        (["README"], []),
    ],
)
def test_members_are_grouped_as_webdataset_does(
    names: list[str], expected: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """Read by webdataset 1.0.2, too, when this was written; only `d/._a.jpg` is a sample "d/" there."""
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        samples = read(tmp_path, "a.tar", tar(names, form))
        assert [(sample["__key__"], *list(sample)[1:]) for sample in samples] == expected


def test_lines_of_any_length_across_pieces_with_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"\xef\xbb\xbf\n" + b'{"a": 1}\r\n\r\n   \n\n{"b": "' + b"x" * 70 + b'"}\n\t\n{"c": 3}'
    expected = [{"a": 1}, {"b": "x" * 70}, {"c": 3}]
    for piece in (1, 2, 7, 1 << 20):
        monkeypatch.setattr(shard_files, "_PIECE", piece)
        for data in (text, text + b"\n", text[3:] + b"\n \n"):
            assert read(tmp_path, "a.jsonl", data) == expected
    assert read(tmp_path, "a.jsonl", b"") == []
    with pytest.raises(ShardError, match=r"a\.jsonl is damaged: its last line is cut off"):
        opened(tmp_path, "a.jsonl", text[:-1])
    for line, why in (
        (b"[1]", "a JSON list is no object"),
        (b"{", "Expecting"),
        (b"\0\0", "char 0"),
        (b"\xff", "utf-8"),
    ):
        shard = opened(tmp_path, "a.jsonl", b"{}\n" + line + b"\n{}\n")
        assert shard.take([0, 2]) == [{}, {}]
        with pytest.raises(SampleError, match=rf"sample 1 of shard a\.jsonl is damaged: .*{why}.*; fix"):
            shard.take([1])


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_lists_of_numbers_are_arrays_of_their_own(name: str, tmp_path: Path) -> None:
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype="float32").reshape(2, 2, 3))
    table = pa.table(
        {
            "tokens": pa.array([[1, 2], []], pa.list_(pa.int16())),
            "large": pa.array([[0.5], None], pa.large_list(pa.float64())),
            "fixed": pa.array([[1, 2], [3, 4]], pa.list_(pa.uint8(), 2)),
            "holes": pa.array([[1, None], [2, 3]]),
            "words": [["a"], []],
            "tensor": tensor,
        }
    )
    first, second = read(tmp_path, name, parquet(table) if name == "a.parquet" else arrow(table))
    for sample, key, dtype, expected in (
        (first, "tokens", "int16", [1, 2]),
        (second, "tokens", "int16", []),
        (first, "large", "float64", [0.5]),
        (second, "fixed", "uint8", [3, 4]),
        (second, "tensor", "float32", [[6, 7, 8], [9, 10, 11]]),
    ):
        assert sample[key].dtype == dtype
        assert sample[key].tolist() == expected
        sample[key][...] = 0  # writable, and the file stays
    assert second["large"] is None
    assert first["holes"] == [1, None]
    assert first["words"] == ["a"]


def test_every_encoding_of_mds(tmp_path: Path) -> None:
    values: dict[str, tuple[str, int | None, bytes, Any]] = {
        "int": ("int", 8, np.int64(-5).tobytes(), -5),
        "u8": ("uint8", 1, b"\xff", np.uint8(255)),
        "f16": ("float16", 2, np.float16(0.5).tobytes(), np.float16(0.5)),
        "i32": ("int32", 4, np.int32(-7).tobytes(), np.int32(-7)),
        "text": ("str", None, "ä".encode(), "ä"),
        "big": ("str_int", None, b"1" * 30, int("1" * 30)),
        "float": ("str_float", None, b"0.1", 0.1),
        "json": ("json", None, b'{"a": [1]}', {"a": [1]}),
        "raw": ("bytes", None, b"", b""),
        "image": ("jpeg", None, b"\xff\xd8", b"\xff\xd8"),
        "any": ("ndarray", None, bytes([34, 2 << 2 | 0, 1, 2]) + np.float32([1, 2]).tobytes(), np.float32([[1, 2]])),
        "row": ("ndarray:int16", None, bytes([1 << 2 | 1, 2, 0]) + np.int16([3, 4]).tobytes(), np.int16([3, 4])),
        "grid": ("ndarray:uint8:2,2", 4, bytes([1, 2, 3, 4]), np.uint8([[1, 2], [3, 4]])),
    }
    columns = {name: (encoding, size) for name, (encoding, size, _, _) in values.items()}
    [sample] = read(tmp_path, "a.mds", mds(columns, [[data for _, _, data, _ in values.values()]]))
    assert list(sample) == list(values)
    for name, (_, _, _, expected) in values.items():
        assert type(sample[name]) is type(expected)
        assert np.array_equal(sample[name], expected), name
    sample["grid"][...] = 0  # writable


@pytest.mark.parametrize("encoding", ["pkl", "pil", "ndarray:object", "ndarray:int8:a", "list[pil]"])
def test_an_encoding_that_is_not_read_is_refused_by_name(encoding: str, tmp_path: Path) -> None:
    data = mds({"x": (encoding, None)}, [[pickle.dumps(1)]])
    with pytest.raises(ConfigError) as met:
        opened(tmp_path, "a.mds", data)
    assert "column x" in str(met.value)
    assert encoding in str(met.value)
    assert "a.mds" in str(met.value)


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def claimed(size: int) -> bytes:
    """A tar whose first header claims a size, with a checksum that fits."""
    data = bytearray(tar(["a.jpg"]))
    data[124:136] = b"\x80" + size.to_bytes(11, "big") if size >= 0 else b"\xff" + (256**11 + size).to_bytes(11, "big")
    data[148:156] = b" " * 8
    data[148:156] = f"{sum(data[:512]):06o}\0 ".encode()
    return bytes(data)


WHOLE = tar(NAMES)
DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "a member that is cut": ("a.tar", tar(["a.jpg"])[:515], "bytes at byte 512"),
    "no end": ("a.tar", tar(["a.jpg"])[:1024], "at byte 1,024 is neither a member nor the end"),
    "a header in the middle": ("a.tar", changed(WHOLE, 10 * 1024, b"?"), "at byte 10,240 is neither"),
    "a hole in the middle": ("a.tar", changed(WHOLE, 10 * 1024, bytes(512)), "ends at byte 10,240, and more follows"),
    "an exabyte": ("a.tar", claimed(1 << 60), "1,152,921,504,606,846,976 bytes"),
    "a size below zero": ("a.tar", claimed(-512), "-512 bytes"),
    "one field twice": ("a.tar", tar(["a.jpg", "a.JPG"]), "sample a has jpg twice"),
    "nothing": ("a.tar", b"", "empty"),
    "nothing compressed": ("a.jsonl.gz", b"", "it is empty"),
    "half of a gzip": ("a.jsonl.gz", gzip.compress(JSONL)[:-9], "Truncated"),
    "half of a zstd": ("a.tar.zst", SHARDS["a.tar.zst"][0][:-9], "Truncated"),
    "half of a parquet": ("a.parquet", SHARDS["a.parquet"][0][:-9], "."),
    "half of an arrow file": ("a.arrow", SHARDS["a.arrow"][0][:-200], "."),
    "one name twice": ("a.arrow", arrow(pa.table([[1], [2]], names=["x", "x"])), "x, x, two have one name"),
    "more samples than bytes": ("a.mds", changed(MDS, 0, b"\xff" * 4), "17,179,869,184 bytes"),
    "offsets that go back": ("a.mds", changed(MDS, 8, bytes(4)), "offsets do not add up"),
    "a cut": ("a.mds", MDS[:-1], "offsets do not add up"),
    "another version": ("a.mds", MDS.replace(b'"version": 2', b'"version": 3'), "version"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_one_sentence_with_the_shards_name(case: str, tmp_path: Path) -> None:
    name, data, words = DAMAGED[case]
    with pytest.raises(ShardError) as met:
        opened(tmp_path, name, data)
    assert str(met.value).startswith(f"shard {name} is damaged: ")
    assert words in str(met.value)
    assert str(met.value).endswith("; fix or leave it out")
    assert "\n" not in str(met.value)


def test_a_damaged_sample_is_named_and_the_others_stay(tmp_path: Path) -> None:
    sizes = mds({"a": ("bytes", None), "n": ("ndarray", None)}, [[b"xy", bytes([34, 1 << 2, 1]) + bytes(4)]] * 2)
    at = len(sizes) - 17  # of the last sample: the sizes, then "xy"
    for data, why in ((changed(sizes, at, b"\xff"), "add up"), (changed(sizes, at + 10, b"\x63"), "KeyError 99")):
        shard = opened(tmp_path, "a.mds", data)
        assert shard.take([0])[0]["a"] == b"xy"
        with pytest.raises(SampleError, match=rf"sample 1 of shard a\.mds is damaged: .*{why}"):
            shard.take([0, 1])
    shard = opened(tmp_path, "a.tar", tar(["k/a.jpg", "k/b.jpg"]))
    os.truncate(tmp_path / "a.tar", 1540)
    with pytest.raises(SampleError, match=r"sample 1 \(k/b\) of shard a\.tar is damaged"):
        shard.take([1])


def test_a_source_that_fails_is_no_damage(tmp_path: Path) -> None:
    class Failing(io.BytesIO):
        calls = 0

        def read(self, size: int | None = -1) -> bytes:
            self.calls += 1
            if self.calls > 1:
                raise OSError("the network is down")
            return super().read(size)

    for name in ("a.parquet", "a.ipc"):
        with pytest.raises(StorageError, match=r"could not read a\..*: the network is down"):
            make_local(Failing(SHARDS[name][0]), name, tmp_path / "local")
    with pytest.raises(OSError, match="the network is down"):
        make_local(Failing(JSONL * 100_000), "a.jsonl", tmp_path / "local")
    with pytest.raises(FileNotFoundError):
        open_shard(tmp_path / "nowhere", "a.tar")


def test_no_more_is_asked_for_than_there_is(tmp_path: Path) -> None:
    asked = []

    class Asked(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size or 0)
            return super().read(size)

    data = changed(SHARDS["a.ipc"][0], 4, b"\xff\xff\xff\x7f")  # the size of the schema
    with pytest.raises(ShardError, match=r"a\.ipc is damaged"):
        make_local(Asked(data), "a.ipc", tmp_path / "local")
    assert max(asked) <= len(data)


@st.composite
def damage(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    places = draw(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=3))
    end = draw(st.none() | st.floats(0, 1))

    def apply(data: bytes) -> bytes:
        found = bytearray(data)
        for place, change in places:
            found[int(place * len(data))] ^= change
        return bytes(found if end is None else found[: int(end * len(data))])

    return apply


@pytest.mark.parametrize("name", SHARDS)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage())
def test_any_damage_is_a_shard_or_a_sample_error(name: str, tmp_path: Path, broken: Callable[[bytes], bytes]) -> None:
    with contextlib.suppress(ShardError, ConfigError):
        samples = read(tmp_path, name, broken(SHARDS[name][0]))
        assert all(isinstance(sample, dict) for sample in samples)
