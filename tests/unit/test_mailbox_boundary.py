"""The mailbox and memory, without Ray: what one trial has learned decides for the next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.test_mailbox import WAIT_S, asynchronous
from trainers.config import TrainConfig
from trainers.config.overrides import override
from trainers.storage import Storage
from tune.lanes.mailbox import Mailbox
from tune.lanes.messages import Assignment

TREE = override(
    TrainConfig,
    {"task": "tests.tasks:Blobs", "global_batch_size": 64, "max_steps": 1, "optimizer": {"lr": 1e-3, "name": "sgd"}},
    {},
)
CPU, SMALL, LARGE = "cpu, 8.0 GiB", "A10G, 22.5 GiB", "H100, 79.1 GiB"


def assignment(ticket: str, size: int | str = "auto", **keys: Any) -> Assignment:
    tree = {"device": "auto", "precision": "fp32", **TREE, "microbatch_size": size, **keys}
    return Assignment(ticket, ticket, tree)


async def learn(mailbox: Mailbox, lane: int, **sizes: bool) -> None:
    """A trial on this lane tries sizes (`s8=True`: eight fit)."""
    await mailbox.submit(assignment("teacher"))
    assert (await mailbox.take(lane, WAIT_S)).ticket == "teacher"  # type: ignore[union-attr]
    for name, fits in sizes.items():
        await mailbox.observe(lane, "teacher", int(name[1:]), fits)


@asynchronous
async def test_a_trial_that_starts_is_told_what_others_have_learned(mailbox: Mailbox) -> None:
    await mailbox.hello(0, CPU)
    await learn(mailbox, 0, s8=True, s16=False)
    await mailbox.submit(assignment("same"))
    await mailbox.submit(assignment("other", precision="bf16"))
    same, other = [await mailbox.take(0, WAIT_S) for _ in range(2)]
    assert isinstance(same, Assignment)
    assert isinstance(other, Assignment)
    assert (same.microbatch_bounds, other.microbatch_bounds) == ((8, 16), (None, None))


@asynchronous
async def test_what_is_known_not_to_fit_never_runs(mailbox: Mailbox) -> None:
    await mailbox.hello(0, CPU)
    await mailbox.submit(assignment("waits", 32))
    await mailbox.submit(assignment("fits", 15))
    await mailbox.observe(0, "waits", 16, False)  # another trial of the same key would say it
    await mailbox.submit(assignment("late", 16))
    for ticket in ("waits", "late"):
        outcome = (await mailbox.next_event(ticket, 0)).outcome
        assert outcome is not None
        assert outcome["status"] == "out_of_memory"
        assert "one of 16 ran out of memory (fp32 on cpu, 8.0 GiB)" in outcome["message"]
    taken = await mailbox.take(0, WAIT_S)
    assert isinstance(taken, Assignment)
    assert taken.ticket == "fits"
    assert await mailbox.take(0, WAIT_S) is None


@asynchronous
async def test_auto_never_runs_when_not_even_one_sample_fits(mailbox: Mailbox) -> None:
    await mailbox.hello(0, CPU)
    await learn(mailbox, 0, s1=False)
    await mailbox.submit(assignment("auto"))
    assert (await mailbox.next_event("auto", 0)).outcome["status"] == "out_of_memory"  # type: ignore[index]


@asynchronous
async def test_a_size_too_large_for_one_gpu_waits_for_a_larger(mailbox: Mailbox) -> None:
    await mailbox.hello(0, SMALL)
    await mailbox.hello(1, LARGE)
    await learn(mailbox, 0, s16=False)
    await mailbox.submit(assignment("large", 32))
    assert await mailbox.take(0, WAIT_S) is None
    taken = await mailbox.take(1, WAIT_S)
    assert isinstance(taken, Assignment)
    assert taken.ticket == "large"


@asynchronous
async def test_a_trial_that_comes_while_its_lane_is_down_is_refused(mailbox: Mailbox) -> None:
    """It waited forever: nobody looked at it again once the lane was back."""
    await mailbox.hello(0, CPU)
    await learn(mailbox, 0, s16=False)
    await mailbox.lost(0)
    await mailbox.submit(assignment("large", 32))
    assert (await mailbox.next_event("large", 0)).outcome["status"] == "out_of_memory"  # type: ignore[index]


@asynchronous
async def test_who_waits_for_a_larger_device_ends_where_none_comes_back(mailbox: Mailbox) -> None:
    await mailbox.hello(0, SMALL)
    await mailbox.hello(1, LARGE)
    await learn(mailbox, 0, s16=False)
    await mailbox.submit(assignment("large", 32))
    await mailbox.lost(1)
    assert await mailbox.take(0, WAIT_S) is None
    assert not await mailbox.heard("large"), "its lane starts again"
    await mailbox.hello(1, SMALL)
    assert await mailbox.take(1, WAIT_S) is None
    assert (await mailbox.next_event("large", 0)).outcome["status"] == "out_of_memory"  # type: ignore[index]


@asynchronous
async def test_a_trial_goes_to_another_lane_when_its_own_is_lost(mailbox: Mailbox) -> None:
    await mailbox.hello(0, CPU)
    await mailbox.hello(1, CPU)
    await mailbox.submit(assignment("a"))
    await mailbox.take(0, WAIT_S)
    await mailbox.lost(0)
    taken = await mailbox.take(1, WAIT_S)
    assert isinstance(taken, Assignment)
    assert taken.ticket == "a"
    state = await mailbox.watch()
    assert (state["lanes"], list(state["running"])) == ([1], [1])
    assert state["notes"] == ["lane 0 died under trial a, which starts again"]
    await mailbox.hello(0, CPU)  # it is back, and has lost nothing more
    assert list((await mailbox.watch())["running"]) == [1]


@asynchronous
async def test_what_has_ended_is_forgotten(mailbox: Mailbox) -> None:
    for index in range(50):
        ticket = f"t{index}"
        await mailbox.submit(assignment(ticket))
        await mailbox.take(0, WAIT_S)
        await mailbox.report(ticket, {"step": 1})
        await mailbox.end(0, ticket, {"status": "done"})
        await mailbox.forget(ticket)
    assert not mailbox._trials


def test_the_boundary_outlives_the_mailbox(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))

    async def first(mailbox: Mailbox) -> None:
        kept = Mailbox(storage)
        await kept.hello(0, CPU)
        await learn(kept, 0, s8=True, s16=False, s12=False, s4=True)

    async def second(mailbox: Mailbox) -> None:
        kept = Mailbox(storage)
        await kept.hello(0, CPU)
        await kept.submit(assignment("next"))
        taken = await kept.take(0, WAIT_S)
        assert isinstance(taken, Assignment)
        assert taken.microbatch_bounds == (8, 12)

    asynchronous(first)()
    [entry] = json.loads((tmp_path / "boundary.json").read_text()).values()
    assert entry == {"fits": [8], "misfit": 12}
    asynchronous(second)()
    (tmp_path / "boundary.json").write_text('{"key": 3}')
    asynchronous(learn_anew(storage))()


def learn_anew(storage: Storage) -> Any:
    async def test(mailbox: Mailbox) -> None:
        kept = Mailbox(storage)  # damaged: said, and nothing is known
        await kept.hello(0, CPU)
        await learn(kept, 0, s16=False)

    return test
