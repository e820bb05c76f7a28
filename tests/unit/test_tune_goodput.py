"""Predicted time and dollars to target: right where the truth is known, honest about what it does not know."""

from __future__ import annotations

import math
import random

import pytest

from tune.trials.interval import (
    Candidate,
    Interval,
    Prediction,
    Reference,
    dollars,
    efficiency,
    predict,
    rule_allows,
    samples_to_target,
)

NOISE = Interval(500.0, 400.0, 600.0)
LEAST = 100_000.0
"""Samples that the smallest batches need."""


def exact(value: float) -> Interval:
    return Interval(value, value, value)


def needed(size: int, noise: float = 500.0) -> float:
    """Samples to the target in truth."""
    return LEAST * (1 + size / noise)


def speed(size: int) -> float:
    """A GPU that saturates: 20,000 samples/s at most, half of it at 200 samples."""
    return 20_000 * size / (size + 200)


def candidate(size: int, setting: str = "bf16", rate: float | None = None, width: float = 0.01) -> Candidate:
    value = rate or speed(size)
    return Candidate(f"{size}, {setting}", setting, size, Interval(value, value * (1 - width), value * (1 + width)))


def reference(size: int = 64, setting: str = "bf16", factor: float = 1.0) -> Reference:
    return Reference(setting, size, exact(factor * needed(size)))


SIZES = (32, 64, 128, 256, 316, 400, 512, 1024, 4096)


def by_size(predictions: list[Prediction]) -> dict[int, Prediction]:
    return {prediction.candidate.global_batch_size: prediction for prediction in predictions}


def test_efficiency_is_that_of_the_paper() -> None:
    assert efficiency(64, 64, 500) == 1
    assert efficiency(500, 1, 500) == pytest.approx(0.5, rel=5e-3)  # at the noise scale a sample is worth half
    assert efficiency(1000, 100, 500) == 600 / 1500
    assert efficiency(100, 1000, 500) > 1
    assert efficiency(10_000, 1, math.inf) == 1
    assert efficiency(200, 100, 1e-9) == pytest.approx(0.5)  # without noise a larger batch gives nothing


def test_dollars_are_for_the_part_of_the_cluster_that_ran_it() -> None:
    assert dollars(3600, 12.0) == 12.0
    assert dollars(1800, 12.0, lanes=4) == 1.5


def test_predictions_come_near_the_truth_at_every_size() -> None:
    predictions, reasons = predict([candidate(size) for size in SIZES], [reference()], {"bf16": NOISE}, 3.6)
    assert reasons == {}
    for size, found in by_size(predictions).items():
        truth = needed(size) / speed(size)
        assert found.time_s.value == pytest.approx(truth, rel=0.02)
        assert found.time_s.low < truth < found.time_s.high
        assert found.efficiency.value == pytest.approx(needed(64) / needed(size), rel=0.02)
        assert found.goodput.value == pytest.approx(speed(size) * needed(64) / needed(size), rel=0.02)
        assert found.usd is not None
        assert found.usd.value == pytest.approx(truth * 3.6 / 3600, rel=0.02)


def test_the_fastest_is_neither_the_largest_nor_the_one_with_most_samples_a_second() -> None:
    """Truth: time is proportional to (1 + B / 500) (B + 200) / B, least at sqrt(500 x 200) = 316."""
    predictions, _ = predict([candidate(size) for size in SIZES], [reference()], {"bf16": NOISE})
    best = [found.candidate.global_batch_size for found in predictions if found.place == 1]
    assert 316 in best
    assert 4096 not in best
    assert 32 not in best
    assert max(SIZES, key=speed) == 4096


def test_what_cannot_be_told_apart_shares_a_place() -> None:
    predictions, _ = predict([candidate(size) for size in SIZES], [reference()], {"bf16": NOISE})
    places = {size: found.place for size, found in by_size(predictions).items()}
    assert places[316] == places[256] == places[400] == 1  # their true times are within 2 %
    assert places[64] > 1
    assert places[32] > places[64]
    assert [found.place for found in predictions] == sorted(found.place for found in predictions)
    vague = [candidate(size, width=0.9) for size in (64, 316)]
    assert {found.place for found in predict(vague, [reference()], {"bf16": NOISE})[0]} == {1}


def test_an_error_that_all_candidates_share_does_not_blur_their_order() -> None:
    """The reference is known within a factor of three; the order of batch sizes hardly depends on it."""
    loose = Reference("bf16", 64, Interval(120_000.0, 60_000.0, 180_000.0))
    predictions, _ = predict([candidate(32), candidate(316)], [loose], {"bf16": NOISE})
    first, second = predictions
    assert first.time_s.high > second.time_s.low  # their own intervals overlap
    assert (first.place, second.place) == (1, 2)


def test_a_lead_within_what_repeats_differ_by_is_none() -> None:
    rivals = [candidate(64, rate=1000, width=0.0001), candidate(65, rate=1030, width=0.0001)]
    predictions, _ = predict(rivals, [reference()], {"bf16": NOISE})
    assert [found.place for found in predictions] == [1, 1]


def test_a_precision_without_a_trained_trial_of_its_own_is_not_ranked() -> None:
    mixed = [candidate(64, "fp32"), candidate(64, "bf16"), candidate(64, "fp16", rate=1e9)]
    predictions, reasons = predict(mixed, [reference(), reference(setting="fp32")], {"bf16": NOISE, "fp32": NOISE})
    assert {found.candidate.setting for found in predictions} == {"fp32", "bf16"}
    assert list(reasons) == ["64, fp16"]
    assert "no trial of fp16 was trained" in reasons["64, fp16"]


def test_each_precision_is_predicted_from_its_own_trials() -> None:
    """bf16 is faster a step and needs twice the samples here: nothing of fp32's may be taken for it."""
    mixed = [candidate(256, "fp32", rate=5000), candidate(256, "bf16", rate=8000)]
    trained = [reference(64, "fp32"), reference(64, "bf16", factor=2.0)]
    noise = {"fp32": NOISE, "bf16": Interval(50.0, 45.0, 55.0)}
    predictions, _ = predict(mixed, trained, noise)
    assert [found.candidate.setting for found in predictions] == ["fp32", "bf16"]
    bf16 = predictions[1]
    assert bf16.time_s.value == pytest.approx(2 * needed(64) * (1 + 256 / 50) / (1 + 64 / 50) / 8000, rel=0.03)


def test_without_a_noise_scale_only_the_trained_batch_size_has_a_time() -> None:
    predictions, reasons = predict([candidate(64), candidate(128)], [reference()], {})
    assert [found.candidate.global_batch_size for found in predictions] == [64]
    assert predictions[0].time_s.value == pytest.approx(needed(64) / speed(64), rel=0.02)
    assert "noise scale of bf16 is not known" in reasons["128, bf16"]
    unknown = predict([candidate(128)], [reference()], {"bf16": Interval(500.0, 0.0, math.inf)})
    assert unknown[0] == []


def test_an_open_ended_noise_scale_gives_wide_intervals_and_no_error() -> None:
    wide, _ = predict([candidate(1024)], [reference()], {"bf16": Interval(2000.0, 900.0, math.inf)})
    narrow, _ = predict([candidate(1024)], [reference()], {"bf16": Interval(2000.0, 1900.0, 2100.0)})
    lost, _ = predict([candidate(1024)], [reference()], {"bf16": Interval(math.inf, 900.0, math.inf)})
    assert wide[0].time_s.high / wide[0].time_s.low > 1.2 * narrow[0].time_s.high / narrow[0].time_s.low
    assert all(math.isfinite(found[0].time_s.high) for found in (wide, narrow, lost))


def test_references_that_disagree_widen_the_interval() -> None:
    def width(*factors: float) -> float:
        trained = [reference(64, factor=factor) for factor in factors]
        (found,), _ = predict([candidate(64)], trained, {})
        return math.log(found.time_s.high / found.time_s.low)

    assert width(0.7, 1.4) > 2 * width(1.0)
    assert width(1.0, 1.0, 1.0) < width(1.0)
    assert width(1.0) > 0.15  # a single run is no law: repeats differ


def test_references_of_other_batch_sizes_are_brought_together() -> None:
    trained = [reference(32), reference(512)]
    (found,), _ = predict([candidate(128)], trained, {"bf16": NOISE})
    assert found.time_s.value == pytest.approx(needed(128) / speed(128), rel=0.03)


def test_the_interval_holds_the_truth_in_95_of_100_sweeps() -> None:
    rng = random.Random(7)
    held = 0
    for seed in range(200):
        noise = max(50.0, rng.gauss(500, 50))
        rate = speed(1024) * rng.gauss(1, 0.02)
        trained = Reference("bf16", 64, exact(needed(64) * math.exp(rng.gauss(0, 0.05))))
        one = Candidate("1024", "bf16", 1024, Interval(rate, rate * 0.96, rate * 1.04))
        spread = Interval(noise, noise - 98, noise + 98)
        (found,), _ = predict([one], [trained], {"bf16": spread}, seed=seed)
        held += found.time_s.low < needed(1024) / speed(1024) < found.time_s.high
    assert held >= 185


def test_predictions_repeat() -> None:
    once = predict([candidate(size) for size in SIZES], [reference()], {"bf16": NOISE}, seed=3)
    again = predict([candidate(size) for size in reversed(SIZES)], [reference()], {"bf16": NOISE}, seed=3)
    assert once == again
    assert predict([], [], {}) == ([], {})


def test_the_target_was_met_between_two_evaluations() -> None:
    curve = [{"step": 100.0}, {"step": 200.0}, {"step": 300.0}]
    assert samples_to_target(curve, 2, 64) == Interval(16_000.0, 12_800.0, 19_200.0)
    assert samples_to_target(curve, 0, 64).low == 0.0


def test_a_learning_rate_that_ignores_the_batch_size_forbids_it() -> None:
    assert rule_allows("sqrt") is None
    assert rule_allows("linear") is None
    assert "learning rate" in (rule_allows("none") or "")


def test_an_interval_holds_its_value() -> None:
    with pytest.raises(ValueError, match="must be between"):
        Interval(3.0, 4.0, 5.0)
