"""Actions on a sweep: what they come to, what the mailbox makes of them, and
what a user may ask for.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.unit.test_extension import NEVER, begin, record
from trainers.lease import LEASE, Holder
from trainers.storage import Storage
from tune import steer
from tune.__main__ import main
from tune.forks.assignment import Assignment
from tune.lanes._mailbox import Mailbox
from tune.lanes.queue import new_ticket
from tune.report.answer import answer
from tune.report.table import columns
from tune.search.ray_search import reward
from tune.search.space import grid
from tune.sweeps.spec import is_complete
from tune.sweeps.steer import known_trials
from tune.trials.journal import Journal, Live, Running, write_live
from tune.trials.record import BY_HAND, trial_id
from tune.trials.steering import Action, Actions, Steering

TRIALS = [f"trial-{number}" for number in range(12)]
LANES = 2


class Driver:
    """Submits the trials that have no end yet, as a driver does at its start,
    to a mailbox of its own.
    """

    def __init__(self, sweep, ends):
        self.actions = Actions(sweep)
        self.ends = ends
        self.steering = Steering()
        self.mailbox = Mailbox()
        self.running: dict[int, Assignment] = {}
        self.reports = 0

    async def begin(self):
        await self.look()
        for lane in range(LANES):
            await self.mailbox.hello(lane)
        for trial in TRIALS:
            if trial not in self.ends:
                await self.submit(trial)

    async def submit(self, trial):
        await self.mailbox.submit(Assignment(new_ticket(trial), trial, {}))

    async def look(self):
        before = self.steering
        self.steering = self.actions.read()
        await self.mailbox.steer(self.steering)
        for clone in (
            self.steering.clones.keys()
            - before.clones.keys()
            - self.ends.keys()
        ):
            await self.submit(clone)

    async def work(self, lane):
        """The lane takes a trial, or goes on with the one that it has, which
        ends at its second report.
        """
        if lane not in self.running:
            await self.record()
            waiting = [
                trial
                for trial in self.steering.first
                if trial in self.waiting()
            ]
            taken = await self.mailbox.take(lane, 0.001)
            assert not (taken and self.steering.paused)
            if isinstance(taken, Assignment):
                assert taken.trial not in self.steering.stopped
                assert not waiting or taken.trial == waiting[0], (
                    "what is wanted first comes first"
                )
                self.running[lane] = taken
            return
        assignment = self.running[lane]
        self.reports += 1
        goes_on = await self.mailbox.report(
            assignment.ticket, {"step": self.reports}
        )
        assert goes_on is (assignment.trial not in self.steering.stopped)
        if not goes_on or random.random() < 0.5:
            await self.mailbox.end(
                lane,
                assignment.ticket,
                {"status": "done" if goes_on else "stopped"},
            )
            del self.running[lane]

    def waiting(self):
        held = {assignment.trial for assignment in self.running.values()}
        return (
            {*TRIALS, *self.steering.clones}
            - held
            - self.ends.keys()
            - self.steering.stopped
        )

    async def record(self):
        """Note the trials that have ended; of each there is one end."""
        for trial in (*TRIALS, *self.steering.clones):
            events = await self.mailbox.heard(trial)
            if (
                trial not in self.ends
                and events
                and (outcome := events[-1].outcome) is not None
            ):
                self.ends[trial] = outcome["status"]
                assert (outcome.get("message") == BY_HAND) is (
                    outcome["status"] == "stopped"
                )


@pytest.mark.parametrize("seed", range(8))
def test_after_a_hundred_actions_and_kills_in_between_nothing_is_lost(
    tmp_path, seed
):
    """A driver that begins anew knows what the one before knew, and all trials
    come to one end each.
    """
    sweep = Storage(tmp_path)
    rng = random.Random(seed)
    random.seed(seed)

    def act(driver):
        known = [*TRIALS, *driver.steering.clones]
        kind: Any = rng.choice(
            [
                "stop",
                "first",
                "first",
                "clone",
                "pause",
                "go-on",
                "go-on",
                "extend",
            ]
        )
        trial = rng.choice(known) if kind in ("stop", "first", "clone") else ""
        keys = {
            "clone": {"of": rng.choice(TRIALS)},
            "extend": {"train.epochs": rng.randrange(9)},
        }.get(kind, {})
        driver.actions.add(Action(kind, trial, keys))

    async def play():
        ends: dict[str, str] = {}
        driver = Driver(sweep, ends)
        await driver.begin()
        for _ in range(100):
            act(driver)
            for _ in range(rng.randrange(4)):
                works = [partial(driver.work, lane) for lane in range(LANES)]
                await rng.choice(
                    [driver.look, driver.record, *works, *works]
                )()
            if (
                rng.random() < 0.1
            ):  # killed: what no record says is lost with its mailbox
                await driver.look()
                killed = driver
                driver = Driver(sweep, ends)
                await driver.begin()
                assert driver.steering == killed.steering
        driver.actions.add(Action("go-on"))
        await driver.look()
        while driver.waiting() or driver.running:
            for lane in range(LANES):
                await driver.work(lane)
            await driver.record()
        await driver.record()
        assert ends.keys() == {*TRIALS, *driver.steering.clones}
        assert {
            trial for trial, status in ends.items() if status == "stopped"
        } <= driver.steering.stopped
        return ends

    ends = asyncio.run(asyncio.wait_for(play(), 60))
    assert {"done", "stopped"} == set(ends.values())


def test_a_damaged_action_is_left_out(tmp_path):
    sweep = Storage(tmp_path)
    Actions(sweep).add(Action("pause"))
    sweep.write("steering/0.json", b"{")
    sweep.write(
        "steering/9.json", b'{"kind": "clone", "trial": "../../other"}'
    )
    assert Actions(sweep).read() == Steering(paused=True)


def test_what_was_stopped_by_hand_is_unknown_and_a_clone_is_no_second_sample(
    tmp_path,
):
    """Of the mean over seeds neither is a part; nor do searches hear of what
    was stopped.
    """
    keys: dict[str, Any] = {
        "space": {"seed": [0, 1], "global_batch_size": [8, 16]}
    }
    config = begin(
        tmp_path, objective={"metric": "val_accuracy"}, **keys
    ).config
    runs = [
        record({"seed": seed, "global_batch_size": size}, [value])
        for size, seed, value in (
            (8, 0, 0.8),
            (8, 1, 0.1),
            (16, 0, 0.7),
            (16, 1, 0.6),
        )
    ]
    runs[1] = replace(runs[1], status="stopped", message=BY_HAND)
    clone = record(runs[2].config, [0.7], purpose="clone")
    found = answer(config, [*runs, clone])
    assert [one.config["global_batch_size"] for one in found.ranking] == [
        8,
        16,
        16,
    ]
    assert "how good it would have been is open" in found.text
    again = record(runs[1].config, [0.9], purpose="clone")
    assert "is open" not in answer(config, [*runs, clone, again]).text, (
        "its clone tells"
    )
    wider = record(runs[2].config | {"ema.decay": 0.9}, [0.5], purpose="clone")
    cells = columns(config, [*runs, wider])[2].cells.values()
    assert [*cells] == ["", "", "", "", "0.9"]
    assert "null" not in answer(config, [*runs, wider]).text
    assert math.isnan(reward(config.objective, runs[1]))
    assert reward(config.objective, again) == 0.9


def test_the_command_lists_trials_and_names_them_by_their_beginnings(
    tmp_path, capsys
):
    spec = begin(tmp_path)
    ended, running = ({"global_batch_size": size} for size in (8, 16))
    Journal(spec.storage).append(record(ended, NEVER))
    write_live(
        spec.storage,
        Live("running", 2, 1, [Running(trial_id(running), 0, 1.0, running)]),
    )
    spec.storage.write(LEASE, Holder.this_process().write())
    clone = trial_id({"global_batch_size": 8, "optimizer.lr": 0.01}, "clone")
    for words in (
        ["clone", trial_id(ended)[:4], "optimizer.lr=1e-2"],
        ["stop", trial_id(running)],
        ["pause"],
    ):
        assert main(["steer", spec.uri, *words]) == 0
    steering = Actions(spec.storage).read()
    assert (steering.paused, steering.stopped, steering.clones.keys()) == (
        True,
        {trial_id(running)},
        {clone},
    )
    assert not steering.clones[clone].goes_on, (
        "with another learning rate it is another run from its beginning"
    )
    capsys.readouterr()
    assert main(["steer", spec.uri]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [trial_id(ended), "done"],
        [trial_id(running), "running"],
        [clone, "waiting"],
    ]
    assert steer(spec.uri, "clone", trial_id(ended), epochs=8) == trial_id(
        ended | {"epochs": 8}, "clone"
    )
    assert not is_complete(spec), "its clones are still to run"


@pytest.mark.parametrize("holder", [None, "ended", "elsewhere"])
def test_trials_of_a_killed_driver_are_not_running(tmp_path, holder):
    """Whether a driver on another machine was killed is not known here."""
    spec = begin(tmp_path)
    trial = {"global_batch_size": 8}
    write_live(
        spec.storage,
        Live("running", 2, 1, [Running(trial_id(trial), 0, 1.0, trial)]),
    )
    here = Holder.this_process()
    holders = {
        "ended": replace(here, pid=2**22 + 1),
        "elsewhere": replace(here, machine="another"),
    }
    if holder is not None:
        spec.storage.write(LEASE, holders[holder].write())
    status = known_trials(spec)[trial_id(trial)].status
    assert status == ("running" if holder == "elsewhere" else "waiting")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["halt"], "must be one of stop, pause, go-on, clone, first"),
        (["stop"], "`TRIAL` is needed"),
        (["pause", "abc"], "`TRIAL` is not for pause"),
        (["stop", "nothing"], "with `python -m tune steer '"),
        (["stop", ""], "`TRIAL` is needed"),
        (["first", "ENDED"], "has ended already: done"),
        (["stop", "WAITING", "epochs=8"], "is not for stop"),
        (["clone", "ENDED", "optimizer.lr=-1"], "greater than 0"),
        (
            ["clone", "ENDED", "scaling.num_workers=2"],
            "cannot vary inside a sweep",
        ),
        (["clone", "ENDED", "optimiser.lr=1"], "did you mean `optimizer`"),
        (["clone", "CLONE", "seed=3"], "has this clone already"),
    ],
)
def test_what_cannot_be_done_is_said_and_not_written(
    tmp_path, capsys, words, said
):
    spec = begin(tmp_path, storage_path=f"{tmp_path}/my sweeps")
    done, waits = grid(spec.config)
    Journal(spec.storage).append(record(done, NEVER))
    clone = record(done | {"seed": 3}, NEVER, purpose="clone")
    Journal(spec.storage).append(clone)
    ids = {
        "ENDED": trial_id(done),
        "WAITING": trial_id(waits),
        "CLONE": clone.id,
    }
    assert (
        main(["steer", spec.uri, *(ids.get(word, word) for word in words)])
        == 2
    )
    assert said in capsys.readouterr().err
    assert spec.storage.names("steering") == []


def test_a_trial_that_keeps_checkpoints_runs_on_one_lane_at_a_time(
    tmp_path,
):
    """Its submissions write to the same place; a failed one's is deleted, any
    other's kept.
    """

    async def main():
        mailbox = Mailbox(Storage(tmp_path))
        one = Assignment("t/1", "t", {"checkpoint": {"every_epochs": 1}})
        for assignment in (
            one,
            replace(one, ticket="t/2"),
            replace(one, ticket="t/3"),
        ):
            await mailbox.submit(assignment)
        for ticket, status, stays in (
            ("t/1", "done", True),
            ("t/2", "stopped", True),
            ("t/3", "error", False),
        ):
            taken = await mailbox.take(0, 0.01)
            assert isinstance(taken, Assignment)
            assert taken.refuge is not None
            taken.refuge.write("state", b"")
            assert (taken.ticket, taken.refuge.uri) == (
                ticket,
                f"{tmp_path}/states/t",
            )
            assert await mailbox.take(1, 0.01) is None
            await mailbox.end(0, ticket, {"status": status})
            assert taken.refuge.exists() is stays

    asyncio.run(main())
