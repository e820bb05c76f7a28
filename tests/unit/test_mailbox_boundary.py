"""The mailbox and memory, without Ray: what one trial has learned decides for the next."""

import asyncio

from tests.specs import read_json
from tests.unit.test_mailbox import WAIT_S, asynchronous, end_of, taken
from trainers.config import TrainConfig
from trainers.config.model import override
from trainers.storage import Storage
from tune.forks.assignment import Assignment
from tune.lanes._mailbox import Mailbox

TREE = override(
    TrainConfig,
    {
        "task": "tests.tasks:Blobs",
        "global_batch_size": 64,
        "max_steps": 1,
        "optimizer": {"lr": 1e-3, "name": "sgd"},
    },
    {},
)
CPU = "cpu, 8.0 GiB"
SMALL = "A10G, 22.5 GiB"
LARGE = "H100, 79.1 GiB"


def assignment(ticket, size="auto", **keys):
    tree = {
        "device": "auto",
        "precision": "fp32",
        **TREE,
        "microbatch_size": size,
        **keys,
    }
    return Assignment(ticket, ticket, tree)


async def learn(mailbox, lane, **sizes):
    """A trial on this lane tries sizes (`s8=True`: eight fit)."""
    await mailbox.submit(assignment("teacher"))
    assert await taken(mailbox, lane) == "teacher"
    for name, fits in sizes.items():
        await mailbox.observe(lane, "teacher", int(name[1:]), fits)


async def bounds(mailbox, **keys):
    """What the next trial of lane 0 is told."""
    await mailbox.submit(assignment("next", **keys))
    found = await mailbox.take(0, WAIT_S)
    return found.microbatch_bounds


async def ran_out(mailbox, ticket):
    """The message of a trial that was refused."""
    outcome = await end_of(mailbox, ticket)
    assert outcome["status"] == "out_of_memory"
    return str(outcome["message"])


@asynchronous
async def test_a_trial_that_starts_is_told_what_others_like_it_have_learned(
    mailbox,
):
    await mailbox.hello(0, CPU)
    await learn(mailbox, 0, s8=True, s16=False)
    assert await bounds(mailbox) == (8, 16)
    assert await bounds(mailbox, precision="bf16") == (None, None)


@asynchronous
async def test_what_is_known_not_to_fit_never_runs(mailbox):
    await mailbox.hello(0, CPU)
    for ticket, size in (("waits", 32), ("fits", 15)):
        await mailbox.submit(assignment(ticket, size))
    await mailbox.observe(
        0, "waits", 16, False
    )  # another trial of the same key would say it
    await mailbox.lost(0)
    await mailbox.submit(
        assignment("late", 16)
    )  # nobody would look at it again once the lane is back
    for ticket in ("waits", "late"):
        assert "one of 16 ran out of memory" in await ran_out(mailbox, ticket)
    await mailbox.hello(0, CPU)
    assert [await taken(mailbox), await taken(mailbox)] == ["fits", None]
    await mailbox.observe(0, "fits", 1, False)
    await mailbox.submit(assignment("auto"))
    await ran_out(mailbox, "auto")  # not even one sample fits


@asynchronous
async def test_a_size_too_large_for_one_gpu_waits_for_a_larger_that_may_come(
    mailbox,
):
    await mailbox.hello(0, SMALL)
    await mailbox.hello(1, LARGE)
    await learn(mailbox, 0, s16=False)
    await mailbox.submit(assignment("large", 32))
    assert [await taken(mailbox, 0), await taken(mailbox, 1)] == [
        None,
        "large",
    ]
    await mailbox.submit(assignment("larger", 64))
    await mailbox.lost(1)
    assert await taken(mailbox, 0) is None
    assert not await mailbox.heard("larger"), "its lane starts again"
    await mailbox.hello(1, SMALL)
    await taken(mailbox, 1)
    await ran_out(mailbox, "larger")


@asynchronous
async def test_what_has_ended_is_forgotten(mailbox):
    for ticket in map(str, range(5)):
        await mailbox.submit(assignment(ticket))
        await taken(mailbox)
        await mailbox.end(0, ticket, {"status": "done"})
        await mailbox.forget(ticket)
    assert not mailbox._trials


def test_what_was_learned_outlives_the_mailbox(tmp_path):
    storage = Storage(tmp_path)

    async def first():
        mailbox = Mailbox(storage)
        await mailbox.hello(0, CPU)
        await learn(mailbox, 0, s8=True, s16=False, s12=False, s4=True)

    async def second(known):
        mailbox = Mailbox(storage)
        await mailbox.hello(0, CPU)
        assert await bounds(mailbox) == known

    asyncio.run(first())
    [entry] = read_json(tmp_path / "boundary.json").values()
    assert entry == {"fits": [8], "misfit": 12}
    asyncio.run(second((8, 12)))
    (tmp_path / "boundary.json").write_text('{"key": 3}')
    asyncio.run(second((None, None)))  # damaged: said, and nothing is known
