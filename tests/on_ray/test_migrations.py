"""docs/migrate.md on Ray: what its diffs make sweeps, and gives what the
script before it did.
"""

import ast
import runpy
import sys

import pytest

from tests import migrations
from tune.sweeps.spec import prepare, read_sweep

pytestmark = [pytest.mark.ray, pytest.mark.full]


def as_user(directory, section, monkeypatch):
    """Run a section's sweep.py in its directory, as Ray has it by itself; its globals."""
    migrations.after(section, directory)
    monkeypatch.chdir(directory)
    return runpy.run_path(str(directory / "sweep.py"), run_name="__main__")


def reported(globals_, metric):
    """A metric as ResultGrid has it, by learning rate."""
    results = globals_["tuner"].get_results()
    assert all(len(result.metrics_dataframe) == 3 for result in results), (
        "one line an epoch"
    )
    return {result.config["lr"]: result.metrics[metric] for result in results}


def test_ray_train(tmp_path, driver, monkeypatch):
    import ray.train
    from ray.train.torch import TorchTrainer

    found = reported(
        as_user(tmp_path, "Ray Train and Tune", monkeypatch), "loss"
    )
    train = runpy.run_path(
        str(tmp_path / migrations.before("Ray Train and Tune", tmp_path))
    )["train"]
    local = ray.train.ScalingConfig(num_workers=0)  # in this process
    runs = {
        lr: TorchTrainer(
            train, train_loop_config={"lr": lr}, scaling_config=local
        )
        for lr in (0.001, 0.01)
    }
    assert found == {
        lr: (run.fit().metrics or {})["loss"] for lr, run in runs.items()
    }


def test_accelerate(tmp_path, driver, monkeypatch, capsys):
    found = reported(as_user(tmp_path, "Accelerate", monkeypatch), "loss")
    capsys.readouterr()
    runpy.run_path(
        str(tmp_path / migrations.before("Accelerate", tmp_path)),
        run_name="__main__",
    )
    assert (
        found[0.01]
        == ast.literal_eval(capsys.readouterr().out.splitlines()[-1])["loss"]
    )


def test_optuna(tmp_path, driver, monkeypatch):
    from tune.sweeps._run import run_sweep

    optuna = pytest.importorskip("optuna")
    migrations.after("Optuna", tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "task", raising=False)
    spec = read_sweep(
        str(tmp_path / "sweep.yaml"),
        {"storage_path": str(tmp_path), "lanes": 1, "budget.trials": 3},
    )
    prepare(spec, fresh=False)
    records = run_sweep(spec)
    monkeypatch.delitem(sys.modules, "task", raising=False)
    assert len(records) == 3
    objective = runpy.run_path(
        str(tmp_path / migrations.before("Optuna", tmp_path))
    )["objective"]
    for record in (record for record in records if record.status == "done"):
        names = {
            "lr": "optimizer.lr",
            "batch_size": "global_batch_size",
            "width": "task_args.width",
        }
        drawn = {name: record.config[key] for name, key in names.items()}
        assert record.metrics["val_loss"] == pytest.approx(
            objective(optuna.trial.FixedTrial(drawn)), rel=1e-3
        )
