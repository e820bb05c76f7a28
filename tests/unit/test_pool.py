"""When the pool of `tune.ray` starts lanes, and in which order it ends them (tune/ray/pool.py); without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tune.ray import pool as pools
from tune.ray.lane import Which
from tune.ray.pool import Pool
from tune.ray.shape import Shape

SHAPE = Shape(1, (("CPU", 1.0),), "PACK", (), "{}")


class Group:
    """A placement group that is there, or never is."""

    def __init__(self, is_placed: bool) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if is_placed:
            self.future.set_result(None)

    def ready(self) -> asyncio.Future[None]:
        return self.future


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The groups that were removed; the first that is made has its place, and no other."""
    groups: list[Group] = []
    gone: list[Group] = []

    def make(*args: Any, **options: Any) -> Group:
        groups.append(Group(is_placed=not groups))
        return groups[-1]

    async def start(pool: Pool, lane: Any) -> None:
        lane.is_up = lane.placed.done()

    monkeypatch.setattr(pools, "reserve", make)
    monkeypatch.setattr(pools, "remove_placement_group", gone.append)
    monkeypatch.setattr(pools, "_MAKE_S", 0.01)
    monkeypatch.setattr(Pool, "_start", start)
    monkeypatch.setattr(pools, "make_barrier", object)
    return gone


def run(steps: Callable[[Pool], Coroutine[Any, Any, Any]]) -> Any:
    async def all_of_it() -> Any:
        pool = Pool()
        pool._watching = True
        pool._begin(SHAPE)
        await asyncio.sleep(0)
        return await steps(pool)

    return asyncio.run(all_of_it())


@pytest.mark.parametrize(("which", "lanes"), [("warm", 1), ("any", 2), ("fresh", 2)])
def test_a_lane_that_is_being_given_back_is_waited_for(removed: list[Group], which: Which, lanes: int) -> None:
    """By a trial that it may serve: one that asks for a fresh lane, or whose function is not proven, needs another."""

    async def steps(pool: Pool) -> int:
        await pool.borrow(SHAPE, "trial", "train")
        pool._lanes[0].borrower = ""  # it settles
        asking = asyncio.ensure_future(pool.borrow(SHAPE, "trial", "train", which))
        await asyncio.sleep(0)
        asking.cancel()
        return len(pool._lanes)

    assert run(steps) == lanes


def test_a_lane_of_a_proven_function_is_waited_for(removed: list[Group]) -> None:
    async def steps(pool: Pool) -> tuple[int, bool]:
        await pool.borrow(SHAPE, "trial", "train")
        await pool.judge("train", is_same=True)
        pool._lanes[0].borrower = ""
        asking = asyncio.ensure_future(pool.borrow(SHAPE, "other", "train"))
        await asyncio.sleep(0)
        count = len(pool._lanes)
        pool._lanes[0].borrower = None
        pool._serve()
        return count, (await asking).is_fresh

    assert run(steps) == (1, False)
