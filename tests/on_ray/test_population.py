"""`scheduler: pbt`: bad trials go on with the weights of good ones and another learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from ray.tune.schedulers import PopulationBasedTraining

from tests.conftest import Cluster
from tests.on_ray.embedded import await_end_of_trials
from tests.on_ray.test_lanes import rows, run, sweep
from tests.on_ray.test_tune_killed import start
from tests.specs import BASE, REPOSITORY
from tests.waits import HANG_S, until
from trainers.config import TrainConfig
from trainers.config.overrides import override
from trainers.launch.local import LocalContext
from trainers.launch.spec import RunSpec
from trainers.storage import Storage
from tune.search.population import population
from tune.sweeps.population_trial import KEPT_STAGES
from tune.sweeps.spec import read_saved
from tune.trials.journal import Journal
from tune.trials.record import TrialRecord

pytestmark = pytest.mark.ray

EPOCHS = 6
STEPS = 96 // 24


class Rows(LocalContext):
    """Keeps the evaluations."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage, "local")
        self.curve: list[dict[str, float]] = []

    def report(self, metrics: dict[str, Any], checkpoint: str | None, elapsed_s: float) -> None:
        if checkpoint is None:
            self.curve.append(metrics)


def replay(tmp_path: Path, train: dict[str, Any], record: TrialRecord) -> list[dict[str, float]]:
    """What the loop gives in this process, from the first step on, by the course that a trial has recorded."""
    source: Storage | None = None
    curve: list[dict[str, float]] = []
    ends = [*(part["epoch"] for part in record.schedule[1:]), None]
    for number, (part, end) in enumerate(zip(record.schedule, ends, strict=True)):
        context = Rows(Storage(str(tmp_path / "replay" / record.id / str(number))))
        context.source, context.until_epoch = source, end
        RunSpec(override(TrainConfig, train, part["config"]), (str(REPOSITORY),), "test", "").execute(context)
        source = context.storage
        curve += context.curve
    return rows(curve)


class Pausing(PopulationBasedTraining):
    """Pauses each trial once, where Ray's would let it go on."""

    paused: ClassVar[set[str]] = set()

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        decision = super().on_trial_result(tune_controller, trial, result)
        if decision == self.CONTINUE and str(trial) not in self.paused:
            self.paused.add(str(trial))
            return str(self.PAUSE)
        return str(decision)


@pytest.mark.full
def test_bad_trials_go_on_from_good_ones(tmp_path: Path, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four trials take turns on one lane, which loses its process once; each is paused once, and resumed on another
    actor. Every curve is, to the bit, what its recorded course gives.
    """
    monkeypatch.setattr("tune.search.ray_search.PopulationBasedTraining", Pausing)
    train = {
        "task_args": {"samples": 96, "fail_at": 10, "failure": "kill", "marker": str(tmp_path / "killed")},
        "max_steps": EPOCHS * STEPS,
        "evaluate": {"every_epochs": 1},
        "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.01},
    }
    lrs = [1e-7, 1e-3, 3e-3, 1e-2]
    spec = sweep(tmp_path, {"optimizer.lr": lrs}, train, scheduler="pbt", pbt={"resample_probability": 0.0})
    records = run(spec)
    first = dict(population(spec.config))

    assert [record.status for record in records] == ["done"] * 4
    assert {record.id for record in records} == set(first)
    for record in records:
        assert record.curve[-1]["step"] == EPOCHS * STEPS
        assert rows(record.curve) == replay(tmp_path, spec.train, record)
        assert record.schedule[-1]["trial"] == record.id
        assert record.schedule[-1]["config"] == record.config
    bad = next(record for record in records if first[record.id] == {"optimizer.lr": 1e-7})
    assert bad.exploited_from in set(first) - {bad.id}, "it was the worst at every look"
    assert bad.config["optimizer.lr"] in lrs
    assert bad.metrics["val_loss"] < 0.9 * bad.curve[0]["val_loss"]
    # The line of the exploit stands: the stage names the donor's, which had ended, and whose curve it goes on with.
    journal = Journal(spec.storage)
    names = [name.removesuffix(".json") for name in journal.population.names(bad.id) if name.endswith(".json")]
    stages = [journal.stage(f"{bad.id}/{name}") for name in names]
    exploits = [stage for stage in stages if stage.source and not stage.source.startswith(bad.id)]
    assert exploits
    for stage in exploits:
        assert stage.source is not None
        donor = journal.stage(stage.source)
        assert donor.ended
        assert stage.curve[: len(donor.curve)] == donor.curve
    assert Pausing.paused == set(first)
    assert (tmp_path / "killed").exists()
    # What is kept does not grow with the sweep.
    assert len(journal.population.names(bad.id)) - len(names) <= KEPT_STAGES + 1


@pytest.mark.full
@pytest.mark.campaign
def test_a_killed_driver_loses_no_trial_of_a_population(tmp_path: Path, cluster: Cluster, driver: Any) -> None:
    """Killed when one trial has ended, in the middle of the others: those go on from their stages."""
    keys = {key: value for key, value in BASE.items() if key not in ("launcher", "checkpoint", "optimizer")}
    task_args = {"samples": 96, "pause_s": 0.05}
    # One trial is short, so that it ends long before the others.
    space = {"optimizer.lr": [1e-7, 1e-3, 1e-2], "max_steps": [2 * STEPS, 8 * STEPS]}
    tree = {
        "name": "sweep",
        "storage_path": str(tmp_path),
        "train": {**keys, "task_args": task_args, "evaluate": {"every_epochs": 1}},
        "space": space,
        "objective": {"metric": "val_loss"},
        "scheduler": "pbt",
        "lanes": 1,
    }
    file, sweep_directory = tmp_path / "sweep.yaml", Storage(str(tmp_path / "sweep"))
    file.write_text(yaml.safe_dump(tree))
    journal = Journal(sweep_directory)
    killed = start([str(file)], cluster)
    until(lambda: len(journal.records()) >= 2, "two records", process=killed, every_s=0.05)
    killed.kill()
    killed.communicate()
    await_end_of_trials()
    before = journal.records()
    stages = {name: journal.newest_stage(name) for name in journal.population.names()}
    assert len(before) < 6

    last = start(["resume", str(tmp_path / "sweep")], cluster)
    out, _ = last.communicate(timeout=HANG_S)
    assert last.returncode == 0, out
    after = {record.id: record for record in journal.records()}
    assert len(after) == 6
    assert all(after[record.id] == record for record in before)
    train = read_saved(str(tmp_path / "sweep")).train
    for record in after.values():
        assert record.status == "done"
        assert rows(record.curve) == replay(tmp_path, train, record)
        stage = stages[record.id]
        if stage is not None and stage.ended:  # no finished stage runs again
            assert journal.stage(stage.name) == stage
