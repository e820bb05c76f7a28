"""The mailbox without Ray: who gets which trial, what is heard of it, and what happens when a lane is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from trainers.causes import death_of
from trainers.errors import RunFailedError, Status
from trainers.storage import Storage
from tune.lanes.mailbox import MAX_LOSSES, Mailbox
from tune.lanes.messages import Assignment, Event

WAIT_S = 0.05
Test = Callable[[Mailbox], Coroutine[Any, Any, None]]


def asynchronous(test: Test) -> Callable[[], None]:
    """Run a test with a new mailbox in a loop of its own; one that waits for ever ends after a minute."""

    def run() -> None:
        async def main() -> None:
            await asyncio.wait_for(test(Mailbox()), 60)

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def assignment(ticket: str, trial: str | None = None) -> Assignment:
    return Assignment(ticket, trial or ticket, {"seed": 1})


async def taken(mailbox: Mailbox, lane: int = 0) -> str | None:
    """The ticket that a lane gets."""
    found = await mailbox.take(lane, WAIT_S)
    return found.ticket if isinstance(found, Assignment) else found


def state(mailbox: Mailbox) -> dict[str, Any]:
    """The tickets of queued trials, and of running ones by lane."""
    return {"queued": list(mailbox._queue), "running": mailbox._running}


async def reports(mailbox: Mailbox, trial: str) -> list[dict[str, Any]]:
    """The evaluations that the driver would find."""
    return [event.metrics for event in await mailbox.heard(trial) if event.outcome is None]


async def submit(mailbox: Mailbox, *tickets: str) -> None:
    for ticket in tickets:
        await mailbox.submit(assignment(ticket))


@asynchronous
async def test_trials_come_in_the_order_of_their_submission(mailbox: Mailbox) -> None:
    await submit(mailbox, "a", "b", "c")
    assert [await taken(mailbox, lane) for lane in (0, 1, 0)] == ["a", "b", "c"]
    assert await mailbox.take(0, WAIT_S) is None


@asynchronous
async def test_a_lane_gets_the_whole_assignment(mailbox: Mailbox) -> None:
    given = assignment("t", "trial")
    await mailbox.submit(given)
    assert await mailbox.take(0, WAIT_S) == given


@asynchronous
async def test_waiting_for_a_trial_ends_with_none(mailbox: Mailbox) -> None:
    began = asyncio.get_running_loop().time()
    assert await mailbox.take(0, 0.1) is None
    assert 0.09 <= asyncio.get_running_loop().time() - began < 1


@asynchronous
async def test_a_waiting_lane_is_woken(mailbox: Mailbox) -> None:
    waiting = asyncio.create_task(mailbox.take(0, 60))
    await asyncio.sleep(0.01)
    await submit(mailbox, "a")
    assert await waiting == assignment("a")


@asynchronous
async def test_no_two_lanes_get_one_trial(mailbox: Mailbox) -> None:
    tickets = [f"t{index}" for index in range(100)]
    got: list[str] = []

    async def lane(number: int) -> None:
        while isinstance(found := await mailbox.take(number, 60), Assignment):
            got.append(found.ticket)
            await asyncio.sleep(0)
            await mailbox.end(number, found.ticket, {"status": "done"})

    lanes = [asyncio.create_task(lane(number)) for number in range(7)]
    for ticket in tickets:
        await submit(mailbox, ticket)
        await asyncio.sleep(0)
    for ticket in tickets:
        assert (await mailbox.next_event(ticket, 0)).outcome is not None
    await mailbox.close()
    await asyncio.gather(*lanes)
    assert sorted(got) == sorted(tickets)
    assert state(mailbox) == {"queued": [], "running": {}}


@asynchronous
async def test_reports_and_the_end_are_heard_in_order(mailbox: Mailbox) -> None:
    await submit(mailbox, "a")
    hearing = asyncio.create_task(mailbox.next_event("a", 0))
    await taken(mailbox, 3)
    await asyncio.sleep(0.01)
    assert not hearing.done()
    assert await mailbox.report("a", {"step": 1})
    assert await hearing == Event({"step": 1})
    assert await mailbox.report("a", {"step": 2})
    await mailbox.end(3, "a", {"status": "done"})
    assert await mailbox.next_event("a", 1) == Event({"step": 2})
    assert (await mailbox.next_event("a", 2)).outcome == {"lane": 3, "status": "done"}
    assert (await mailbox.next_event("a", 0)) == Event({"step": 1})  # may be asked again
    assert await reports(mailbox, "a") == [{"step": 1}, {"step": 2}]


@asynchronous
async def test_nothing_is_heard_after_the_end(mailbox: Mailbox) -> None:
    await submit(mailbox, "a")
    await taken(mailbox)
    await mailbox.end(0, "a", {"status": "done"})
    await mailbox.report("a", {"step": 9})
    await mailbox.end(0, "a", {"status": "error"})
    assert (await mailbox.next_event("a", 0)).outcome == {"lane": 0, "status": "done"}
    assert await reports(mailbox, "a") == []


@asynchronous
async def test_a_trial_whose_lane_died_starts_again_before_the_others(mailbox: Mailbox) -> None:
    await submit(mailbox, "a", "b")
    assert await taken(mailbox, 0) == "a"
    await mailbox.hello(0)
    assert [await taken(mailbox, 1), await taken(mailbox, 0)] == ["a", "b"]


@asynchronous
async def test_a_trial_that_loses_its_lane_again_is_lost(mailbox: Mailbox) -> None:
    await submit(mailbox, "a")
    for lane in range(MAX_LOSSES):
        assert await taken(mailbox, lane) == "a"
        await mailbox.hello(lane)
    outcome = (await mailbox.next_event("a", 0)).outcome
    assert outcome is not None
    assert (outcome["status"], outcome["lane"]) == ("node_lost", MAX_LOSSES - 1)
    assert str(MAX_LOSSES) in outcome["message"]
    assert await mailbox.take(0, WAIT_S) is None


@asynchronous
async def test_a_lost_trial_says_who_died_of_what(mailbox: Mailbox) -> None:
    await submit(mailbox, "a")
    for number in range(MAX_LOSSES):
        assert await taken(mailbox, 0) == "a"
        await mailbox.lost(0, death_of(number, -9, 4711 + number))
    outcome = (await mailbox.next_event("a", 0)).outcome
    assert outcome is not None
    assert outcome["message"] == "its worker group died 3 times under it: rank 2 died by SIGKILL (pid 4713)"
    assert "rank 0 died by SIGKILL (pid 4711)" in (await mailbox.watch())["notes"][0]


@pytest.mark.parametrize("status", ["out_of_host_memory", "preempted", "hung", "error"])
def test_a_lost_trial_ends_as_what_befell_its_lane(status: Status) -> None:
    async def main() -> None:
        mailbox = Mailbox()
        await submit(mailbox, "a")
        for _ in range(1 if status == "hung" else MAX_LOSSES):
            await taken(mailbox)
            await mailbox.lost(0, RunFailedError(status, "of rank 1"))
        outcome = (await mailbox.next_event("a", 0)).outcome
        assert outcome is not None
        assert outcome["status"] == ("node_lost" if status == "error" else status)

    asyncio.run(asyncio.wait_for(main(), 60))


@asynchronous
async def test_a_hang_waits_for_what_the_other_ranks_say(mailbox: Mailbox) -> None:
    await submit(mailbox, "a")
    await taken(mailbox)
    waits = RunFailedError("hung", "rank 0 in the barrier after setup", 1.0, follows=True)
    first = asyncio.create_task(mailbox.hung(0, "a", waits, "stack of 0", 2))
    await asyncio.sleep(0)
    assert not first.done()
    await mailbox.hung(0, "a", RunFailedError("hung", "rank 1 in setup", 2.0), "stack of 1", 2)
    await first
    outcome = (await mailbox.next_event("a", 0)).outcome
    assert outcome is not None
    assert (outcome["status"], outcome["message"]) == ("hung", "rank 1 in setup; rank 0 in the barrier after setup")
    assert "stack of 0" in outcome["traceback"]
    assert "stack of 1" in outcome["traceback"]


@pytest.fixture
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tune.lanes.mailbox.GRACE_S", 0.05)


@pytest.mark.usefixtures("_short_grace")
@asynchronous
async def test_a_rank_that_cannot_say_where_it_hangs_is_not_waited_for(mailbox: Mailbox) -> None:
    await submit(mailbox, "a")
    await taken(mailbox)
    await mailbox.hung(0, "a", RunFailedError("hung", "rank 1 in setup", 2.0), "stack of 1", 2)
    outcome = (await mailbox.next_event("a", 0)).outcome
    assert outcome is not None
    assert outcome["message"] == "rank 1 in setup"


@asynchronous
async def test_a_lane_that_starts_the_first_time_changes_nothing(mailbox: Mailbox) -> None:
    await submit(mailbox, "a")
    await mailbox.hello(0)
    await mailbox.hello(1)
    assert state(mailbox) == {"queued": ["a"], "running": {}}


@asynchronous
async def test_a_lane_that_died_after_the_end_costs_nothing(mailbox: Mailbox) -> None:
    await submit(mailbox, "a")
    await taken(mailbox, 0)
    await mailbox.end(0, "a", {"status": "done"})
    await mailbox.hello(0)
    assert await mailbox.take(0, WAIT_S) is None
    assert (await mailbox.next_event("a", 0)).outcome == {"lane": 0, "status": "done"}


@asynchronous
async def test_a_lane_that_is_lost_leaves_other_lanes_alone(mailbox: Mailbox) -> None:
    await submit(mailbox, "a", "b")
    await taken(mailbox, 0)
    await taken(mailbox, 1)
    await mailbox.hello(0)
    assert state(mailbox) == {"queued": ["a"], "running": {1: "b"}}


@asynchronous
async def test_a_trial_cancelled_before_its_start_never_starts(mailbox: Mailbox) -> None:
    await submit(mailbox, "a", "b")
    await mailbox.cancel("a")
    assert await taken(mailbox) == "b"
    assert await mailbox.take(0, WAIT_S) is None


@asynchronous
async def test_a_trial_cancelled_while_it_runs_stops_at_its_next_report(mailbox: Mailbox) -> None:
    await submit(mailbox, "a")
    await taken(mailbox)
    assert await mailbox.report("a", {"step": 1})
    await mailbox.cancel("a")
    assert not await mailbox.report("a", {"step": 2})
    await mailbox.end(0, "a", {"status": "stopped"})
    assert state(mailbox)["running"] == {}


@asynchronous
async def test_a_cancelled_trial_whose_lane_died_does_not_start_again(mailbox: Mailbox) -> None:
    await submit(mailbox, "a", "b")
    await taken(mailbox, 0)
    await mailbox.cancel("a")
    await mailbox.hello(0)
    assert await taken(mailbox, 0) == "b"


@asynchronous
async def test_cancelling_what_is_unknown_is_nothing(mailbox: Mailbox) -> None:
    await mailbox.cancel("nobody")
    assert await reports(mailbox, "nobody") == []


@asynchronous
async def test_two_submissions_of_one_trial_are_told_apart(mailbox: Mailbox) -> None:
    """Tune may start two actors for one trial: each hears of its own submission, and none waits for ever."""
    await mailbox.submit(assignment("first", "trial"))
    await mailbox.submit(assignment("second", "trial"))
    hearing = [asyncio.create_task(mailbox.next_event(ticket, 0)) for ticket in ("first", "second")]
    for lane, ticket in enumerate(("first", "second")):
        assert await taken(mailbox, lane) == ticket
        await mailbox.end(lane, ticket, {"status": "done"})
    assert [(await event).outcome["lane"] for event in hearing] == [0, 1]  # type: ignore[index]


@asynchronous
async def test_the_reports_of_a_trial_are_those_of_the_submission_that_got_furthest(mailbox: Mailbox) -> None:
    await mailbox.submit(assignment("first", "trial"))
    await mailbox.submit(assignment("second", "trial"))
    await mailbox.report("first", {"step": 1})
    for step in (1, 2):
        await mailbox.report("second", {"step": step})
    assert await reports(mailbox, "trial") == [{"step": 1}, {"step": 2}]


@asynchronous
async def test_a_trial_that_starts_again_reports_each_evaluation_once(mailbox: Mailbox) -> None:
    """The curve of a trial whose lane died has no step twice."""
    await submit(mailbox, "a")
    await taken(mailbox, 0)
    await mailbox.report("a", {"step": 10})
    await mailbox.report("a", {"step": 20})
    await mailbox.hello(0)
    assert await taken(mailbox, 0) == "a"
    for step in (10, 20, 30):
        assert await mailbox.report("a", {"step": step})
    await mailbox.end(0, "a", {"status": "done"})
    assert [row["step"] for row in await reports(mailbox, "a")] == [10, 20, 30]


@asynchronous
async def test_closing_sends_every_lane_home(mailbox: Mailbox) -> None:
    waiting = [asyncio.create_task(mailbox.take(lane, 60)) for lane in range(3)]
    await asyncio.sleep(0.01)
    await mailbox.close()
    assert await asyncio.gather(*waiting) == ["close"] * 3
    await submit(mailbox, "late")
    assert await mailbox.take(0, WAIT_S) == "close"


@asynchronous
async def test_a_running_trial_stops_when_the_mailbox_closes(mailbox: Mailbox) -> None:
    await submit(mailbox, "a")
    await taken(mailbox)
    await mailbox.close()
    assert not await mailbox.report("a", {"step": 1})


@asynchronous
async def test_a_broken_sweep_ends_every_trial_with_its_words(mailbox: Mailbox) -> None:
    await submit(mailbox, "running", "queued", "done")
    await taken(mailbox)
    await mailbox.report("running", {"step": 1})
    await mailbox.end(1, "done", {"status": "done"})
    hearing = asyncio.create_task(mailbox.next_event("queued", 0))
    await mailbox.close(broken="all lanes are gone")
    broken = {"status": "error", "message": "all lanes are gone"}
    assert (await hearing).outcome == broken
    assert (await mailbox.next_event("running", 1)).outcome == broken
    assert (await mailbox.next_event("done", 0)).outcome == {"lane": 1, "status": "done"}
    await submit(mailbox, "late")
    assert (await mailbox.next_event("late", 0)).outcome == broken
    assert await mailbox.take(0, WAIT_S) == "close"


def test_a_lane_whose_wait_ends_as_a_trial_arrives_loses_no_trial() -> None:
    """Many lanes with tiny waits: what is submitted is taken, by somebody, once."""

    async def main() -> list[str]:
        mailbox, got = Mailbox(), []

        async def lane(number: int) -> None:
            while (found := await mailbox.take(number, 0.001)) != "close":
                if isinstance(found, Assignment):
                    got.append(found.ticket)

        lanes = [asyncio.create_task(lane(number)) for number in range(5)]
        for index in range(60):
            await asyncio.sleep(0.0009)
            await mailbox.submit(assignment(f"t{index}"))
        await asyncio.sleep(0.05)
        await mailbox.close()
        await asyncio.gather(*lanes)
        return got

    got = asyncio.run(main())
    assert sorted(got) == sorted(f"t{index}" for index in range(60))


@pytest.mark.parametrize("method", ["report", "end", "next_event"])
def test_a_ticket_that_was_never_submitted_is_an_error(method: str) -> None:
    args = {"report": ("x", {}), "end": (0, "x", {}), "next_event": ("x", 0)}[method]
    with pytest.raises(KeyError):
        asyncio.run(getattr(Mailbox(), method)(*args))


@asynchronous
async def test_no_trial_ends_before_the_expected_ones_are_here(mailbox: Mailbox) -> None:
    await submit(mailbox, "a")
    assert await taken(mailbox) == "a"
    await mailbox.expect(2)
    await mailbox.report("a", {"step": 1})
    assert (await asyncio.wait_for(mailbox.next_event("a", 0), WAIT_S)).outcome is None
    await mailbox.end(0, "a", {"status": "done"})
    end = asyncio.create_task(mailbox.next_event("a", 1))
    done, _ = await asyncio.wait([end], timeout=3 * WAIT_S)
    assert not done
    await submit(mailbox, "b")
    assert (await asyncio.wait_for(end, 60)).outcome == {"lane": 0, "status": "done"}
    await mailbox.forget("a")
    assert await taken(mailbox) == "b"
    await mailbox.end(0, "b", {"status": "done"})
    end = asyncio.create_task(mailbox.next_event("b", 0))
    done, _ = await asyncio.wait([end], timeout=3 * WAIT_S)
    assert not done, "of two that end at once Tune would drop an actor"
    await mailbox.expect(0)
    await asyncio.wait_for(end, 60)


@asynchronous
async def test_of_two_that_end_at_once_one_waits_for_the_other_s_successor(mailbox: Mailbox) -> None:
    for name in ("a", "b"):
        await submit(mailbox, name)
        await taken(mailbox)
        await mailbox.end(0, name, {"status": "done"})
    await mailbox.expect(2)
    ends = [asyncio.create_task(mailbox.next_event(name, 0)) for name in ("a", "b")]
    done, held = await asyncio.wait(ends, timeout=3 * WAIT_S)
    assert (len(done), len(held)) == (1, 1)
    await submit(mailbox, "c")
    done, held = await asyncio.wait(held, timeout=60)
    assert not held
    assert (await asyncio.wait_for(mailbox.next_event("a", 0), WAIT_S)).outcome is not None, "told once is told"


@asynchronous
async def test_nor_do_they_wait_for_ever(mailbox: Mailbox) -> None:
    await submit(mailbox, "a")
    assert await taken(mailbox) == "a"
    await mailbox.expect(2)
    mailbox.hold_s = WAIT_S
    await mailbox.end(0, "a", {"status": "done"})
    assert (await asyncio.wait_for(mailbox.next_event("a", 0), 60)).outcome is not None


@asynchronous
async def test_the_driver_hears_how_far_the_lanes_are(mailbox: Mailbox) -> None:
    await mailbox.note_start(1, "controller", b"handle")
    assert await mailbox.starts("controller") == {1: b"handle"}
    assert not await mailbox.starts("workers")
    await mailbox.note_start(1, "workers")
    assert await mailbox.starts("workers")
    await mailbox.note_start(1, "reservation", "first group")
    await mailbox.note_start(1, "reservation", "after a restart")
    assert await mailbox.starts("reservation") == {1: "after a restart"}


@asynchronous
async def test_the_next_actor_of_a_trial_goes_on_with_what_the_dead_one_submitted(mailbox: Mailbox) -> None:
    await mailbox.submit(assignment("t/1", "t"))
    assert await taken(mailbox) == "t/1"
    await mailbox.report("t/1", {"step": 1})
    await mailbox.orphan("t")
    await mailbox.report("t/1", {"step": 2})
    assert await mailbox.submit(assignment("another/1", "another")) == "another/1"
    assert await mailbox.submit(assignment("t/2", "t")) == "t/1"
    assert await taken(mailbox) == "another/1", "the second one of t was not queued"
    await mailbox.end(0, "another/1", {"status": "done"})
    assert [(await mailbox.next_event("t/1", index)).metrics["step"] for index in (0, 1)] == [1, 2]
    await mailbox.end(0, "t/1", {"status": "done"})
    assert (await mailbox.next_event("t/1", 2)).outcome == {"lane": 0, "status": "done"}
    assert state(mailbox) == {"queued": [], "running": {}}


@asynchronous
async def test_what_was_cancelled_has_no_heir(mailbox: Mailbox) -> None:
    await mailbox.submit(assignment("t/1", "t"))
    await mailbox.cancel("t/1")
    await mailbox.orphan("t")
    assert await mailbox.submit(assignment("t/2", "t")) == "t/2"


@asynchronous
async def test_an_end_is_kept_until_the_driver_has_its_record(mailbox: Mailbox) -> None:
    """Random search may draw a trial twice: the second one's actor has not heard its end yet."""
    for ticket in ("t/1", "t/2"):
        await mailbox.submit(assignment(ticket, "t"))
        assert await taken(mailbox) == ticket
        await mailbox.end(0, ticket, {"status": "done"})
    assert (await mailbox.next_event("t/1", 0)).outcome is not None
    assert (await mailbox.heard("t"))[-1].outcome == {"lane": 0, "status": "done"}
    await mailbox.forget("t")
    assert (await mailbox.next_event("t/2", 0)).outcome is not None
    await mailbox.forget("t")
    assert await mailbox.heard("t") == []


@asynchronous
async def test_lanes_that_start_again_are_counted_and_said_once(mailbox: Mailbox) -> None:
    for lane, trial in ((0, "a"), (1, "b"), (0, "c")):
        await mailbox.hello(lane)
        await mailbox.starts_again(lane, "a thread", trial)
    await mailbox.lost(1)  # as the controller hears of it
    for lane in (0, 1):
        await mailbox.hello(lane)
    await mailbox.hello(0)  # isolation: fresh, a group that has ended
    await mailbox.lost(0)
    await mailbox.hello(0)
    assert [why for _, why in await mailbox.restarts()] == ["a thread"] * 3 + ["its workers died"]
    assert [note for note in mailbox._notes if "left behind" in note] == [
        "lane 0 starts again: trial a has left behind: a thread (from now on only counted)"
    ]


def with_refuge(tmp_path: Path, test: Callable[[Mailbox, Storage], Coroutine[Any, Any, None]]) -> None:
    """Run a test whose trial `t` runs on lane 0, and has written to its refuge."""

    async def main() -> None:
        mailbox = Mailbox(Storage(str(tmp_path / "sweep")))
        for lane in (0, 1):
            await mailbox.hello(lane)
        await mailbox.submit(assignment("t/1", "t"))
        given = await mailbox.take(0, WAIT_S)
        assert isinstance(given, Assignment)
        assert given.refuge is not None
        assert given.source is None, "it begins at its start"
        given.refuge.write("state", b"")
        await test(mailbox, given.refuge)

    asyncio.run(main())


def test_a_trial_whose_node_is_taken_away_goes_on_from_what_it_kept(tmp_path: Path) -> None:
    async def test(mailbox: Mailbox, refuge: Storage) -> None:
        await submit(mailbox, "later")
        await mailbox.report("t/1", {"step": 10})
        await mailbox.hand_back(0, "t/1", "step 12 is kept")
        assert (await mailbox.watch())["lanes"] == [1], "the lane that leaves counts no more"
        assert (await mailbox.watch())["notes"] == ["lane 0, trial t: step 12 is kept, and it goes on from there"]
        again = await mailbox.take(1, WAIT_S)
        assert isinstance(again, Assignment)
        assert (again.ticket, again.source) == ("t/1", refuge.uri), "before the others"
        await mailbox.lost(0)  # Ray takes the node out
        assert state(mailbox) == {"queued": ["later"], "running": {1: "t/1"}}, "the trial is another lane's by now"
        await mailbox.hello(0)
        assert [why for _, why in await mailbox.restarts()] == ["its node is taken away"]

        await mailbox.lost(1)  # without a notice
        once_more = await mailbox.take(0, WAIT_S)
        assert isinstance(once_more, Assignment)
        assert (once_more.ticket, once_more.source) == ("t/1", refuge.uri), "what was kept is still there"
        await mailbox.end(0, "t/1", {"status": "done"})
        assert await reports(mailbox, "t") == [{"step": 10}]
        assert not refuge.exists(), "it is deleted with its end"

    with_refuge(tmp_path, test)


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_stopped_trial_has_kept_is_deleted(tmp_path: Path, when: str) -> None:
    async def test(mailbox: Mailbox, refuge: Storage) -> None:
        if when == "before":
            await mailbox.cancel("t/1")
        await mailbox.hand_back(0, "t/1", "step 12 is kept")
        assert refuge.exists() is (when == "after")
        await mailbox.cancel("t/1")
        assert not refuge.exists()
        assert await mailbox.take(1, WAIT_S) is None, "it does not go on"

    with_refuge(tmp_path, test)


@asynchronous
async def test_a_lane_that_leaves_hears_of_the_end(mailbox: Mailbox) -> None:
    assert not await mailbox.await_close(WAIT_S)
    waiting = asyncio.create_task(mailbox.await_close(60))
    await mailbox.close()
    assert await waiting
