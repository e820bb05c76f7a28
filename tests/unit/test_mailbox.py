"""The mailbox without Ray: who gets which trial, what is heard of it, and what
happens when a lane is lost.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.waits import HANG_S
from trainers.causes import death_of
from trainers.errors import ConfigError, RunFailedError
from trainers.storage import Storage
from tune.forks.assignment import Assignment
from tune.lanes._mailbox import MAX_LOSSES, Mailbox
from tune.lanes.queue import Event
from tune.trials.record import BY_HAND
from tune.trials.steering import Steering

WAIT_S = 0.05
DONE = {"lane": 0, "status": "done"}


def asynchronous(test):
    """Run a test with a new mailbox in a loop of its own; one that waits for
    ever ends after a minute.
    """

    def run():
        async def main():
            await asyncio.wait_for(test(Mailbox()), 60)

        asyncio.run(main())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


def assignment(ticket, trial=None):
    return Assignment(ticket, trial or ticket, {"seed": 1})


async def taken(mailbox, lane=0):
    """The ticket that a lane gets."""
    found = await mailbox.take(lane, WAIT_S)
    return found.ticket if isinstance(found, Assignment) else found


async def reports(mailbox, trial):
    """The evaluations that the driver would find."""
    return [
        event.metrics
        for event in await mailbox.heard(trial)
        if event.outcome is None
    ]


async def submit(mailbox, *tickets):
    for ticket in tickets:
        await mailbox.submit(assignment(ticket))


async def end_of(mailbox, ticket, index=0):
    """How a submission has ended, which is its event number `index`."""
    event = await asyncio.wait_for(mailbox.next_event(ticket, index), 60)
    return event.outcome


def test_no_trial_is_lost_or_taken_twice():
    """Many lanes with tiny waits: what is submitted is taken, by somebody, once."""

    async def main():
        mailbox = Mailbox()
        got = []

        async def lane(number):
            while (found := await mailbox.take(number, 0.001)) != "close":
                if isinstance(found, Assignment):
                    got.append(found.ticket)
                    await mailbox.end(number, found.ticket, {"status": "done"})

        lanes = [asyncio.create_task(lane(number)) for number in range(5)]
        for index in range(60):
            await asyncio.sleep(0.0009)
            await submit(mailbox, f"t{index}")
        for index in range(60):
            await mailbox.next_event(f"t{index}", 0)
        await mailbox.close()
        await asyncio.gather(*lanes)
        return got

    got = asyncio.run(asyncio.wait_for(main(), 60))
    assert sorted(got) == sorted(f"t{index}" for index in range(60))


@asynchronous
async def test_reports_and_the_end_are_heard_in_order_and_nothing_after(
    mailbox,
):
    await submit(mailbox, "a")
    hearing = asyncio.create_task(mailbox.next_event("a", 0))
    await taken(mailbox)
    assert await mailbox.report("a", {"step": 1})
    assert await hearing == Event({"step": 1})
    assert await mailbox.report("a", {"step": 2})
    await mailbox.end(0, "a", {"status": "done"})
    await mailbox.report("a", {"step": 9})
    await mailbox.end(0, "a", {"status": "error"})
    assert await mailbox.next_event("a", 1) == Event({"step": 2})
    assert await end_of(mailbox, "a", 2) == DONE
    assert await mailbox.next_event("a", 0) == Event({"step": 1}), (
        "it may be asked again"
    )
    assert await reports(mailbox, "a") == [{"step": 1}, {"step": 2}]


@asynchronous
async def test_a_trial_whose_lane_died_starts_again_before_the_others(
    mailbox,
):
    """Its curve has no step twice."""
    await submit(mailbox, "a", "b")
    assert await taken(mailbox, 0) == "a"
    await mailbox.report("a", {"step": 10})
    await mailbox.hello(0)
    assert [await taken(mailbox, 1), await taken(mailbox, 0)] == ["a", "b"]
    await mailbox.hello(0)
    assert (await mailbox.watch())["running"].keys() == {1}, (
        "the other lane's goes on"
    )
    for step in (10, 20):
        assert await mailbox.report("a", {"step": step})
    await mailbox.end(1, "a", {"status": "done"})
    await mailbox.hello(1)
    assert await taken(mailbox, 1) == "b", (
        "a lane that died after the end costs nothing"
    )
    assert await reports(mailbox, "a") == [{"step": 10}, {"step": 20}]


@pytest.mark.parametrize(
    "status", ["out_of_host_memory", "preempted", "hung", "error"]
)
def test_a_trial_that_loses_its_lane_again_ends_as_what_befell_that(
    status,
):
    async def main():
        mailbox = Mailbox()
        await submit(mailbox, "a")
        for _ in range(1 if status == "hung" else MAX_LOSSES):
            assert await taken(mailbox) == "a"
            await mailbox.lost(0, RunFailedError(status, "of rank 1"))
        assert (await end_of(mailbox, "a"))["status"] == (
            "node_lost" if status == "error" else status
        )
        assert await taken(mailbox) is None

    asyncio.run(asyncio.wait_for(main(), 60))


@asynchronous
async def test_what_a_dead_group_still_asks_for_gets_no_trial(mailbox):
    """Ray does not end the call of a worker that it has killed."""
    await mailbox.hello(0)
    asked_by_the_dead = asyncio.create_task(mailbox.take(0, 30))
    await asyncio.sleep(0)
    await mailbox.leave(0)
    await mailbox.hello(0)
    await submit(mailbox, "a", "b")
    assert await asked_by_the_dead is None
    assert await taken(mailbox) == "a"
    await mailbox.end(0, "a", {"status": "done"})
    assert (await end_of(mailbox, "a"))["status"] == "done"
    assert await taken(mailbox) == "b"


@asynchronous
async def test_a_lost_trial_says_who_died_of_what(mailbox):
    await submit(mailbox, "a")
    for number in range(MAX_LOSSES):
        await taken(mailbox)
        await mailbox.lost(0, death_of(number, -9, 4711 + number))
    assert (
        "rank 2 died by SIGKILL (pid 4713)"
        in (await end_of(mailbox, "a"))["message"]
    )
    assert (
        "rank 0 died by SIGKILL (pid 4711)"
        in (await mailbox.watch())["notes"][0]
    )


@asynchronous
async def test_a_hang_waits_for_what_the_other_ranks_say(mailbox):
    await submit(mailbox, "a")
    await taken(mailbox)
    waits = RunFailedError(
        "hung", "rank 0 in the barrier after setup", 1.0, follows=True
    )
    first = asyncio.create_task(mailbox.hung(0, "a", waits, "stack of 0", 2))
    await asyncio.sleep(0)
    await mailbox.hung(
        0, "a", RunFailedError("hung", "rank 1 in setup", 2.0), "stack of 1", 2
    )
    await first
    outcome = await end_of(mailbox, "a")
    assert (outcome["status"], outcome["message"]) == (
        "hung",
        "rank 1 in setup; rank 0 in the barrier after setup",
    )
    assert "stack of 0" in outcome["traceback"]
    assert "stack of 1" in outcome["traceback"]


@asynchronous
async def test_a_cancelled_trial_never_starts_and_stops_at_its_next_report(
    mailbox,
):
    await submit(mailbox, "a", "b", "c")
    await mailbox.cancel("a")
    await mailbox.cancel("nobody")
    assert await taken(mailbox, 0) == "b"
    await mailbox.cancel("b")
    assert not await mailbox.report("b", {"step": 2})
    await mailbox.hello(0)
    assert await taken(mailbox, 0) == "c", (
        "its lane died, and it does not start again"
    )


@asynchronous
async def test_only_a_trial_that_its_user_stopped_was_stopped_by_hand(mailbox):
    await mailbox.steer(Steering(stopped=frozenset({"by its user"})))
    await submit(mailbox, "by its user", "by the search")
    assert await taken(mailbox) == "by the search"
    await mailbox.end(
        0, "by the search", {"status": "stopped", "message": "enough"}
    )
    [first] = await mailbox.heard("by its user")
    [second] = await mailbox.heard("by the search")
    assert first.outcome["message"] == BY_HAND
    assert second.outcome["message"] == "enough"


@asynchronous
async def test_two_submissions_of_one_trial_are_told_apart(mailbox):
    """Tune may start two actors for one trial: each hears of its own
    submission, and none waits for ever.

    The driver has the reports of the one that got furthest.
    """
    for ticket in ("first", "second"):
        await mailbox.submit(assignment(ticket, "trial"))
    for lane, ticket in enumerate(("first", "second")):
        assert await taken(mailbox, lane) == ticket
        for step in range(lane + 1):
            await mailbox.report(ticket, {"step": step})
        await mailbox.end(lane, ticket, {"status": "done"})
    assert [
        (await end_of(mailbox, *at))["lane"]
        for at in (("first", 1), ("second", 2))
    ] == [0, 1]
    assert await reports(mailbox, "trial") == [{"step": 0}, {"step": 1}]


@asynchronous
async def test_closing_sends_every_lane_home_and_stops_what_runs(
    mailbox,
):
    await submit(mailbox, "a")
    await taken(mailbox, 3)
    waiting = [
        asyncio.create_task(mailbox.take(lane, 60)) for lane in range(3)
    ]
    await mailbox.close()
    assert await asyncio.gather(*waiting) == ["close"] * 3
    assert not await mailbox.report("a", {"step": 1})
    await submit(mailbox, "late")
    assert await mailbox.take(0, WAIT_S) == "close"


@asynchronous
async def test_a_misspelt_metric_ends_the_sweep_unless_another_trial_has_it(
    mailbox,
):
    await submit(mailbox, "a", "b", "c")
    misnamed = ConfigError("objective.metric", "val_los", "is no metric", "")
    outcome = {"status": "error", "message": "", "misnamed": misnamed}
    await taken(mailbox)
    await mailbox.report("a", {"step": 1, "val_los": 1.0})
    await taken(mailbox)
    await mailbox.end(0, "b", dict(outcome))
    assert (await mailbox.watch())["refusal"] is None
    await taken(mailbox)
    await mailbox.end(
        0,
        "c",
        outcome
        | {
            "misnamed": ConfigError(
                "checkpoint.best", "val_mea", "is no metric", ""
            )
        },
    )
    assert (await mailbox.watch())["refusal"].field == "checkpoint.best"


@asynchronous
async def test_no_trial_ends_before_the_expected_ones_are_here(
    mailbox,
):
    """Of two that end at once Tune would drop an actor."""
    for name in ("a", "b"):
        await submit(mailbox, name)
        await taken(mailbox)
        await mailbox.report(name, {"step": 1})
        await mailbox.end(0, name, {"status": "done"})
    await mailbox.expect(2)
    assert (await mailbox.next_event("a", 0)).outcome is None, (
        "only ends are held"
    )
    ends = [
        asyncio.create_task(mailbox.next_event(name, 1)) for name in ("a", "b")
    ]
    done, held = await asyncio.wait(ends, timeout=3 * WAIT_S)
    assert (len(done), len(held)) == (1, 1)
    await submit(mailbox, "c")
    done, held = await asyncio.wait(held, timeout=HANG_S)
    assert not held
    assert await end_of(mailbox, "a", 1) == DONE, "told once is told"
    await taken(mailbox)
    await mailbox.end(0, "c", {"status": "done"})
    mailbox.hold_s = WAIT_S
    assert await end_of(mailbox, "c") == DONE, "nor do they wait for ever"


@asynchronous
async def test_the_next_actor_of_a_trial_goes_on_with_what_the_dead_one_submitted(
    mailbox,
):
    await mailbox.submit(assignment("t/1", "t"))
    assert await taken(mailbox) == "t/1"
    await mailbox.report("t/1", {"step": 1})
    await mailbox.orphan("t")
    assert (
        await mailbox.submit(assignment("another/1", "another")) == "another/1"
    )
    assert await mailbox.submit(assignment("t/2", "t")) == "t/1"
    assert await mailbox.submit(assignment("t/3", "t")) == "t/3", (
        "it has an actor again"
    )
    assert await taken(mailbox) == "another/1", (
        "the second one of t was not queued"
    )
    await mailbox.cancel("another/1")
    await mailbox.orphan("another")
    assert (
        await mailbox.submit(assignment("another/2", "another")) == "another/2"
    ), "what was cancelled has no heir"


@asynchronous
async def test_a_trial_that_is_submitted_ahead_of_its_actor_runs_once(
    mailbox,
):
    await mailbox.submit_ahead(assignment("t/1", "t"))
    assert await mailbox.submit(assignment("t/2", "t")) == "t/1"
    assert await mailbox.submit(assignment("u/1", "u")) == "u/1"
    await mailbox.submit_ahead(assignment("u/2", "u"))
    assert [await taken(mailbox), await taken(mailbox, lane=1)] == [
        "t/1",
        "u/1",
    ]
    assert await mailbox.take(2, 0) is None


@asynchronous
async def test_an_end_is_kept_until_the_driver_has_its_record(mailbox):
    """Random search may draw a trial twice: the second one's actor has not
    heard its end yet.
    """
    for ticket in ("t/1", "t/2"):
        await mailbox.submit(assignment(ticket, "t"))
        await taken(mailbox)
        await mailbox.end(0, ticket, {"status": "done"})
    await end_of(mailbox, "t/1")
    await mailbox.forget("t")
    assert await end_of(mailbox, "t/2") == DONE
    await mailbox.forget("t")
    assert await mailbox.heard("t") == []


def with_refuge(tmp_path, test):
    """Run a test whose trial `t` runs on lane 0, and has written to its refuge."""

    async def main():
        mailbox = Mailbox(Storage(tmp_path / "sweep"))
        for lane in (0, 1):
            await mailbox.hello(lane)
        await mailbox.submit(assignment("t/1", "t"))
        given = await mailbox.take(0, WAIT_S)
        assert given.source is None, "it begins at its start"
        given.refuge.write("state", b"")
        await test(mailbox, given.refuge)

    asyncio.run(main())


def test_a_cancelled_trial_whose_node_is_taken_away_leaves_nothing(tmp_path):
    async def test(mailbox, refuge):
        await mailbox.cancel("t/1")
        kept = {"status": "preempted", "message": "step 12 is kept"}
        await mailbox.end(0, "t/1", kept)
        assert not refuge.exists()

    with_refuge(tmp_path, test)


def test_a_trial_whose_node_is_taken_away_goes_on_from_what_it_kept(
    tmp_path,
):
    async def test(mailbox, refuge):
        await submit(mailbox, "later")
        kept = {"status": "preempted", "message": "step 12 is kept"}
        await mailbox.end(0, "t/1", kept)
        await mailbox.leave(0)
        assert await taken(mailbox, 0) is None
        assert (await mailbox.watch())["lanes"] == [1], (
            "the lane that leaves counts no more"
        )
        again = await mailbox.take(1, WAIT_S)
        assert (again.ticket, again.source) == ("t/1", refuge), (
            "before the others"
        )
        await mailbox.lost(0)  # Ray takes the node out
        assert (await mailbox.watch())["running"].keys() == {1}, (
            "the trial is another lane's by now"
        )
        await mailbox.hello(0)
        await mailbox.lost(1)  # without a notice
        once_more = await mailbox.take(0, WAIT_S)
        assert (once_more.ticket, once_more.source) == ("t/1", refuge), (
            "what was kept is still there"
        )
        await mailbox.end(0, "t/1", {"status": "done"})
        assert not refuge.exists(), "it is deleted with its end"

    with_refuge(tmp_path, test)
