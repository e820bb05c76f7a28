"""The mailbox and trials of a training function: reports of all ranks,
restarts, batches that do not fit.
"""

import asyncio

import pytest

from tests.unit.test_mailbox import WAIT_S, asynchronous, reports, taken
from tests.waits import HANG_S
from tune.config import Target
from tune.forks.assignment import Assignment, Begun
from tune.lanes._mailbox import Mailbox


def assignment(ticket, rows=8, failures=0, **given):
    tree = {
        "train_func": "module:train",
        "train_loop_config": {"rows": rows, "kind": "fp32"},
        "keys": {
            "batch_size_per_worker": "train_loop_config.rows",
            "precision": "train_loop_config.kind",
        },
        "failure": {"max_failures": failures},
    }
    return Assignment(ticket, ticket, tree, **given)


def row(number, loss=1.0):
    return {"step": float(number), "loss": loss, "train_time_s": number / 10}


async def both(mailbox, number, attempt=0, kept=None, loss=1.0):
    """A report of both ranks, rank 1 first: what each hears."""
    parts = [({}, kept), (row(number, loss), None)]
    return await asyncio.gather(
        *(
            mailbox.report_part("a", attempt, number, 2, *part)
            for part in parts
        )
    )


@asynchronous
async def test_a_report_counts_once_all_ranks_have_brought_their_part(mailbox):
    await mailbox.submit(assignment("a"))
    await taken(mailbox)
    first = asyncio.ensure_future(
        mailbox.report_part("a", 0, 1, 2, row(1), None)
    )
    await asyncio.sleep(WAIT_S)
    assert not first.done()
    assert await reports(mailbox, "a") == []
    assert await mailbox.report_part("a", 0, 1, 2, {}, None) is True
    assert await first is True
    assert await reports(mailbox, "a") == [row(1)]


@pytest.mark.parametrize(
    ("watched", "is_refused"), [("loss", False), ("los", True)]
)
def test_a_metric_that_no_function_has_reported_ends_the_sweep(
    watched, is_refused
):
    """And leaves its trial without a result."""

    async def main():
        mailbox = Mailbox()
        await mailbox.submit(assignment("a", watches=(watched,)))
        await taken(mailbox)
        await both(mailbox, 1)
        await mailbox.end(0, "a", {"status": "done"})
        refusal = (await mailbox.watch())["refusal"]
        ends = [
            event
            for event in await mailbox.heard("a")
            if event.outcome is not None
        ]
        assert (refusal is not None, bool(ends)) == (
            is_refused,
            not is_refused,
        )

    asyncio.run(main())


@pytest.mark.parametrize("why", ["cancelled", "target"])
def test_all_ranks_end_at_the_same_report(why):
    async def main():
        mailbox = Mailbox()
        await mailbox.submit(
            assignment(
                "a",
                target=Target("loss", 0.5, "min") if why == "target" else None,
            )
        )
        await taken(mailbox)
        assert await both(mailbox, 1) == [True, True]
        if why == "cancelled":
            await mailbox.cancel("a")
        assert await both(mailbox, 2, loss=0.4) == [False, False]
        assert await reports(mailbox, "a") == [row(1), row(2, 0.4)]

    asyncio.run(main())


@asynchronous
async def test_a_trial_whose_lane_died_goes_on_from_its_newest_whole_checkpoint(
    mailbox,
):
    await mailbox.submit(assignment("a"))
    await mailbox.hello(0, "cpu")
    await taken(mailbox)
    await both(mailbox, 1, kept="first")
    await both(mailbox, 2)
    dying = asyncio.ensure_future(
        mailbox.report_part("a", 0, 3, 2, row(3), "half")
    )
    await asyncio.sleep(WAIT_S)
    await mailbox.lost(0)
    await mailbox.hello(0, "cpu")
    again = await mailbox.take(0, WAIT_S)
    assert (again.attempt, again.begun) == (1, Begun(1, "first", 0.1))
    assert await both(mailbox, 2, attempt=1) == [True, True]
    assert await both(mailbox, 3, attempt=1) == [True, True]
    assert [one["step"] for one in await reports(mailbox, "a")] == [1, 2, 3], (
        "what was heard is not heard again"
    )
    assert not dying.done(), (
        "a rank that is about to be ended waits until then"
    )
    dying.cancel()


@pytest.mark.parametrize("failures", [0, 1])
def test_a_rank_that_reports_what_another_rank_has_ended_waits_for_nothing(
    failures,
):
    """Whether the report came before or after the end, and the trial's next start."""

    async def main():
        mailbox = Mailbox()
        await mailbox.submit(assignment("a", failures=failures))
        await taken(mailbox)
        waiting = asyncio.ensure_future(
            mailbox.report_part("a", 0, 1, 2, row(1), None)
        )
        await asyncio.sleep(WAIT_S)
        assert not waiting.done()
        await mailbox.end(0, "a", {"status": "error", "message": "rank 1"})
        late = mailbox.report_part("a", 0, 2, 2, row(2), None)
        assert await asyncio.wait_for(waiting, HANG_S) is None
        assert await asyncio.wait_for(late, HANG_S) is None
        if failures:
            assert await taken(mailbox) == "a"
            late = mailbox.report_part("a", 0, 1, 2, row(1), None)
            assert await asyncio.wait_for(late, HANG_S) is None
            assert await both(mailbox, 1, attempt=1) == [True, True]
        else:
            [end] = await mailbox.heard("a")
            assert end.outcome["message"] == "rank 1"
            assert await taken(mailbox) is None

    asyncio.run(main())


@asynchronous
async def test_a_rank_may_report_what_the_driver_has_recorded(mailbox):
    """That another rank has ended it, and nobody knows the trial any more."""
    await mailbox.submit(assignment("a"))
    await taken(mailbox)
    await mailbox.end(0, "a", {"status": "error", "message": "rank 1"})
    await mailbox.next_event("a", 0)
    await mailbox.forget("a")
    assert await mailbox.report_part("a", 0, 1, 2, row(1), None) is None


@asynchronous
async def test_a_function_that_fails_starts_again_as_often_as_it_may(mailbox):
    await mailbox.submit(assignment("a", failures=1))
    for _ in range(2):
        assert await taken(mailbox) == "a"
        for rank in range(2):  # both fail, and it counts once
            await mailbox.end(
                0, "a", {"status": "error", "message": f"rank {rank}"}
            )
    assert await taken(mailbox) is None
    [end] = await mailbox.heard("a")
    assert end.outcome == {"status": "error", "message": "rank 0", "lane": 0}
