"""Sweeps in their users' hands: extended, stopped, cloned, in another order;
nothing is trained twice.
"""

import contextlib
import logging
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.on_ray.embedded import actors
from tests.on_ray.test_lanes import rows, run, sweep
from tests.on_ray.test_lanes_boundary import failures, known
from tests.on_ray.test_sweep_faults import ended as sentence
from tests.on_ray.test_sweep_faults import kill
from tests.specs import evaluations, make
from tests.unit.test_extension import record as ended
from tests.waits import until, when
from trainers.errors import ConfigError, PacelineError
from trainers.launch.local import run_local
from tune import steer
from tune.sweeps.spec import is_complete, prepare
from tune.sweeps.steer import apply_extension, known_trials, order_extension
from tune.sweeps.sweep import run_to_answer
from tune.trials.journal import Journal
from tune.trials.record import BY_HAND, trial_id
from tune.trials.steering import Actions

pytestmark = [pytest.mark.ray, pytest.mark.full]


def count(file):
    """Steps that were trained."""
    return len(file.read_text().split()) if file.exists() else 0


def train(steps, gate, waits_in=5, **memory):
    args = {"steps": str(steps), "gate": str(gate), "waits_in": waits_in}
    args |= memory
    checkpoint = {"every_steps": 5, "keep": 1}
    return {
        "task": "tests.lane_tasks:Counted",
        "task_args": args,
        "max_steps": 25,
        "checkpoint": checkpoint,
    }


def unbroken(tmp_path, seed, **changes):
    """The curve of a run that was that long from its beginning."""
    spec = make(tmp_path, name=f"seed-{seed}", seed=seed, **changes)
    run_local(spec)
    return rows(evaluations(spec))


def test_a_killed_sweep_is_extended_in_all_ways_and_nothing_is_trained_twice(
    tmp_path, driver
):
    """Nor does any run out of memory after the first."""
    from tune.sweeps._run import run_sweep

    memory = {"fp32_fits": 10, "log": str(tmp_path / "oom")}
    steps = tmp_path / "steps"
    gate = tmp_path / "gate"
    gate.touch()  # for the first trial; the second waits in its twelfth step
    spec = sweep(
        tmp_path,
        {"seed": [1, 2, 3]},
        train(steps, gate, waits_in=12, **memory),
        budget={"trials": 2},
    )
    thread = when(lambda: count(steps) >= 37, lambda: kill("Mailbox"))
    with pytest.raises(PacelineError) as error:
        run(spec)
    thread.join()
    sentence(error.value, spec)
    met = failures(tmp_path)
    assert met == {"fp32": 2}, "24 and 12"
    assert count(steps) == 37
    gate.mkdir()

    keys = {
        "space.seed": [1, 2, 3, 4],
        "budget.trials": 4,
        "train.max_steps": 50,
    }
    longer = order_extension(spec.uri, keys)
    assert apply_extension(longer) == 0, (
        "the only one that had ended is to be longer"
    )
    assert {record.status for record in run_sweep(longer)} == {"done"}
    assert 200 <= count(steps) <= 200 + 7, (
        "of the second's twelve steps its checkpoints had five at least"
    )
    records = {
        record.config["seed"]: record
        for record in Journal(spec.storage).records()
    }
    assert records.keys() == {1, 2, 3, 4}
    assert failures(tmp_path) == met
    [learned] = known(tmp_path).to_plain().values()
    assert (max(learned["fits"]), learned["misfit"]) == (8, 12)
    for seed in (3, 4):
        spent = records[seed].spent
        assert min(spent.starting_s, spent.training_s) > 0
        assert spent.starting_s + spent.training_s < spent.total_s
        assert sum(spent.phases_s.values()) == pytest.approx(spent.total_s)
        assert spent.began + spent.total_s <= records[seed].end_time
    for seed in (1, 2, 3):  # which was done, which was cut off, which is new
        alone = train(tmp_path / "alone", tmp_path, **memory)
        assert rows(records[seed].curve) == unbroken(
            tmp_path, seed, **alone | {"max_steps": 50}
        )

    target = {
        "objective.metric": "time_to_target",
        "objective.target": {"val_accuracy": 0.5},
        "finalists": 0,
    }
    result = run_to_answer(order_extension(spec.uri, target), False, False)
    assert count(steps) <= 207
    assert all(
        record.time_to_target_s is not None for record in result.records
    )
    assert "val_accuracy 0.5" in result.answer.text


@contextlib.contextmanager
def heard(caplog):
    """What the driver says, whatever becomes of the log of those above it."""
    said = logging.getLogger("tune.sweeps")
    said.addHandler(caplog.handler)
    try:
        yield
    finally:
        said.removeHandler(caplog.handler)


def has_said(caplog, words):
    return any(message.startswith(words) for message in caplog.messages)


def test_repeats_end_with_the_budget_and_another_start_goes_on_with_them(
    tmp_path, driver, caplog
):
    steps = tmp_path / "steps"
    gate = tmp_path / "gate"
    target = {"metric": "time_to_target", "target": {"val_accuracy": 0.5}}
    spec = sweep(
        tmp_path,
        {"optimizer.lr": [0.1, 0.2]},
        train(steps, gate),
        objective=target,
        finalists=2,
        budget={"time_s": 20},
    )
    prepare(spec, fresh=False)
    for rate in (0.1, 0.2):
        config = {"optimizer.lr": rate}
        found = ended(config, [0.5, 0.7])
        Journal(spec.storage).append(replace(found, time_to_target_s=1.0))

    def is_over():
        return has_said(caplog, "repeats end here") or gate.exists()

    # The first repeat waits at the gate for as long as it may.
    thread = when(is_over, lambda: gate.mkdir(exist_ok=True))
    with heard(caplog):
        assert {found.purpose for found in run(spec)} == {"trial"}
    assert not is_complete(spec)
    gate.mkdir(exist_ok=True)
    thread.join()
    budget = spec.config.budget.model_copy(update={"time_s": None})
    config = spec.config.model_copy(update={"budget": budget})
    purposes = [found.purpose for found in run(replace(spec, config=config))]
    assert purposes.count("repeat") >= 4
    assert is_complete(spec)


def test_a_running_sweep_does_what_its_user_wants(tmp_path, driver, caplog):
    steps = tmp_path / "steps"
    gate = tmp_path / "gate"
    spec = sweep(tmp_path, {"seed": [1, 2, 3, 4]}, train(steps, gate))
    ids = {seed: trial_id({"seed": seed}) for seed in (1, 2, 3, 4)}

    def use():
        steer(spec.uri, "pause")
        for seed in (1, 2):
            steer(spec.uri, "stop", ids[seed][:8])
        steer(spec.uri, "first", ids[4])
        order_extension(spec.uri, {"train.max_steps": 30})
        until(lambda: has_said(caplog, "by hand: extend"), "the driver's word")
        gate.mkdir()
        until(
            lambda: Journal(spec.storage).find(ids[1]), "the end of the first"
        )
        steer(spec.uri, "clone", ids[1])
        steer(spec.uri, "go-on")

    thread = when(lambda: count(steps) >= 3, use)
    with heard(caplog):
        result = run_to_answer(spec, False, False)
    thread.join()
    by_id = {record.id: record for record in result.records}
    first, never, third, fourth = (by_id[ids[seed]] for seed in (1, 2, 3, 4))
    clone = by_id[trial_id({"seed": 1}, "clone")]
    assert [(first.status, first.message), (never.status, never.message)] == [
        ("stopped", BY_HAND)
    ] * 2
    assert (len(first.curve), never.curve) == (1, [])
    assert fourth.spent is not None
    assert third.spent is not None
    assert fourth.spent.began < third.spent.began
    assert (
        "- seed 2 was stopped by hand: how good it would have been is open."
        in result.answer.text
    ), "of seed 1 the clone tells"
    for record in (clone, third, fourth):
        assert record.status == "done"
    assert clone.purpose == "clone"
    assert rows(clone.curve) == unbroken(tmp_path, 1, max_steps=30)
    assert rows(third.curve) == unbroken(tmp_path, 3, max_steps=30)
    assert count(steps) == 3 * 30, (
        "the clone went on from the checkpoint of the trial that was stopped"
    )


def has_mailbox():
    found = actors(("state", "=", "ALIVE"))
    return any(actor.class_name.endswith("Mailbox") for actor in found)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_actions_on_a_running_sweep_with_kills_in_between(
    tmp_path, driver, seed
):
    """Each start knows what users wanted before; all trials come to one end each."""
    steps = tmp_path / "steps"
    length = {"max_steps": 300, "evaluate": {"every_steps": 20}}
    seeds = list(range(12))
    task = {**train(steps, tmp_path), **length}  # the gate is open
    spec = sweep(tmp_path, {"seed": seeds}, task, lanes=2)
    prepare(spec, fresh=False)
    rng = random.Random(seed)
    kinds = (
        "stop",
        "first",
        "first",
        "clone",
        "clone",
        "pause",
        "go-on",
        "go-on",
    )
    done: list[str] = []

    def use():
        while len(done) < 100:
            time.sleep(0.05)
            kind: Any = rng.choice(kinds)
            of = []
            if kind in ("stop", "first", "clone"):
                of.append(rng.choice(sorted(known_trials(spec))))
            with contextlib.suppress(ConfigError):  # of a trial that has ended
                steer(spec.uri, kind, *of)
                done.append(kind)
                if len(done) % 25 == 0:
                    until(has_mailbox, "a sweep that runs")
                    kill("Mailbox")
        steer(spec.uri, "go-on")
        done.append("the end")

    thread = when(lambda: count(steps) >= 3, use)
    kills = 0
    while thread.is_alive() or not is_complete(spec):
        try:
            run(spec)
        except PacelineError:
            kills += 1
    assert done[-1] == "the end"
    assert kills >= 2

    wanted = Actions(spec.storage).read()
    found = Journal(spec.storage).records()
    records = {record.id: record for record in found}
    assert len(records) == len(found)
    planned = {trial_id({"seed": number}) for number in seeds}
    assert records.keys() == planned | wanted.clones.keys()
    stopped = {
        name for name, each in records.items() if each.status == "stopped"
    }
    assert stopped <= wanted.stopped
    whole = [each for each in found if each.status == "done"]
    assert len(whole) + len(stopped) == len(found)
    curves = {
        number: unbroken(
            tmp_path, number, max_steps=300, evaluate__every_steps=20
        )
        for number in seeds
    }
    for record in whole:
        assert rows(record.curve) == curves[record.config["seed"]], record.id
