"""When the pool of `tune.ray` starts lanes, and in which order it ends them
(tune/ray/_pool.py); without a cluster.
"""

import asyncio

import pytest

from tune.ray import _pool as pools
from tune.ray._controller import Shape
from tune.ray._pool import Pool

SHAPE = Shape(1, (("CPU", 1.0),), "PACK", (), "{}")


class Group:
    """A placement group that is there, or never is."""

    def __init__(self, is_placed):
        self.future = asyncio.get_running_loop().create_future()
        if is_placed:
            self.future.set_result(None)

    def ready(self):
        return self.future


@pytest.fixture
def removed(monkeypatch):
    """The groups that were removed; the first that is made has its place, and no other."""
    groups = []
    gone = []

    def make(*args, **options):
        groups.append(Group(is_placed=not groups))
        return groups[-1]

    async def start(pool, lane):
        lane.is_up = lane.placed.done()

    monkeypatch.setattr(pools, "reserve", make)
    monkeypatch.setattr(pools, "remove_placement_group", gone.append)
    monkeypatch.setattr(pools, "_MAKE_S", 0.01)
    monkeypatch.setattr(Pool, "_start", start)
    monkeypatch.setattr(pools, "make_barrier", object)
    return gone


def run(steps):
    async def all_of_it():
        pool = Pool("", "s")
        pool._watching = True
        pool._begin(SHAPE)
        await asyncio.sleep(0)
        return await steps(pool)

    return asyncio.run(all_of_it())


def test_a_lane_that_is_being_given_back_is_waited_for(removed):
    async def steps(pool):
        await pool.borrow(SHAPE, "trial")
        pool._lanes[0].borrower = ""  # it settles
        asking = asyncio.ensure_future(pool.borrow(SHAPE, "other"))
        await asyncio.sleep(0)
        count = len(pool._lanes)
        pool._lanes[0].borrower = None
        pool._serve()
        return count, (await asking).lane

    assert run(steps) == (1, 0)


def test_an_idle_lane_gives_its_resources_back(removed, monkeypatch):
    monkeypatch.setattr(pools, "_WATCH_S", 0.0)
    monkeypatch.setattr(pools, "_IDLE_S", 0.0)

    async def steps(pool):
        await pool.borrow(SHAPE, "")
        pool._do(pool._watch())
        await asyncio.sleep(0.1)
        assert removed == []
        pool._lanes[0].borrower = None
        while not removed:
            await asyncio.sleep(0)

    run(steps)


def test_a_trial_ends_once_as_many_as_are_expected_have_begun(removed):
    async def steps(pool):
        await pool.enter("first")
        await pool.expect(2)
        seen = [await pool.may_leave("first")]
        await pool.enter("second")
        seen += [await pool.may_leave("first"), await pool.may_leave("second")]
        await pool.expect(0)
        return [*seen, await pool.may_leave("second")]

    assert run(steps) == [False, True, False, True]
