"""What a sweep leaves to later ones, what they take from it, and how far they believe it. Without Ray."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_tune_frontier import WORLDS, World
from trainers.storage import Storage
from tune.__main__ import main
from tune.knowledge.code import task_digest
from tune.knowledge.entry import Bound, Entry, told
from tune.knowledge.store import Store, entry_id
from tune.knowledge.taken import Here, Taken, choose, keep, off, past, past_bounds, read
from tune.report.answer import answer
from tune.search.frontier import Belief, Choice, Ended, Seen, decide, past_of
from tune.search.frontier_grid import Frontier
from tune.search.history import Past
from tune.search.time_model import Place
from tune.sweeps.learning import leave, take
from tune.sweeps.spec import prepare, sweep_with
from tune.trials.journal import Journal, trial_id
from tune.trials.microbatch_bounds import PastBound, hinted
from tune.trials.record import TrialRecord

TRAIN = {"task": "examples.digits.task:Digits", "epochs": 10, "optimizer": {"name": "adamw", "lr": 1e-3}}
SIZES = [16, 32, 64, 128, 256]
HERE = Here(TRAIN["task"], "c0de", "a machine", {"torch": "2.15.0"})  # type: ignore[arg-type]


def sweep_of(directory: Path, name: str = "first", **keys: Any) -> Any:
    objective = {"metric": "time_to_target", "target": {"val_accuracy": 0.97}}
    space = {"global_batch_size": SIZES, "precision": ["fp32", "bf16"]}
    tree = {"train": TRAIN, "space": space, "objective": objective, "search": "frontier", "name": name}
    tree |= {"knowledge": True, **keys}
    return sweep_with(tree, "sweep.yaml", Path.cwd(), {"storage_path": str(directory)})


def record_of(trial: dict[str, Any], purpose: Any = "trial") -> TrialRecord:
    """A trial of a world in which 64 with bf16 is best: 100,000 samples in all, evaluated every 1,000."""
    size, rate = trial["global_batch_size"], 1e4 * (1.6 if trial["precision"] == "bf16" else 1.0)
    rate *= trial["global_batch_size"] / (trial["global_batch_size"] + 60)
    needed = 12_000 * (1 + size / 200) if purpose == "trial" else 2_000
    rows = [float(at) for at in range(1000, round(needed) + 1000, 1000)]
    reached = purpose == "trial"
    curve = [
        {"step": at / size, "epoch": at / 10_000, "val_accuracy": 0.97 if reached and at == rows[-1] else 0.9,
         "train_time_s": at / rate} for at in rows
    ]  # fmt: skip
    figures: dict[str, Any] = {"samples_per_s": rate, "step_time_s": size / rate, "step_time_ci95_s": 0.0}
    name = trial_id(trial, purpose)
    figures |= {"curve": curve, "samples": rows[-1], "epochs": rows[-1] / 10_000, "purpose": purpose}
    time_s = rows[-1] / rate if reached else None
    return TrialRecord(name, trial, "done" if reached else "stopped", 1e9, 1e9 + 1, **figures, time_to_target_s=time_s)


def searched(frontier: Frontier) -> list[TrialRecord]:
    records: list[TrialRecord] = []
    while isinstance(step := frontier.next(records), Choice):
        records.append(record_of(frontier.trials[step.place], step.purpose))
    assert isinstance(step, Ended)
    return records


def entry_of(spec: Any, records: list[TrialRecord], **changes: Any) -> Entry:
    target = spec.config.objective.target
    trials = told(spec.config, spec.train, records)
    name = entry_id(spec.uri, 1e9)
    made = Entry(name, spec.uri, 1e9, HERE.task, HERE.code, spec.train, HERE.hardware, HERE.versions, target, trials)
    return replace(made, **changes)


def test_a_second_sweep_needs_a_third_and_says_where_it_began(tmp_path: Path) -> None:
    first = sweep_of(tmp_path)
    prepare(first, False)
    assert take(first, HERE) == []
    before = searched(Frontier(first.config, first.train, first.past()))
    for record in before:
        Journal(first.storage).append(record)
    bound = {"key": "k", "device": "cpu", "label": "fp32 on cpu", "fits": 64, "misfit": None}
    leave(first, HERE, before, [bound, {**bound, "fits": None}])
    second = sweep_of(tmp_path, "second")
    prepare(second, False)
    [taken] = take(second, HERE)
    assert taken.differs == []
    assert past_bounds([taken]) == [PastBound("k", "cpu", 64, None, is_exact=True)]
    frontier = Frontier(second.config, second.train, second.past())
    after = searched(frontier)
    assert sum(one.samples or 0 for one in after) <= sum(one.samples or 0 for one in before) / 3
    assert all(one.purpose == "trial" for one in after)
    of = [min(rows, key=lambda one: one.time_to_target_s or 1e9).config for rows in (before, after)]
    assert of[0] == of[1]
    sentence = answer(second.config, after, second.train, second.past()).ended
    assert f"It began from what {taken.entry.id} found" in sentence
    # What is begun goes on with what it began with, whatever has come into the store, or left it, since.
    Store(Storage(str(tmp_path))).delete(taken.entry.id)
    assert take(second, HERE) == [taken]
    assert take(sweep_of(tmp_path, "third"), HERE) == []


def test_it_is_switched_off_and_what_began_without_goes_on_without(tmp_path: Path) -> None:
    first = sweep_of(tmp_path)
    records = [record_of(trial) for trial in Frontier(first.config, first.train).trials.values()]
    leave(sweep_of(tmp_path, "off", knowledge=False), HERE, records, [])
    assert Store(Storage(str(tmp_path))).entries() == []
    leave(first, HERE, records, [])
    without = sweep_of(tmp_path, "off", knowledge=False)
    assert take(without, HERE) == []
    assert not without.storage.exists("knowledge.json")
    begun = sweep_of(tmp_path, "begun")
    Journal(begun.storage).append(records[0])
    assert take(begun, HERE) == []
    assert len(take(sweep_of(tmp_path, "third"), HERE)) == 1


def test_what_differs_is_named_and_believed_less(tmp_path: Path) -> None:
    spec = sweep_of(tmp_path)
    records = [record_of(trial) for trial in Frontier(spec.config, spec.train).trials.values()]
    entry = entry_of(spec, records)
    changed = {
        "versions": replace(HERE, versions={"torch": "2.16.0"}),
        "hardware": replace(HERE, hardware="another"),
        "the task's code": replace(HERE, code="other"),
    }
    for name, here in changed.items():
        [taken] = choose([entry], here, spec.config, spec.train)
        assert taken.differs == [name]
        assert sum(off([name])) > sum(off([]))
    stricter, easier = (
        sweep_of(tmp_path, objective={"metric": "time_to_target", "target": {"val_accuracy": value}}).config
        for value in (0.99, 0.9)
    )
    assert choose([entry], HERE, stricter, spec.train)[0].differs == ["the target"]
    assert choose([entry], HERE, easier, spec.train)[0].differs == []
    exact, far = replace(entry, id="exact"), replace(entry, id="far", hardware="another", code="x")
    assert [one.entry.id for one in choose([far, exact], HERE, spec.config, spec.train)] == ["exact", "far"]
    # An easier target was met sooner, and the curves tell when.
    keep(spec.storage, [Taken(entry, [])])
    [hard], [easy] = past(spec.storage, spec.config, spec.train), past(spec.storage, easier, spec.train)
    assert all(one.samples < other.samples for one, other in zip(easy.needed, hard.needed, strict=True))


def test_another_setting_of_the_run_is_another_place(tmp_path: Path) -> None:
    spec = sweep_of(tmp_path)
    records = [record_of({"global_batch_size": 64, "precision": "bf16"})]
    other = sweep_of(tmp_path, train={**TRAIN, "optimizer": {"name": "adamw", "lr": 1e-2}})
    compiled = sweep_of(tmp_path, train={**TRAIN, "compile": "default"})
    kinds = {}
    for name, of in (("same", spec), ("lr", other), ("compile", compiled)):
        keep(spec.storage, [Taken(entry_of(of, records), [])])
        [heard] = past(spec.storage, spec.config, spec.train)
        kinds[name] = heard.needed[0].place
    places = Frontier(spec.config, spec.train).places
    assert kinds["same"] in places
    assert kinds["lr"].kind not in {place.kind for place in places}
    assert kinds["compile"].setting not in {place.setting for place in places}
    assert kinds["compile"].kind == kinds["same"].kind


def test_a_damaged_entry_is_named_and_skipped_and_none_is_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec, store = sweep_of(tmp_path), Store(Storage(str(tmp_path)))
    entry = entry_of(spec, [record_of({"global_batch_size": 64, "precision": "bf16"})])
    store.write(entry)
    store.write(replace(entry, hardware="changed"))
    [file] = (tmp_path / "knowledge").iterdir()
    assert store.related(HERE.task, "")[0].hardware == HERE.hardware
    assert store.related("other:Task", HERE.code) == store.entries()
    assert store.related("other:Task", "other") == []
    (file.parent / f"{'0' * 8}{file.name[8:]}").write_text(json.dumps({"id": 1}))
    (file.parent / "notes.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert store.entries() == [entry]
    assert "what that sweep found does not count" in caplog.text
    file.write_text(file.read_text()[:100])
    assert store.entries() == []
    other = replace(entry, trials=[replace(entry.trials[0], config={"optimizer.lr.of_another_version": 1})])
    keep(spec.storage, [Taken(other, [])])
    assert past(spec.storage, spec.config, spec.train) == []
    spec.storage.write("knowledge.json", b"[{}]")
    assert read(spec.storage) == []


def test_the_command_lists_explains_and_deletes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = sweep_of(tmp_path)
    prepare(first, False)
    records = [record_of(trial) for trial in Frontier(first.config, first.train).trials.values()]
    entry = entry_of(first, records, bounds=[Bound("k", "cpu", "fp32 on cpu", 64, 96)])
    Store(Storage(str(tmp_path))).write(entry)
    keep(first.storage, [Taken(entry, ["hardware"])])
    at = ["knowledge", "--storage_path", str(tmp_path)]
    assert main(at) == 0
    shown = capsys.readouterr().out
    assert "batch sizes 16 to 256" in shown
    assert "target val_accuracy 0.97: 10 trials towards it" in shown
    assert "a microbatch of 64 fits, 96 does not" in shown
    assert main(["knowledge", "--explain", first.uri]) == 0
    shown = capsys.readouterr().out
    assert "differs in hardware" in shown
    assert "began with what 1 sweep found" in shown
    assert main([*at, "--delete", entry.id]) == 0
    assert main([*at, "--delete", entry.id]) == 2
    assert Store(Storage(str(tmp_path))).entries() == []


def test_the_digest_is_of_the_code_that_is_imported(tmp_path: Path) -> None:
    def digest(task: str, layers: str, beside: str = "") -> str:
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "task.py").write_text(task)
        (tmp_path / "mine" / "__init__.py").write_text("from .layers import Layer\n")
        (tmp_path / "mine" / "layers.py").write_text(layers)
        (tmp_path / "beside.py").write_text(beside)
        return task_digest("task:Task", [str(tmp_path)])

    task = "import torch\nfrom mine import Layer\nclass Task: width = 4\n"
    first = digest(task, "class Layer: pass\n")
    assert first == digest(task + "# why\n", "class Layer: pass\n", "other = 1")
    assert first != digest(task.replace("4", "5"), "class Layer: pass\n")
    assert first != digest(task, "class Layer: size = 2\n")
    assert task_digest("missing:Task", [str(tmp_path)]) == ""
    assert task_digest("json:JSONDecoder", []) != ""


def search(world: World, past_: list[Past]) -> tuple[Place | None, list[Seen], Belief]:
    seen: list[Seen] = []
    while isinstance(step := decide(world.places, seen, [], past_), Choice):
        seen.append(world.run(step))
    belief = Belief(world.places, seen, past=past_)
    return (None if belief.best is None else world.places[belief.best]), seen, belief


def spent(seen: list[Seen]) -> float:
    return sum(one.samples for one in seen)


@pytest.mark.parametrize("name", ["the middle wins", "small batches win"])
def test_history_saves_two_thirds_and_another_device_costs_probes_only(name: str) -> None:
    costs: dict[str, list[float]] = {"same": [], "faster": []}
    for seed in range(3):
        first = WORLDS[name](seed).search()[1]
        for kind, differs in (("same", []), ("faster", ["hardware"])):
            world, cold = WORLDS[name](100 + seed), WORLDS[name](100 + seed)
            for one in (world, cold):
                one.top = {setting: rate * (1 if kind == "same" else 3) for setting, rate in one.top.items()}
            pick, seen, _ = search(world, [past_of("first", first, *off(differs))])
            assert pick is not None
            assert world.ratio(pick) < 1.2
            costs[kind].append(spent(seen) / spent(cold.search()[1]))
    assert sum(costs["same"]) / 3 < 0.4
    assert sum(costs["faster"]) / 3 < 0.6


def test_a_history_that_misleads_is_dropped_and_said() -> None:
    world = WORLDS["the middle wins"](0)
    first = world.search()[1]
    told_ = past_of("first", first, *off([]))
    slow = replace(told_, needed=tuple(replace(one, samples=one.samples / 4) for one in told_.needed))
    _, _, belief = search(WORLDS["the middle wins"](1), [slow])
    assert [(one.name, one.of) for one in belief.misled] == [("first", "samples to the target")]
    assert not belief.past[0].needed
    assert belief.past[0].speeds
    wrong = replace(told_, speeds={place: (rate * 2, width) for place, (rate, width) in told_.speeds.items()})
    _, _, belief = search(WORLDS["the middle wins"](1), [wrong])
    assert [one.of for one in belief.misled] == ["throughput"]
    assert str(belief.misled[0]).startswith("The throughput of first did not count: ")


def test_what_ran_out_of_memory_on_the_same_device_is_not_tried_again() -> None:
    world = WORLDS["the middle wins"](0)
    world.limit = 128
    first = world.search()[1]
    assert any(one.status == "out_of_memory" for one in first)
    again = WORLDS["the middle wins"](1)
    again.limit = 128
    _, seen, _ = search(again, [past_of("first", first, *off([]))])
    assert not any(one.status == "out_of_memory" for one in seen)


def test_a_microbatch_is_hinted_in_proportion_to_memory() -> None:
    known = [
        PastBound("k", "A10G, 24.0 GiB", 32, 48, is_exact=False),
        PastBound("other", "x", 512, None, is_exact=True),
    ]
    assert hinted(known, "k", "H100, 80.0 GiB") == round(32 * 80 / 24)
    assert hinted(known, "k", "cpu") == 32
    assert hinted(known, "none", "cpu") is None
