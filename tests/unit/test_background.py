"""Copies of the state in host memory, and work on a thread: what a checkpoint in the background stands on."""

from __future__ import annotations

import functools
import io
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from trainers.checkpoint.background import HostCopy, Worker

torch.set_num_threads(1)


def test_a_copy_is_saved_as_the_original_would_be() -> None:
    """Ties, views, layouts, dtypes and the versions of modules: a file from the copy is the file of the original."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    tied = torch.arange(5.0)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "task": {"tied": [tied, tied], "half": torch.ones(2, dtype=torch.bfloat16), "words": ("a", None, 1.5, True)},
        "empty": torch.empty(0),
    }
    files = [io.BytesIO(), io.BytesIO()]
    for file, content in zip(files, (state, HostCopy().take(state)), strict=True):
        torch.save(content, file)
        file.seek(0)
    assert files[0].getbuffer().nbytes == files[1].getbuffer().nbytes
    original, copied = (torch.load(file, weights_only=True) for file in files)
    assert str(original) == str(copied)
    assert copied["model"]._metadata == original["model"]._metadata
    assert copied["model"]["0.weight"].stride() == original["model"]["0.weight"].stride()
    ours, theirs = copied["task"]["tied"]
    assert ours.data_ptr() == theirs.data_ptr()


def test_a_copy_is_not_touched_by_what_training_does_next() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    task = {"seen": [1, {"deep": 2}]}
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    copied = HostCopy().take({"model": layer.state_dict(), "optimizer": optimizer.state_dict(), "task": task})
    before = str(copied)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 7.0
    task["seen"].append(3)
    task["seen"][1]["deep"] = 4  # type: ignore[index]
    assert str(copied) == before


def test_buffers_are_used_again_and_follow_what_changes() -> None:
    host = HostCopy()
    first = host.take({"a": torch.ones(3), "b": torch.ones(2)})["a"]
    second = host.take({"a": torch.zeros(3)})
    assert second["a"].data_ptr() == first.data_ptr()
    assert second["a"].tolist() == [0, 0, 0]
    assert host.take({"a": torch.zeros(3, dtype=torch.int64)})["a"].dtype == torch.int64
    assert host.take({"a": torch.arange(4.0)})["a"].tolist() == [0, 1, 2, 3]


def test_a_view_of_something_large_does_not_carry_it_along(tmp_path: Path) -> None:
    large = torch.zeros(100_000)
    torch.save(HostCopy().take({"view": large[:10]}), tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size < 10_000


def test_a_jobs_error_is_raised_where_its_answer_is_taken() -> None:
    def fails() -> int:
        raise KeyError("here")

    worker = Worker()
    job = worker.start(fails)
    with pytest.raises(KeyError, match="here"):
        job.result()
    assert job.done
    assert worker.start(lambda: 3).result() == 3


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "checkpoint"}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_worker_does_its_jobs_in_order_on_one_thread() -> None:
    before, order = threads(), list[int]()
    worker = Worker()
    assert threads() <= before, "nobody who writes at once needs a thread"
    jobs = [worker.start(functools.partial(order.append, number)) for number in range(50)]
    for job in jobs:
        job.result()
    assert order == list(range(50))
    assert len(threads() - before) == 1


def test_a_forgotten_worker_ends_with_what_was_begun() -> None:
    before, free, done = threads(), threading.Event(), list[int]()
    worker = Worker()
    worker.start(free.wait)
    worker.start(functools.partial(done.append, 1))
    del worker
    free.set()
    wait_for(lambda: threads() <= before)
    assert done == [1]


def test_a_closed_worker_starts_again() -> None:
    before, done = threads(), list[int]()

    def slow() -> None:
        time.sleep(0.05)
        done.append(1)

    worker = Worker()
    worker.close()
    worker.start(slow)
    worker.close()
    assert done == [1], "it waits"
    assert threads() <= before
    assert worker.start(lambda: 2).result() == 2


def test_a_job_that_has_ended_holds_nothing() -> None:
    """The state that it wrote would be held until the next checkpoint."""

    class State:
        """What a weak reference may point at."""

    worker, state = Worker(), State()
    gone = weakref.ref(state)
    worker.start(functools.partial(id, state)).result()
    del state
    wait_for(lambda: gone() is None)
