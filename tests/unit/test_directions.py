"""What imports cost and must not do: no pickle, no Ray or torch where they are not needed, no logging set up."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.rooms import REPOSITORY, source_files
from tests.waits import HANG_S

FILES = source_files()


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


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
        capture_output=True, text=True, timeout=HANG_S,
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


def test_python_s_doors_import_neither_torch_nor_ray(tmp_path: Path) -> None:
    script = BLOCK.format(blocked={"ray", "torch"}) + textwrap.dedent(
        """
        from trainers import train
        from tune import sweep
        from trainers.errors import ConfigError

        import tune.sweeps.spec, tune
        for call, keys in ((train, {}), (tune.sweep, {"space": {"seed": [1]}})):
            try:
                call({"task": "a:B"}, **keys)
            except ConfigError as error:
                print("required" in str(error), "torch" in sys.modules, "ray" in sys.modules)
        """
    )
    assert run(script, tmp_path) == "True False False\nTrue False False"


def test_importing_the_commands_configures_no_logging(tmp_path: Path) -> None:
    script = """
        import logging
        before = [logging.getLogger().handlers[:], logging.getLogger().level]
        import trainers.__main__, trainers.launch.local, trainers.loop.fit
        import tune.__main__, tune.sweeps.spec, tune.trials.journal
        print(before == [logging.getLogger().handlers, logging.getLogger().level])
    """
    assert run(script, tmp_path) == "True"
