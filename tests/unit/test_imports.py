"""Imports without garbage collection: on and off again, and what it keeps."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from trainers.launch.imports import without_collection


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_is_off_inside_and_on_again_after_an_error() -> None:
    inside: list[bool] = []

    def fail() -> None:
        with without_collection():
            inside.append(gc.isenabled())
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert inside == [False]
    assert gc.isenabled()


def test_where_it_was_off_it_stays_off() -> None:
    gc.disable()
    with without_collection():
        pass
    assert not gc.isenabled()


def test_only_a_process_of_ours_keeps_what_there_is() -> None:
    before = gc.get_freeze_count()
    with without_collection():
        pass
    assert gc.get_freeze_count() == before
    with without_collection(own_process=True):
        cycle: list[object] = []
        cycle.append(cycle)
    assert gc.get_freeze_count() > before
