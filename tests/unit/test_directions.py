"""Who may import whom: tune -> cluster -> trainers, and Ray only where the design says."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("trainers", "cluster", "tune")
FILES = sorted(path for package in PACKAGES for path in (REPOSITORY / package).glob("**/*.py"))
MAY_IMPORT = {
    "trainers": {"trainers"},
    "cluster": {"cluster", "trainers"},
    "tune": {"tune", "cluster", "trainers"},
}
WITH_RAY = {
    "trainers/on_ray/capacity.py",
    "trainers/on_ray/context.py",
    "trainers/on_ray/coordinator.py",
    "trainers/on_ray/process_group.py",
    "trainers/on_ray/trainer.py",
    "cluster/files/ray_up.py",
    "cluster/health/actors.py",
    "cluster/health/check.py",
    "tune/lanes/worker.py",
    "tune/lanes/controller.py",
    "tune/lanes/trainer.py",
    "tune/lanes/lanes.py",
    "tune/sweep/run.py",
    "tune/sweep/trial.py",
    "tune/sweep/population_trial.py",
    "tune/sweep/progress.py",
    "tune/sweep/repeats.py",
    "tune/search/ray_search.py",
}


def imported(path: Path) -> set[str]:
    """Top names of all imports of a file, at any level of it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.add((node.module or "").split(".")[0])
    return found


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_rooms_are_imported_in_one_direction(path: Path) -> None:
    room = path.relative_to(REPOSITORY).parts[0]
    assert imported(path) & set(PACKAGES) <= MAY_IMPORT[room]
    assert not imported(path) & {"tests", "examples", "benchmarks"}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_ray_is_imported_only_where_the_design_says(path: Path) -> None:
    if name(path) not in WITH_RAY:
        assert "ray" not in imported(path)


def test_the_list_of_files_with_ray_is_not_longer_than_it_must_be() -> None:
    present = {name(path) for path in FILES if "ray" in imported(path)}
    assert present <= WITH_RAY
    assert {"trainers/on_ray/trainer.py", "tune/lanes/lanes.py", "tune/sweep/run.py", "tune/sweep/trial.py"} <= present


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_unpickles_and_nothing_evaluates(path: Path) -> None:
    """No pickle from storage, no eval, no unsafe YAML."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in ("eval", "exec", "pickle.load", "pickle.loads", "yaml.unsafe_load", "yaml.full_load")
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called == "torch.load":
            assert keywords.get("weights_only") == "True"
        if called == "yaml.load":
            assert keywords.get("Loader") == "_Loader"


def run(script: str, path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=path, env={"PYTHONPATH": str(REPOSITORY)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(f"blocked: {{name}}")

sys.meta_path.insert(0, Blocked())
"""


def test_the_loop_runs_where_ray_cannot_be_imported(tmp_path: Path) -> None:
    script = BLOCK.format(blocked={"ray"}) + textwrap.dedent(
        """
        import torch
        from torch import nn
        from torch.utils.data import TensorDataset

        import trainers.__main__, trainers.launch.local, trainers.loop.fit
        from trainers.config import TrainConfig
        from trainers.launch.local import LocalContext
        from trainers.config.model import build
        from trainers.storage import Storage
        from trainers.task import Task

        class Tiny(Task):
            def model(self): return nn.Linear(3, 1)
            def dataset(self, split): return TensorDataset(torch.randn(20, 3), torch.randn(20, 1))
            def loss(self, outputs, batch): return (outputs - batch[1]).square().mean()

        tree = {"task": "t:Tiny", "max_steps": 3, "global_batch_size": 4, "optimizer": {"lr": 0.1}, "device": "cpu"}
        result = trainers.loop.fit.fit(Tiny(), build(TrainConfig, tree, "f"), LocalContext(Storage("run"), "local"))
        try:
            import ray
        except ImportError as error:
            print(result.status, result.steps, error)
        """
    )
    assert run(script, tmp_path) == "done 3 blocked: ray"


def test_a_lanes_controller_needs_no_torch(tmp_path: Path) -> None:
    """What Ray's controller of a lane imports: it has no torch to wait for."""
    script = BLOCK.format(blocked={"torch"}) + "import tune.lanes.lanes, trainers.on_ray.process_group; print('done')"
    assert run(script, tmp_path) == "done"


def test_a_mistake_is_said_before_torch_and_ray_are_imported(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "train.yaml").write_text("task: task:T\nepochs: 1\nglobal_batch_size: 4\noptimizer: {lr: -1}\n")
    (tmp_path / "sweep.yaml").write_text("train: train.yaml\nspace: {seed: [1]}\nobjective: {metric: val_loss}\n")
    script = BLOCK.format(blocked={"ray", "torch"}) + textwrap.dedent(
        """
        import trainers.__main__, tune.__main__, cluster.files.capacity
        print(trainers.__main__.main(["train.yaml"]), tune.__main__.main(["sweep.yaml"]), "torch" in sys.modules)
        """
    )
    assert run(script, tmp_path) == "2 2 False"


def test_importing_the_commands_configures_no_logging(tmp_path: Path) -> None:
    script = """
        import logging
        before = [logging.getLogger().handlers[:], logging.getLogger().level]
        import trainers.__main__, trainers.launch.local, trainers.loop.fit
        import tune.__main__, tune.sweep.spec, tune.trials.journal
        print(before == [logging.getLogger().handlers, logging.getLogger().level])
    """
    assert run(script, tmp_path) == "True"
