"""Finalists: who is repeated, in which order, what the repeats say, and how
often the fastest is lost.
"""

import math
from dataclasses import replace

import pytest

from tests.unit import report_records
from tests.unit.report_records import TRAIN, done
from tune.report.answer import answer
from tune.search.finalists import (
    contenders,
    finals,
    most_ahead,
    pressure,
    repeats_to_run,
    rivals,
)
from tune.trials.record import BY_HAND, Interval, crossing_s, trial_id


def config(metric="time_to_target", **changes):
    return report_records.config(metric, **{"finalists": 2, **changes})


def repeat(record, seed, time_s, **changes):
    name = trial_id(record.config, "repeat", seed)
    return replace(
        record,
        id=name,
        purpose="repeat",
        seed=seed,
        time_to_target_s=time_s,
        metrics={},
        **changes,
    )


def repeated(times):
    """The sweep of report_records, and repeats of its n-th fastest finalists."""
    records = done()
    near = contenders(config(), records)
    return records + [
        repeat(near[place], seed, time_s)
        for place, own in times.items()
        for seed, time_s in enumerate(own, 1)
    ]


def test_the_fastest_that_one_run_each_cannot_tell_apart():
    assert [
        record.time_to_target_s for record in contenders(config(), done())
    ] == [
        3.12,
        4.02,
    ]
    near = rivals(config(), done())
    assert [record.time_to_target_s for record in near] == [
        3.12,
        4.02,
        4.31,
        4.4,
        4.48,
        4.61,
        5.23,
    ]
    assert (
        len(contenders(config(finalists="auto"), alone(1.0))) == 7
    )  # 15 s have room for two repeats of each


@pytest.mark.parametrize(
    "changes", [{"finalists": 0}, {"finalists": 1}, {"metric": "val_loss"}]
)
def test_none_is_repeated_where_nothing_is_to_be_told_apart(changes):
    assert contenders(config(**changes), done()) == []
    clear = [
        replace(record, time_to_target_s=time_s)
        for record, time_s in zip(done(), (3.12, 5.6), strict=False)
    ]
    assert contenders(config(), clear) == []
    assert (
        contenders(
            config(),
            [replace(record, time_to_target_s=None) for record in done()],
        )
        == []
    )


def alone(cost_s):
    """The sweep of report_records, whose trials held their lanes for so long each."""
    return [
        replace(record, end_time=record.start_time + cost_s)
        for record in done()
    ]


def test_repeats_take_no_longer_than_half_of_the_search():
    """Eight trials of 100 s on two lanes took 400 s: there is no time for two
    repeats of two finalists.
    """
    assert contenders(config(finalists="auto"), alone(100.0)) == []
    assert len(contenders(config(finalists=3), alone(100.0))) == 3  # asked for
    records = alone(100.0)
    near = contenders(config(), records)
    for seed in (1, 2):  # in any case
        assert repeats_to_run(config(), TRAIN, records)[0][1] == seed
        records += [repeat(finalist, seed, 4.0) for finalist in near]
    assert repeats_to_run(config(), TRAIN, records) == []


def test_a_trial_without_a_lane_adds_no_lane():
    """Eight trials of 20 s on one lane took 160 s: half of this is enough for two
    repeats of two finalists.
    """
    asked = config(finalists="auto")
    records = [replace(record, lane=0) for record in alone(20.0)]
    assert len(contenders(asked, records)) == 2
    beaten = replace(records[0], lane=None, time_to_target_s=None)
    assert len(contenders(asked, [*records, beaten])) == 2


def test_repeats_go_on_until_it_is_clear_who_is_first():
    asked = config(finalists=2)
    records = alone(1.0)
    near = contenders(asked, records)
    seeds = []
    while wanted := repeats_to_run(asked, TRAIN, records):
        finalist, seed = wanted[0]
        seeds.append(seed)
        records.append(
            repeat(
                finalist,
                seed,
                (4.0 if finalist is near[0] else 7.0) + 0.01 * seed,
            )
        )
    assert seeds == [
        1,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
    ]  # two repeats each would do, were it the only look
    assert (
        "1.75 times (1.2 to 2.5) faster than the next"
        in answer(asked, records).line
    )
    assert repeats_to_run(asked, {"train_func": "script:train"}, done()) == []


def test_repeats_are_in_turn_and_none_twice():
    first, second = contenders(config(), done())
    wanted = repeats_to_run(config(), {**TRAIN, "seed": 5}, done())
    assert [(record.id, seed) for record, seed in wanted] == [
        (first.id, 6),
        (second.id, 6),
        (first.id, 7),
        (second.id, 7),
    ]
    known = [*done(), repeat(first, 6, 3.0), repeat(second, 7, None)]
    left = [(second.id, 6), (first.id, 7)]
    assert [
        (record.id, seed)
        for record, seed in repeats_to_run(
            config(), {**TRAIN, "seed": 5}, known
        )
    ] == left


@pytest.mark.parametrize(
    ("before", "equal"), [(0.99, False), (0.3, True), (0.0, True)]
)
def test_repeats_whose_targets_were_met_in_overlapping_intervals_are_equal(
    before, equal
):
    """4 and 12 s are told apart, but not where the second may have met its
    target at 4 s already.
    """
    records = []
    for record in repeated({0: [4.0, 4.1], 1: [12.0, 12.1]}):
        time_s = record.time_to_target_s
        if record.purpose == "repeat" and time_s:
            missed = {
                "step": 1.0,
                "train_time_s": before * time_s,
                "val_accuracy": 0.9,
            }
            record = replace(
                record,
                curve=[
                    missed,
                    {
                        "step": 2.0,
                        "train_time_s": time_s,
                        "val_accuracy": 0.98,
                    },
                ],
            )
        records.append(record)
    found = finals(config(), records)
    assert [final.equal for final in found] == [True, equal]
    assert found[0].time_s.low <= before * 4.05


@pytest.mark.parametrize(
    ("other", "equal"), [(4.05, True), (4.3, True), (12.0, False)]
)
def test_what_cannot_be_told_apart_is_called_equal(other, equal):
    records = repeated({0: [4.0, 4.1], 1: [other, other]})
    assert [final.equal for final in finals(config(), records)] == [
        True,
        equal,
    ]
    assert bool(answer(config(), records).equal) == equal


def test_fewer_than_two_repeats_say_nothing():
    assert finals(config(), repeated({0: [4.0, 4.1], 1: [4.0]})) == []
    assert (
        answer(config(), repeated({0: [4.0, 4.1], 1: [4.0]})).text
        == answer(config(), done()).text
    )


def test_a_repeat_that_never_met_its_target_took_at_least_its_whole_training():
    first, second = finals(config(), repeated({0: [4.0, None], 1: [4.1, 4.0]}))
    assert (first.num_missed, second.num_missed) == (0, 1)
    whole_s = done()[3].curve[-1]["train_time_s"]
    assert second.time_s.value == pytest.approx(math.sqrt(4.0 * whole_s))
    assert second.time_s.high == math.inf


def test_the_target_met_in_more_repeats_comes_first():
    records = repeated({0: [None, None], 1: [40.0, None]})
    line = answer(config(), records).line
    assert line.startswith("Batch 32 in bf16: at least ")
    assert "with the target met in more repeats than" in line


def test_a_repeat_that_was_stopped_by_hand_has_no_time():
    records = repeated({0: [4.0], 1: [8.0, 8.1]})
    slow = contenders(config(), records)[1]
    curve = [{"train_time_s": 0.6, "val_accuracy": 0.5}]
    changes = {"curve": curve, "status": "stopped", "message": BY_HAND}
    fast = contenders(config(), records)[0]
    records.append(repeat(fast, 2, 4.1))
    records.append(repeat(slow, 3, None, **changes))
    last = finals(config(), records)[1]
    assert last.record.id == slow.id
    assert (last.repeats, last.num_missed) == (2, 0)
    assert last.time_s.value == pytest.approx(math.sqrt(8.0 * 8.1))


def test_the_target_is_met_on_the_way_between_two_evaluations():
    rows = [
        {"train_time_s": at, "val_accuracy": accuracy}
        for at, accuracy in ((1.0, 0.9), (2.0, 0.95), (3.0, 0.99))
    ]
    record = replace(done()[0], curve=rows, time_to_target_s=3.0)
    objective = config().objective
    assert crossing_s(objective, record) == Interval(
        2.0 + (0.97 - 0.95) / (0.99 - 0.95), 2.0, 3.0
    )
    rows[1]["val_accuracy"] = math.nan
    assert crossing_s(objective, record) == Interval(3.0, 2.0, 3.0)
    first = replace(record, curve=rows[2:])
    assert crossing_s(objective, first) == Interval(3.0, 0.0, 3.0)
    assert (
        crossing_s(objective, replace(record, time_to_target_s=None)) is None
    )


def test_what_another_trial_may_gain_is_said():
    sure = [
        replace(record, time_to_target_s=1.0 + 20 * at)
        for at, record in enumerate(done()[:3])
    ]
    assert most_ahead(sure, []) == 1.0
    assert not answer(config(), sure).doubts
    assert most_ahead(done(), []) == pytest.approx(
        3.12 / 4.02 * 1.96, rel=0.02
    )
    assert most_ahead([], []) is None


@pytest.mark.parametrize(("trained_s", "most"), [(251.0, 1.0), (150.0, 1.66)])
def test_a_trial_that_was_stopped_had_not_met_the_target_until_then(
    trained_s, most
):
    fast = replace(done()[0], time_to_target_s=100.0, curve=[])
    curve = [{"train_time_s": trained_s, "val_accuracy": 0.5}]
    stopped = [
        replace(
            fast,
            id=str(at),
            status="stopped",
            time_to_target_s=None,
            curve=curve,
        )
        for at in range(80)
    ]
    assert most_ahead([fast, *stopped], []) == pytest.approx(most, abs=0.02)


def test_the_answer_is_the_one_that_is_fastest_alone():
    found = answer(config(), repeated({0: [12.0, 12.1], 1: [4.0, 4.1]}))
    assert found.best.config == {"global_batch_size": 32, "precision": "bf16"}
    assert found.ranking[0] is found.best
    assert not any(record.purpose == "repeat" for record in found.ranking)
    assert found.line.startswith(
        "Batch 32 in bf16: 4.05 s to val_accuracy 0.97 ("
    )
    assert "2 repeats), 2.98 times (" in found.line
    assert found.value == pytest.approx(math.sqrt(4.0 * 4.1))
    [doubt] = found.doubts
    assert doubt.settled_by == "`finalists: 7`"


def test_finalists_that_fail_in_each_repeat_are_not_the_best():
    records = done()
    first, second, *_ = contenders(config(), records)
    failed = [
        replace(repeat(first, seed, None), status="diverged")
        for seed in (1, 2)
    ]
    records += [*failed, repeat(second, 1, 4.0), repeat(second, 2, 4.1)]
    assert [final.record.id for final in finals(config(), records)] == [
        second.id
    ]
    found = answer(config(), records)
    assert found.ranking[0].id == second.id
    [doubt] = [one for one in found.doubts if "in each repeat" in one.text]
    assert doubt.text.startswith("Batch 64 in bf16")
    assert not any(
        "Batch 64 in bf16 ran once" in one.text for one in found.doubts
    )


def test_a_busy_machine_is_said():
    busy = [replace(record, cpu_pressure=0.4) for record in done()]
    assert pressure(done()) is None
    assert pressure(busy) == pytest.approx(0.4)
    assert "waited for a processor (trials 40%" in answer(config(), busy).text
    assert "`lanes: 1`" not in answer(config(lanes=1), busy).text
    failed = [replace(record, status="error") for record in busy]
    assert pressure(failed) is None
    assert not answer(config(), failed).doubts


def test_what_stood_still_is_measured_again_and_judged_without_it():
    """The fastest of all, but for 20 s in which it was stopped."""
    stopped = replace(
        done()[3], time_to_target_s=22.0, curve=[], disturbed_s=20.0
    )
    rest = [record for record in done() if record.id != stopped.id]
    assert stopped.id not in [
        one.id
        for one in contenders(
            config(), [*rest, replace(stopped, disturbed_s=None)]
        )
    ]
    assert stopped.id in [
        one.id for one in contenders(config(), [*rest, stopped])
    ]
    assert "1 trial stood still" in answer(config(), [*rest, stopped]).text
    records = repeated({0: [4.0, 4.1], 1: [5.0, 5.1]})
    last = replace(
        records[-1], time_to_target_s=25.1, curve=[], disturbed_s=20.0
    )
    [_, second] = finals(config(), [*records[:-1], last])
    assert second.time_s.value == pytest.approx(math.sqrt(5.0 * 5.1))
