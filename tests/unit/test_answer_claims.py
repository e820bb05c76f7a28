"""How often a sweep's answer claims what is not so, where the truth and the
noise are known: no more than it says.
"""

import dataclasses
import math
import random

import pytest

from tests.unit.report_records import config, trial
from tune.report.answer import answer
from tune.search.finalists import repeats_to_run, time_alone
from tune.trials.record import trial_id

SIZES = (32, 64, 128, 256, 512)
LEVEL = 0.05


@dataclasses.dataclass(frozen=True)
class Machine:
    """What measures a configuration: seeds differ, other work takes
    processors, evaluations are some time apart.
    """

    spread: float
    """Standard deviation of the logarithm, of runs that differ in their seed."""
    pressure: float
    """The largest share of a run's time that other work may take."""
    between: float
    """Time between two evaluations, as a share of the fastest configuration's
    time to the target.
    """

    def run(self, number, true_s, rng):
        alone_s = true_s * math.exp(rng.gauss(0, self.spread))
        slower = 1 / (1 - rng.uniform(0, self.pressure))
        curve = [
            {
                "step": 10.0 * row,
                "train_time_s": row * self.between * slower,
                "val_accuracy": 0.9,
            }
            for row in range(1, math.ceil(alone_s / self.between) + 1)
        ]
        settings = {"global_batch_size": SIZES[number], "precision": "fp32"}
        record = trial(
            number,
            "done",
            settings,
            metrics={"val_accuracy": 0.98},
            curve=curve,
        )
        return dataclasses.replace(
            record,
            time_to_target_s=curve[-1]["train_time_s"],
            cpu_pressure=self.pressure,
        )


def worlds(seed, count):
    """True times, from all equal to far apart."""
    rng = random.Random(seed)
    for _ in range(count):
        width = rng.choice([0.0, 0.05, 0.2, 0.5])
        yield (
            [
                math.exp(rng.uniform(0, width))
                for _ in range(rng.randint(2, len(SIZES)))
            ],
            rng,
        )


@pytest.mark.parametrize("pressure", [0.0, 0.82])
@pytest.mark.parametrize("between", [0.02, 2.0])
def test_one_run_each_claims_no_more_than_it_shows(pressure, between):
    """Who is first and who is next, by measured times: that the first is the
    faster of them is claimed or not.
    """
    machine = Machine(0.15, pressure, between)
    claims = 0
    wrong = 0
    made = 200
    for true_s, rng in worlds(1, made):
        records = [
            machine.run(number, time_s, rng)
            for number, time_s in enumerate(true_s)
        ]
        found = answer(config(), records)
        truth = {
            record.id: time_s
            for record, time_s in zip(records, true_s, strict=True)
        }
        first, second = found.ranking[:2]
        if second not in found.equal:
            claims += 1
            wrong += truth[first.id] >= truth[second.id]
    assert wrong <= LEVEL * made


def test_a_difference_that_is_there_is_claimed():
    machine = Machine(0.15, 0.1, 0.02)
    rng = random.Random(2)
    claims = sum(
        not answer(
            config(), [machine.run(0, 1.0, rng), machine.run(1, 4.0, rng)]
        ).equal
        for _ in range(100)
    )
    assert claims > 90


def test_a_target_met_at_the_first_evaluation_may_have_been_met_at_any_time():
    rng = random.Random(4)
    [first, second] = [
        Machine(0.0, 0.0, 1.0).run(number, time_s, rng)
        for number, time_s in enumerate([0.9, 3.5])
    ]
    assert (time_alone(first).low, time_alone(second).low) == (0.0, 3.0)
    found = answer(config(), [first, second])
    assert not found.equal
    assert found.line.startswith(
        "Batch 32: up to 1 s to val_accuracy 0.97 (one run), 4 times faster than"
    )
    assert answer(config(), [second]).line.startswith(
        "Batch 64 in fp32: 3 to 4 s to val_accuracy 0.97"
    )
    slow = dataclasses.replace(second, curve=[dict(second.curve[-1])])
    assert answer(config(), [first, slow]).equal == [slow]


@pytest.mark.full
def test_a_race_of_repeats_claims_no_more_than_it_shows():
    """Who is called slower than the first, how much faster another may be, and
    whether a sweep that is run again contradicts this one: names another as
    the fastest, where neither calls both equal.
    """
    machine = Machine(0.2, 0.0, 0.02)
    asked = config(finalists=4)
    claims = 0
    wrong = 0
    ahead = 0
    contradicted = 0
    made = 60
    for true_s, rng in worlds(5, made):
        sweeps = []
        for _ in range(2):
            records = [
                machine.run(number, time_s, rng)
                for number, time_s in enumerate(true_s)
            ]
            truth = {
                record.id: (number, true_s[number])
                for number, record in enumerate(records)
            }
            while wanted := repeats_to_run(asked, {}, records):
                for finalist, seed in wanted:
                    again = machine.run(*truth[finalist.id], rng)
                    name = trial_id(finalist.config, "repeat", seed)
                    records.append(
                        dataclasses.replace(
                            again,
                            id=name,
                            purpose="repeat",
                            seed=seed,
                            end_time=again.start_time,
                        )
                    )
            found = answer(asked, records)
            best_s = truth[found.ranking[0].id][1]
            slower = [final for final in found.finals if not final.equal]
            claims += bool(slower)
            wrong += any(
                truth[final.record.id][1] < best_s for final in slower
            )
            assert found.most_ahead is not None
            ahead += best_s / min(true_s) > found.most_ahead
            sweeps.append(
                (found.ranking[0].id, {final.record.id for final in slower})
            )
        (first, slower_1), (again_1, slower_2) = sweeps
        contradicted += again_1 in slower_1 and first in slower_2
    assert wrong <= LEVEL * 2 * made
    assert ahead <= LEVEL * 2 * made
    assert contradicted <= LEVEL * made
    assert claims > 0.2 * made
