"""Training functions of a sweep from a file that are run once more on a warm lane (tune/lanes/comparison.py)."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.unit.test_mailbox_functions import assignment, row
from tune.lanes.comparison import difference
from tune.lanes.mailbox import Mailbox
from tune.lanes.messages import Assignment

DONE = {"status": "done"}


def run(steps: Callable[[Mailbox], Coroutine[Any, Any, None]]) -> None:
    async def all_of_it() -> None:
        mailbox = Mailbox(compares=True)
        for lane in range(2):
            await mailbox.hello(lane, "cpu")
        await steps(mailbox)

    asyncio.run(all_of_it())


async def taken(mailbox: Mailbox, lane: int = 0) -> str | None:
    """The trial that a lane takes, or what it hears in place of one."""
    found = await mailbox.take(lane, 0.02)
    return found.trial if isinstance(found, Assignment) else found


async def trained(mailbox: Mailbox, name: str, *losses: float, lane: int = 0, outcome: dict[str, Any] = DONE) -> None:
    """A lane takes a trial by name, reports, and ends it."""
    found = await mailbox.take(lane, 0.02)
    assert isinstance(found, Assignment), found
    assert found.trial == name
    for number, loss in enumerate(losses, 1):
        await mailbox.report_part(found.ticket, found.attempt, number, 1, row(number, loss), None)
    await mailbox.end(lane, found.ticket, outcome)


@pytest.mark.parametrize("end", [DONE, {"status": "stopped"}], ids=["done", "at its target"])
def test_a_function_that_gives_the_same_goes_on_in_the_same_process(end: dict[str, Any]) -> None:
    async def steps(mailbox: Mailbox) -> None:
        for name in ("a", "b", "c"):
            await mailbox.submit(assignment(name))
        await trained(mailbox, "a", 3.0, 2.0, outcome=end)
        found = await mailbox.take(0, 0.02)
        assert isinstance(found, Assignment)
        assert found.trial == "a-compared"
        waits = asyncio.ensure_future(mailbox.take(1, 5))  # a fresh process may run another
        assert (await waits).trial == "b"  # type: ignore[union-attr]
        await mailbox.end(1, "b", DONE)
        assert await taken(mailbox, lane=1) is None, "and nothing more until the function is known to be clean"
        woken = asyncio.ensure_future(mailbox.take(1, 5))
        for number, loss in ((1, 3.0), (2, 2.0)):
            assert await mailbox.report_part(found.ticket, 0, number, 1, row(number, loss), None)
        await mailbox.end(0, found.ticket, end)
        assert (await woken).trial == "c"  # type: ignore[union-attr]
        assert await mailbox.restarts() == []
        assert await mailbox.heard("a-compared") == [], "nothing is left of it"

    run(steps)


@pytest.mark.parametrize(
    ("warm", "outcome"),
    [((3.0, 9.0), DONE), ((3.0,), {"status": "error", "message": "it left its file"}), ((3.0,), DONE)],
)
def test_one_that_does_not_has_a_process_for_each_trial(warm: tuple[float, ...], outcome: dict[str, Any]) -> None:
    async def steps(mailbox: Mailbox) -> None:
        for name in ("a", "b", "c"):
            await mailbox.submit(assignment(name, failures=2))
        await trained(mailbox, "a", 3.0, 2.0)
        await trained(mailbox, "a-compared", *warm, outcome=outcome)
        assert await taken(mailbox) == "anew"
        await mailbox.hello(0, "cpu")
        await trained(mailbox, "a-compared", 3.0, 2.0)
        assert await taken(mailbox) == "anew"
        await mailbox.hello(0, "cpu")
        await trained(mailbox, "b", 1.0)
        assert await taken(mailbox) == "anew"
        await mailbox.hello(0, "cpu")
        await trained(mailbox, "c", 1.0)
        notes = (await mailbox.watch())["notes"]
        [said] = [words for words in notes if words.endswith("has a process of its own")]
        assert said.startswith("module:train does not give the same on a warm lane: ")
        assert len(await mailbox.restarts()) == 3

    run(steps)


def test_a_process_in_which_a_trial_has_failed_is_not_what_others_are_compared_with() -> None:
    async def steps(mailbox: Mailbox) -> None:
        for name in ("a", "b"):
            await mailbox.submit(assignment(name))
        await trained(mailbox, "a", outcome={"status": "error", "message": "it fails"})
        assert await taken(mailbox) == "anew"
        await mailbox.hello(0, "cpu")
        assert await taken(mailbox) == "b"

    run(steps)


@pytest.mark.parametrize(
    ("again", "words"),
    [
        ([[{"loss": 0.5}], [{"loss": float("nan")}]], None),
        ([[{"loss": 0.5}]], None),
        ([[{"loss": 0.5, "epoch_time_s": 3.0, "processId": 7, "samples_per_s": 1e3}], [{"loss": float("nan")}]], None),
        ([[{"loss": 0.5}], [{"loss": 0.25}]], "`loss` is 0.25, not nan (report 2 of rank 0)"),
        ([[{"loss": 0.5, "accuracy": {"top5": 1}}]], "`accuracy.top5` is 1, not missing (report 1 of rank 0)"),
        ([[{"its end": "out of files"}]], "`loss` is missing, not 0.5 (report 1 of rank 0)"),
    ],
)
def test_a_difference_is_named(again: list[list[dict[str, Any]]], words: str | None) -> None:
    first = [[{"loss": 0.5}], [{"loss": float("nan")}]]
    assert difference(first, again) == words
