"""Shards: each sample once an epoch, in an order found at any place; a bounded cache; what is damaged or missing."""

from __future__ import annotations

import json
import re
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from tests.specs import losses, make
from tests.stream_tasks import FEATURES, decode, write
from tests.tasks import Blobs
from trainers.config.sections import DataConfig
from trainers.data import shard_cache
from trainers.data.feed import Feed
from trainers.data.sampler import StepSampler
from trainers.data.shard_formats import make_local
from trainers.data.shard_order import ShardOrder
from trainers.data.shards import Shards
from trainers.devices.group import Group
from trainers.errors import ConfigError, SampleError, ShardError, StorageError
from trainers.launch.local import run_local
from trainers.storage import Storage

SIZES = [5, 1, 30, 0, 11, 7, 20, 3]
SUFFIXES = [".tar", ".tar.gz", ".jsonl", ".jsonl.gz", ".parquet", ".mds"]


@pytest.mark.parametrize("sizes", [[1], [5, 0, 7, 3], [3] * 9, [100, 1, 50], [300] * 10])
@pytest.mark.parametrize(("interleave", "buffer"), [(1, 1), (2, 4), (8, 3), (8, 10_000)])
def test_each_sample_comes_once_an_epoch_however_it_is_cut(sizes: list[int], interleave: int, buffer: int) -> None:
    order, length = ShardOrder(np.array(sizes), 3, interleave, buffer), sum(sizes)
    orders = set()
    for epoch in range(3):
        for batch in (1, 7, length):
            steps = [order.rows(epoch, start, start + batch) for start in range(0, length, batch)]
            assert torch.cat(steps).sort().values.tolist() == list(range(length))
        orders.add(tuple(order.rows(epoch, 0, length).tolist()))
    assert len(orders) == (1 if length == 1 else 3)


def test_a_place_far_into_an_epoch_is_found_without_what_comes_before() -> None:
    """1e9 samples in 100,000 shards: nothing is as long as the samples."""
    sizes = np.full(100_000, 10_000)
    tracemalloc.start()
    order = ShardOrder(sizes, 1, 8, 10_000)
    rows = order.rows(3, 700_000_000, 700_000_256)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6
    assert len(set(rows.tolist())) == 256
    assert len(np.unique(rows.numpy() // 10_000)) <= 16, "of a few shards only"


def test_ranks_read_from_shards_of_their_own() -> None:
    """The pieces that are read side by side are split over ranks, so each node fetches its own."""
    order, dataset = ShardOrder(np.full(64, 1000), 0, 8, 500), TensorDataset(torch.arange(64_000))
    shards: list[set[int]] = [set() for _ in range(4)]
    for rank in range(4):
        sampler = StepSampler(dataset, 4, rank, global_batch_size=256, of_shards=order)
        for step in range(sampler.steps_per_epoch):
            shards[rank] |= set((sampler.share(step) // 1000).tolist())
    assert [len(of_rank) for of_rank in shards] == [16] * 4
    assert len(set.union(*shards)) == 64


def read(shards: Shards, rows: list[int]) -> Any:
    return [(features.tolist(), int(label)) for features, label in shards.__getitems__(rows)]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_the_samples_in_any_order(tmp_path: Path, suffix: str) -> None:
    sizes = [size for size in SIZES if size or suffix != ".parquet"]
    write(tmp_path / "data", suffix, sizes)
    shards = Shards(tmp_path / "data", decode=decode, cache=tmp_path / "cache")
    features, labels = Blobs(samples=sum(SIZES), dtype="float64").dataset("train").tensors
    assert len(shards) == sum(SIZES)
    rows = torch.randperm(sum(SIZES)).tolist()
    assert read(shards, rows) == [(features[row].tolist(), int(labels[row])) for row in rows]
    assert len(shards[-1][0]) == FEATURES
    shards.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_a_feed_reads_them_with_and_without_loader_processes(tmp_path: Path, suffix: str, workers: int) -> None:
    write(tmp_path / "data", suffix, [50] * 12)
    shards = Shards(tmp_path / "data", decode=decode, cache=tmp_path / "cache")
    features, labels = Blobs(samples=600, dtype="float64").dataset("train").tensors
    order = shards.order(5)
    config = DataConfig(num_workers=workers)
    feed = Feed(shards, default_collate, None, config, torch.device("cpu"), sharers=1, seed=0)
    for epoch in range(2):
        asked = [order.rows(epoch, start, start + 32) for start in range(0, 600, 32)]
        for rows, (read_features, read_labels) in zip(asked, feed.batches(iter(asked), training=True), strict=True):
            assert torch.equal(read_features, features[rows])
            assert torch.equal(read_labels, labels[rows])
    feed.close()


def test_the_cache_is_bounded_and_what_is_held_stays(tmp_path: Path) -> None:
    paths = write(tmp_path / "data", ".jsonl.gz", [40] * 12)
    uncompressed = 12_000
    assert paths[0].stat().st_size < uncompressed
    limit = 5 * uncompressed
    cache = tmp_path / "cache"
    shards = Shards(tmp_path / "data", decode=decode, cache=cache, cache_bytes=limit)
    other = Shards(tmp_path / "data", decode=decode, cache=cache, cache_bytes=limit)
    assert len(shards) == len(other) == 480
    held = next(other.held([np.arange(0, 40)]))
    assert held.tolist() == list(range(40))
    for row in range(0, 480, 7):
        assert len(read(shards, [row])) == 1
        assert sum(file.stat().st_size for file in cache.iterdir()) < limit + 2 * uncompressed
    assert len(read(other, [3])) == 1
    other.close()
    shards.close()


def test_threads_that_find_the_same_room_leave_no_more_than_the_cache_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data", ".jsonl.gz", [40] * 12)
    limit, cache, meet = 60_000, tmp_path / "cache", threading.Barrier(4)

    def together(*args: Any) -> None:
        meet.wait(60)  # all four have found room by now
        make_local(*args)

    monkeypatch.setattr(shard_cache, "make_local", together)
    shards = Shards(tmp_path / "data", decode=decode, cache=cache, cache_bytes=limit)
    assert len(shards) == 480
    assert sum(file.stat().st_size for file in cache.iterdir()) <= limit + 12_000, "but for what opening has found"
    shards.close()


def test_a_copy_that_took_the_place_of_another_is_not_deleted_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever fetched it has it locked, and the lock of the one before is no lock of it."""
    path, lock = tmp_path / "a.shard", shard_cache.fcntl.flock
    path.write_bytes(b"before")

    def replaced(stream: Any, how: int) -> None:
        (tmp_path / "aside").write_bytes(b"after")
        (tmp_path / "aside").replace(path)
        lock(stream, how)

    monkeypatch.setattr(shard_cache.fcntl, "flock", replaced)
    shard_cache._deleted(path)
    assert path.read_bytes() == b"after"


def test_an_index_that_python_cannot_parse_beside_another_thread_is_found_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parses(*_: Any, **__: Any) -> None:
        raise SystemError("AST constructor recursion depth mismatch (before=51, after=39)")

    write(tmp_path / "data", ".tar", [4] * 3)
    monkeypatch.setattr(shard_cache.np, "load", parses)
    shards = Shards(tmp_path / "data", decode=decode, cache=tmp_path / "cache")
    assert len(shards) == 12
    assert len(read(shards, [0, 11])) == 2
    shards.close()


def test_shards_are_read_through_a_cache_that_holds_none_of_them(tmp_path: Path) -> None:
    write(tmp_path / "data", ".jsonl.gz", [40] * 3)
    shards = Shards(tmp_path / "data", decode=decode, cache=tmp_path / "cache", cache_bytes=1)
    assert len(read(shards, [0, 50, 100])) == 3
    for row in (0, 50, 100, 0):
        assert len(read(shards, [row])) == 1
    shards.close()


def test_numbered_braces_name_each_shard_and_a_missing_one_is_named(tmp_path: Path) -> None:
    paths = write(tmp_path, ".tar", [4] * 5)
    given = str(tmp_path / "train-{000..004}.tar")
    assert len(Shards(given)) == 20
    assert len(Shards(str(tmp_path / "train-{001..003}.tar"))) == 12
    paths[2].unlink()
    with pytest.raises(ShardError, match=r"train-002\.tar"):
        len(Shards(given))


def prepared(files: Any, tmp_path: Path, skip_bad: bool) -> Shards:
    shards = Shards(files, decode=decode, cache=tmp_path / "cache")
    shards.prepare(Group(0, 1, torch.device("cpu")), None, skip_bad, lambda: None)
    return shards


def test_a_bad_shard_is_left_out_where_that_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = write(tmp_path / "data", ".tar", [6] * 5)
    paths[1].write_bytes(paths[1].read_bytes()[:700])
    with pytest.raises(ShardError, match=re.escape(str(paths[1]))):
        prepared(tmp_path / "data", tmp_path, skip_bad=False)
    shards = prepared(tmp_path / "data", tmp_path, skip_bad=True)
    assert len(shards) == 24
    assert shards.num_skipped == 1
    assert str(paths[1]) in caplog.text
    assert len(read(shards, list(range(24)))) == 24


def test_a_shard_that_goes_bad_later_is_named_or_the_next_takes_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = write(tmp_path / "data", ".tar.gz", [6] * 4)
    for skip_bad in (False, True):
        shards = prepared(tmp_path / "data", tmp_path, skip_bad)
        for copy in (tmp_path / "cache").glob("*.shard"):
            copy.unlink()
        good = paths[2].read_bytes()
        paths[2].write_bytes(good[:100])
        config = DataConfig(num_workers=0)
        feed = Feed(shards, default_collate, None, config, torch.device("cpu"), sharers=1, seed=0)
        asked = torch.arange(24).split(8)
        if skip_bad:
            labels = torch.cat([labels for _, labels in feed.batches(asked, training=True)])
            expected = Blobs(samples=24).dataset("train").tensors[1]
            assert torch.equal(labels, torch.cat([expected[:12], expected[18:], expected[18:]]))
            assert shards.num_skipped == 1
            assert str(paths[2]) in caplog.text
        else:
            with pytest.raises(ShardError, match=re.escape(str(paths[2]))):
                list(feed.batches(asked, training=True))
        feed.close()
        paths[2].write_bytes(good)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_is_named_or_the_next_takes_its_place(tmp_path: Path, workers: int) -> None:
    [path] = write(tmp_path / "data", ".jsonl", [6])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:-9], *lines[3:]]) + "\n")
    with pytest.raises(SampleError, match=r"train-000\.jsonl"):
        read(prepared(path, tmp_path, skip_bad=False), [1, 2])
    shards = prepared(path, tmp_path, skip_bad=True)
    config = DataConfig(num_workers=workers)
    feed = Feed(shards, default_collate, None, config, torch.device("cpu"), sharers=1, seed=0)
    labels = torch.cat([labels for _, labels in feed.batches(torch.arange(6).split(2), training=True)])
    expected = Blobs(samples=6).dataset("train").tensors[1]
    assert torch.equal(labels, expected[[0, 1, 3, 3, 4, 5]])
    assert shards.num_skipped == 1
    feed.close()


def test_counts_come_from_an_index_beside_them(tmp_path: Path) -> None:
    paths = write(tmp_path, ".tar", [4, 6])
    index = [{"url": path.name, "nsamples": samples} for path, samples in zip(paths, (4, 9), strict=True)]
    (tmp_path / "index.json").write_text(json.dumps({"shardlist": index}))
    shards = Shards(tmp_path, cache=tmp_path / "cache")
    assert len(shards) == 13
    with pytest.raises(ShardError, match=rf"{paths[1].name} has 6 samples, and had 9"):
        shards[5]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_over_shards_resumes_to_the_bit(tmp_path: Path, workers: int) -> None:
    write(tmp_path / "data", ".tar", [31] * 5)
    changes: dict[str, Any] = {
        "task": "tests.stream_tasks:Sharded",
        "task_args": {"files": str(tmp_path / "data"), "samples": 155, "shuffle_buffer": 20},
        "max_steps": 17,
        "checkpoint__every_steps": 5,
        "evaluate__every_steps": 100,
        "data__num_workers": workers,
    }
    whole = make(tmp_path / "whole", **changes)
    run_local(whole)
    parts = make(tmp_path / "parts", **{**changes, "max_steps": 9})
    run_local(parts)
    again = make(tmp_path / "parts", **changes)
    run_local(again)
    assert losses(again) == losses(whole)
    assert len(losses(whole)) == 17


def test_other_shards_do_not_go_on_where_these_were(tmp_path: Path) -> None:
    write(tmp_path / "data", ".tar", [31] * 5)
    changes: dict[str, Any] = {
        "task": "tests.stream_tasks:Sharded",
        "task_args": {"files": str(tmp_path / "data"), "samples": 155},
        "max_steps": 9,
    }
    run_local(make(tmp_path, **changes))
    write(tmp_path / "data", ".tar", [30, 32, 31, 31, 31])
    with pytest.raises(ConfigError, match="order of samples"):
        run_local(make(tmp_path, **{**changes, "max_steps": 12}))


def test_skipping_is_for_shards(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.skip_bad"):
        run_local(make(tmp_path, data__skip_bad=True))


def test_a_fetch_that_fails_is_tried_again_and_storage_that_stays_away_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data", ".tar.gz", [6] * 3)
    failures, reader = [2], Storage.reader

    def unsteady(self: Storage, name: str, most_bytes: int) -> Any:
        if failures[0]:
            failures[0] -= 1
            raise StorageError(f"could not read {self.locate(name)}: 503 Slow Down") from OSError("503 Slow Down")
        return reader(self, name, most_bytes)

    monkeypatch.setattr("trainers.storage._WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(Storage, "reader", unsteady)
    assert len(prepared(tmp_path / "data", tmp_path, skip_bad=False)) == 18
    failures[0] = 1000
    for copy in (tmp_path / "cache").iterdir():
        copy.unlink()
    for skip_bad in (False, True):  # what cannot be reached is not bad
        with pytest.raises(StorageError, match=r"train-000\.tar\.gz: 503"):
            prepared(tmp_path / "data", tmp_path, skip_bad)


def test_a_sample_for_which_memory_runs_out_is_not_a_bad_one(tmp_path: Path) -> None:
    def greedy(sample: dict[str, Any]) -> Any:
        if sample["number"] == b"0":
            raise MemoryError
        return decode(sample)

    shards = Shards(write(tmp_path / "data", ".tar", [6]), decode=greedy, cache=tmp_path / "cache")
    shards.prepare(Group(0, 1, torch.device("cpu")), None, True, lambda: None)
    with pytest.raises(MemoryError):
        shards[0]
