"""Sweeps side by side: what is claimed of them, by hand in both directions, and what is not."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.browser import chromium, look_at
from tests.unit.report_records import SCRIPT, TRAIN, config, done, trial
from trainers.config.yaml import dump_yaml
from trainers.errors import ConfigError
from trainers.storage import Storage
from tune.__main__ import main
from tune.report.answer import answer
from tune.sweeps.spec import SweepSpec
from tune.trials.journal import Journal, trial_id
from tune.trials.record import TrialRecord
from tune.views.compare import Comparison, Side, compare, comparison
from tune.views.ratios import Ratio, rates_ratio, times_ratio

SETTINGS = {"global_batch_size": 64, "precision": "bf16"}


def run(time_s: float | None = None, rate: float | None = None, **changes: Any) -> TrialRecord:
    curve = [{"step": 1.0, "train_time_s": time_s, "val_accuracy": 0.98}] if time_s else []
    if time_s and "before" in changes:
        curve.insert(0, {"step": 0.0, "train_time_s": changes.pop("before"), "val_accuracy": 0.9})
    return trial(0, "done", SETTINGS, time_to_target_s=time_s, samples_per_s=rate, curve=curve, **changes)


def repeats(*times: float, rates: Sequence[float] = (), before: float = 0.999) -> list[TrialRecord]:
    return [
        replace(run(time_s, rate, before=before * time_s), purpose="repeat", seed=seed)
        for seed, (time_s, rate) in enumerate(itertools.zip_longest(times, rates), 1)
    ]


def side(name: str, records: list[TrialRecord], environment: dict[str, str] | None = None, **changes: Any) -> Side:
    train = {**TRAIN, **changes.pop("train", {})}
    spec = SweepSpec(config(**changes), train, (), "sweep.yaml", f"/results/{name}")
    return Side(name, spec, records, environment or {}, answer(spec.config, records))


def compared(*sides: Side) -> Comparison:
    return comparison(list(sides))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (repeats(4.0, 4.1), repeats(1.0, 1.02), r"faster by 4.01x \[2.\d+, \d.\d+\]"),
        (repeats(1.0, 1.02), repeats(4.0, 4.1), r"slower by 4.01x \[2.\d+, \d.\d+\]"),
        (repeats(4.0, 4.1), repeats(3.5, 3.6), r"equal within noise \(1.14x \[0.\d+, 1.\d+\]\)"),
        (repeats(4.0, 4.1), repeats(4.0, 4.1), r"equal within noise \(1x \[0.\d+, 1.\d+\]\)"),
        ([run(4.0, before=3.9)], [run(1.0, before=0.95)], r"faster by 4x \[2.2\d, 7.3\d\]"),
        ([run(1.0, before=0.95)], [run(4.0, before=3.9)], r"slower by 4x \[2.2\d, 7.3\d\]"),
        ([run(4.0, before=3.9)], [run(3.0, before=2.9)], r"equal within noise \(1.33x .*\)"),
        # Evaluations are too far apart: the first may have met its target at any time.
        ([run(4.0)], [run(1.0, before=0.9)], r"equal within noise \(4x \[0, 7.\d+\]\)"),
        (repeats(4.0, 4.1, before=0.2), repeats(1.0, 1.02), r"equal within noise .*"),
        # What ran beside the first may have taken all of the difference.
        ([run(4.0, before=3.9, cpu_pressure=0.8)], [run(1.0, before=0.95)], r"equal within noise .*"),
    ],
)
def test_times_to_the_target(first: list[TrialRecord], second: list[TrialRecord], words: str) -> None:
    found = times_ratio(first, second)
    assert found is not None
    assert re.fullmatch(words, found.words()), found.words()


def measured(rate: float, half: float, **changes: Any) -> TrialRecord:
    return run(None, rate, step_time_s=64 / rate, step_time_ci95_s=half * 64 / rate, **changes)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([measured(1000, 0.01)], [measured(1300, 0.01)], r"faster by 1.3x \[1.21, 1.39\]"),
        ([measured(1300, 0.01)], [measured(1000, 0.01)], r"slower by 1.3x \[1.21, 1.39\]"),
        ([measured(1000, 0.01)], [measured(1040, 0.01)], r"equal within noise .*"),
        ([measured(1000, 0.3)], [measured(1300, 0.3)], r"equal within noise .*"),
        ([measured(1000, 0.01, cpu_pressure=0.3)], [measured(1300, 0.01)], r"equal within noise .*"),
        ([run(None, 1000.0)], [run(None, 3000.0)], r"no claim \(3x, .*"),
        (repeats(1, 1, 1, rates=[1000, 1010, 990]), repeats(1, 1, 1, rates=[1300, 1290, 1310]), r"faster by 1.3x .*"),
        (repeats(1, 1, 1, rates=[1300, 1290, 1310]), repeats(1, 1, 1, rates=[1000, 1010, 990]), r"slower by 1.3x .*"),
        (
            repeats(1, 1, 1, rates=[1000, 1500, 700]),
            repeats(1, 1, 1, rates=[1300, 900, 1700]),
            r"equal within noise .*",
        ),
    ],
)
def test_throughput(first: list[TrialRecord], second: list[TrialRecord], words: str) -> None:
    found = rates_ratio(first, second)
    assert found is not None
    assert re.fullmatch(words, found.words()), found.words()


def test_a_difference_that_is_sure_may_be_a_trifle() -> None:
    assert not Ratio(1.03, (1.02, 1.04)).is_claim
    assert Ratio(1.06, (1.02, 1.1)).is_claim
    assert not Ratio(1.06, (0.99, 1.1)).is_claim
    assert not Ratio(1 / 1.03, (0.96, 0.98)).is_claim
    assert Ratio(1 / 1.06, (0.9, 0.98)).is_claim
    assert times_ratio([run(None)], [run(1.0)]) is rates_ratio([run(1.0)], [run(1.0)]) is None


def faster(records: list[TrialRecord], factor: float) -> list[TrialRecord]:
    """The same trials on another machine: with an evaluation shortly before each target."""
    found = []
    for record in records:
        time_s = record.time_to_target_s
        met = [part * time_s / factor for part in (0.99, 1.0)] if time_s else []
        rows = [{"step": 1.0, "train_time_s": row_s, "val_accuracy": 0.97} for row_s in met]
        rate, new = record.samples_per_s or 0.0, met[-1] if met else None
        found.append(replace(record, samples_per_s=rate * factor, time_to_target_s=new, curve=rows,
                             step_time_s=64 / rate / factor, step_time_ci95_s=0.01 * 64 / rate / factor))  # fmt: skip
    return found


def test_the_same_best_on_other_hardware() -> None:
    versions = {"torch": "2.11", "gpu": "A10G"}
    sides = [side("A", faster(done(), 1), versions), side("B", faster(done(), 3), {**versions, "gpu": "H100"})]
    found = compared(*sides)
    assert found.changes == ["From A to B the best stays 64, bf16; B is faster by 3x [1.71, 5.28]."]
    assert ("gpu", ["A10G", "H100"]) in found.differences
    assert "torch" not in dict(found.differences)
    assert dict(found.answers)["best trial"] == ["64, bf16", "64, bf16"]
    assert dict(found.answers)["time to target val_accuracy 0.97"] == ["3.09 to 3.12 s", "1.03 to 1.04 s"]
    [shared] = [one for one in found.shared if one.words == "64, bf16"]
    assert shared.figures == [("3.09 to 3.12 s", "8,240"), ("1.03 to 1.04 s", "24,720")]
    assert shared.against == [("faster by 3x [1.71, 5.28]", "faster by 3x [2.8, 3.21]")]
    assert len(found.shared) == 8
    assert compared(*sides[::-1]).changes == ["From B to A the best stays 64, bf16; A is slower by 3x [1.71, 5.28]."]


def test_another_best_is_another_only_where_each_sweep_shows_it() -> None:
    def times(small_s: float, large_s: float) -> list[TrialRecord]:
        chosen = {32: small_s, 64: large_s}
        return faster(
            [replace(one, time_to_target_s=chosen[size]) for one in done()
             if one.config["precision"] == "bf16" and (size := one.config["global_batch_size"]) in chosen], 1
        )  # fmt: skip

    sure = compared(side("A", times(1.0, 5.0)), side("B", times(5.0, 1.0))).changes[0]
    assert sure.startswith("From A to B the best is another: 64, where it was 32; in A its own best is better by 5x")
    assert sure.endswith("].")
    luck = compared(side("A", times(1.0, 1.1)), side("B", times(1.1, 1.0))).changes[0]
    assert "A does not tell the two apart (equal within noise" in luck
    assert luck.endswith(", so this may be noise.")
    half = compared(side("A", times(1.0, 5.0)), side("B", times(1.1, 1.0))).changes[0]
    assert "B does not tell the two apart" in half
    assert half.endswith(", so this may be noise.")
    other = compared(side("A", times(1.0, 5.0)[:1]), side("B", times(5.0, 1.0))).changes[0]
    assert "A has not tried 64" in other


def test_repeats_count_in_place_of_the_run_that_was_chosen() -> None:
    ended = faster(done(), 1)
    best = next(one for one in ended if one.config == SETTINGS)
    again = [
        replace(best, id=trial_id(best.config, "repeat", seed), purpose="repeat", seed=seed, time_to_target_s=time_s)
        for seed, time_s in ((1, 9.0), (2, 9.2))
    ]
    found = compared(side("A", ended), side("B", [*ended, *again]))
    [shared] = [one for one in found.shared if one.words == "64, bf16"]
    assert shared.figures[1][0] == "9 s to 9.2 s (2 repeats)"
    assert shared.against[0][0].startswith("slower by 2.9")


def test_what_cannot_be_compared_is_said() -> None:
    base = side("A", faster(done(), 1))
    [words] = compared(base, side("B", faster(done(), 3), train={"task": "other:Task"})).changes
    assert words == "A and B cannot be compared, in nothing: A trains task:Digits, B other:Task."
    found = compared(base, side("B", faster(done(), 3), objective={"target": {"val_accuracy": 0.98}}))
    why = "the target of A is val_accuracy 0.97, that of B val_accuracy 0.98."
    assert found.changes == [f"The answers of A and B cannot be compared, only samples/s: {why}"]
    assert all(one.against[0][0] == "-" and one.against[0][1].startswith("faster by 3x") for one in found.shared)
    [words] = compared(base, side("B", done(), metric="val_loss")).changes
    assert words.endswith("the objective of A is time_to_target, that of B val_loss.")
    nothing = compared(base, side("B", [])).changes
    assert nothing == ["From A to B: B has no best trial to compare."]
    one = [side(name, done(), metric="val_loss") for name in "AB"]
    assert compared(*one).changes == ["From A to B the best stays 64, bf16; B is no claim: one run each."]


def test_a_key_that_one_sweeps_and_the_other_sets_is_the_same_configuration() -> None:
    wide, records = side("A", faster(done(), 1)), []
    for record in faster(done(), 3):
        if record.config["precision"] == "bf16":
            settings = {"global_batch_size": record.config["global_batch_size"]}
            records.append(replace(record, id=trial_id(settings), config=settings))
    narrow = side("B", records, space={"global_batch_size": [32, 64, 128, 256]}, train={"precision": "bf16"})
    found = compared(wide, narrow)
    assert [one.words for one in found.shared] == ["32, bf16", "64, bf16", "128, bf16", "256, bf16"]
    assert dict(found.differences)["precision"] == ["swept: fp32, bf16, fp16", "bf16"]
    assert found.rest == "Not compared, as no other sweep has them: 4 of A."


def test_three_sweeps_are_compared_with_the_first() -> None:
    found = compared(*(side(name, faster(done(), factor)) for name, factor in (("A", 2), ("B", 1), ("C", 2))))
    assert [change[:30] for change in found.changes] == [
        "From A to B the best stays 64,",
        "From A to C the best stays 64,",
    ]
    assert [words.partition(" ")[0] for _, words in found.shared[0].against] == ["slower", "equal"]


def kept(directory: Path, records: list[TrialRecord]) -> str:
    storage = Storage(str(directory))
    storage.write(
        "sweep.yaml", dump_yaml(config(name=directory.name).model_dump(mode="json", exclude_none=True)).encode()
    )
    for record in records:
        Journal(storage).append(record)
    return storage.uri


def test_the_command_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = trial(9, "done", {"global_batch_size": 64, "precision": SCRIPT}, samples_per_s=1.0)
    places = [kept(tmp_path / name, [*faster(done(), factor), hostile]) for name, factor in (("old", 1), ("new", 3))]
    before = sorted(file for file in tmp_path.rglob("*"))
    page = tmp_path / "compare.html"
    assert main(["compare", *places, "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert "faster by 3x" in " ".join(said.split())
    assert "what differs" not in said
    assert sorted(file for file in tmp_path.rglob("*") if file != page) == before
    text = page.read_text()
    assert SCRIPT not in text
    assert re.findall(r"""(?:src|href)\s*=\s*(?!["']?data:,).*""", text) == []
    if chromium() is not None:
        width, table = "document.documentElement.scrollWidth", "document.querySelectorAll('tbody')[1].rows.length"
        looks = {"wide": ((1280, 900), False, "light"), "narrow": ((800, 900), False, "dark")}
        shown = look_at(page, width, table, looks=looks)
        assert shown.asked == shown.said == []
        assert (shown.found[f"wide: {width}"], shown.found[f"narrow: {width}"]) == (1280, 800)
        assert shown.found[f"wide: {table}"] == 18


def test_what_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = kept(tmp_path / "one", done())
    with pytest.raises(ConfigError, match="names one sweep"):
        compare([place])
    assert main(["compare", place, str(tmp_path / "none")]) == 2
    assert "holds no sweep" in capsys.readouterr().err
    assert main(["compare", place, place, "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "--html" in capsys.readouterr().err
