"""`train()` and `sweep()`: what Python gives becomes what a file would say, in
the same directories as the commands.
"""

import importlib
import linecache
import logging
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import tune
from tests.tasks import Blobs
from trainers import train
from trainers.config.yaml import dump_yaml, parse_mapping
from trainers.errors import ConfigError, RunFailedError
from trainers.launch.from_python import plain
from trainers.storage import Storage
from tune.config import Range
from tune.sweeps import sweep as sweep_module

RUN = {
    "task": Blobs,
    "name": "blobs",
    "epochs": 2,
    "global_batch_size": 16,
    "optimizer": {"lr": 0.1},
    "launcher": "local",
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Each test has its own directory, and its own path for imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("PACELINE_STORAGE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_a_class_trains_and_its_run_can_be_used(capsys):
    before = [
        logging.getLogger("trainers").handlers[:],
        logging.getLogger("trainers").level,
    ]
    run = train(RUN, epochs=1, **{"optimizer.lr": 0.2})
    assert (run.status, run.epochs, run.uri) == (
        "done",
        1,
        str(Path.cwd() / "results/blobs"),
    )
    assert (
        Storage(run.uri).read_json("result.json", dict[str, Any])["metrics"]
        == run.metrics
    )
    assert "val_loss" in run.metrics
    assert run.checkpoint is not None
    assert [row["lr"] for row in run.log() if "lr" in row] == [0.2]
    assert (
        pd.DataFrame(run.log())["val_loss"].iloc[-1] == run.metrics["val_loss"]
    )
    assert run.model()(torch.ones(5, 12)).shape == (5, 4)
    assert not run.model("newest").training
    assert repr(run).startswith("done: ")
    assert "val_loss" in capsys.readouterr().out, "the log is shown"
    assert before == [
        logging.getLogger("trainers").handlers,
        logging.getLogger("trainers").level,
    ]

    again = train(RUN, epochs=1, **{"optimizer.lr": 0.2})
    assert (
        "is complete already (fresh=True starts it over)"
        in capsys.readouterr().out
    )
    assert asdict(again) == asdict(run)
    assert train(RUN, **{"optimizer.lr": 0.2}).steps == 2 * run.steps, (
        "it goes on"
    )
    with pytest.raises(ConfigError, match=r"`optimizer: .*` differs from"):
        train(RUN)
    assert train(RUN, fresh=True, epochs=1).steps == run.steps


class Found(Blobs):
    """Knows its inputs from its data."""

    def dataset(self, split):
        found = super().dataset(split)
        self.width = found.tensors[0].shape[1]
        return found

    def model(self):
        return nn.Linear(self.width, 4)


def test_a_trained_model_may_need_what_dataset_finds():
    model = train(RUN, task=Found, epochs=1).model()
    assert model(torch.ones(5, 12)).shape == (5, 4)


def test_a_file_is_read_as_the_command_reads_it(tmp_path):
    tree = {**RUN, "task": "its_task:Mine", "epochs": 1}
    (tmp_path / "user").mkdir()
    (tmp_path / "user/its_task.py").write_text(
        "from tests.tasks import Blobs\n\nclass Mine(Blobs): pass\n"
    )
    (tmp_path / "user/train.yaml").write_text(dump_yaml(tree))
    assert train(Path("user/train.yaml"), name="other").uri.endswith(
        "results/other"
    )
    with pytest.raises(ConfigError, match=r"did you mean `user/train\.yaml`"):
        train("user/trian.yaml")


def test_a_failure_of_the_task_is_the_cause_of_the_error(capsys):
    with pytest.raises(
        RunFailedError, match="the run ended as `error`"
    ) as raised:
        train(RUN, task_args={"fail_at": 3})
    assert isinstance(raised.value.__cause__, ValueError)
    assert "Traceback" not in capsys.readouterr().err, "Python shows it"


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (
            Blobs(),
            "`train()` was given a Blobs, but needs a file, a mapping, a Task class or a function",
        ),
        (
            {**RUN, "epoch": 1},
            "train(): `epoch: 1` is not a known key; did you mean `epochs`?",
        ),
        (
            {**RUN, "task_args": {"x": torch.ones(1)}},
            "train(): `task_args.x` holds a Tensor, which a file cannot hold",
        ),
        (
            {**RUN, "task": Path},
            'train(): `task: "pathlib:Path"` names no class derived from trainers.task.Task',
        ),
        ({**RUN, "task": lambda: None}, "train(): `task: "),
        ("", "`the file` cannot be read"),
    ],
)
def test_what_cannot_be_trained_is_said_before_anything_starts(run, said):
    with pytest.raises(ConfigError) as raised:
        train(run)
    assert str(raised.value).startswith(said)
    assert not Path("results").exists()


@pytest.mark.parametrize("call", ["train", "sweep"])
def test_a_thread_hears_no_interrupt(call):
    raised = []

    def body():
        try:
            train(RUN) if call == "train" else tune.sweep(RUN, {"seed": [1]})
        except ConfigError as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    [error] = raised
    assert (
        str(error)
        == f"`{call}()` was called outside the main thread; call it in the main thread."
    )


class AskedError(Exception):
    """The sweep that would run."""


@pytest.fixture
def asked(monkeypatch):
    """Call `sweep()`; returns what would run."""

    def run(spec, fresh, checked):
        raise AskedError(spec)

    def call(*args, **keys):
        with pytest.raises(AskedError) as raised:
            tune.sweep(*args, **keys)
        [spec] = raised.value.args
        return spec

    monkeypatch.setattr(sweep_module, "run_to_answer", run)
    return call


def test_a_sweep_is_the_one_that_a_file_would_be(asked, tmp_path):
    spec = asked(
        RUN,
        {"optimizer.lr": {"loguniform": (1e-4, 1e-2)}, "seed": np.arange(2)},
        "val_accuracy",
        name="mine",
        search="random",
        budget={"trials": 3},
        **{"train.epochs": 5, "objective.mode": "max"},
    )
    assert (
        spec.config.name,
        spec.config.search,
        spec.config.budget.trials,
    ) == (
        "mine",
        "random",
        3,
    )
    assert spec.config.space == {
        "optimizer.lr": Range(loguniform=[1e-4, 1e-2]),
        "seed": [0, 1],
    }
    assert (spec.config.objective.metric, spec.config.objective.direction) == (
        "val_accuracy",
        "max",
    )
    assert (spec.train["task"], spec.train["epochs"]) == (
        "tests.tasks:Blobs",
        5,
    )
    assert spec.uri == str(tmp_path / "results/mine")
    target = asked(
        RUN,
        {"seed": [1]},
        {"metric": "time_to_target", "target": {"val_loss": 0.1}},
    )
    assert target.config.objective.target == {"val_loss": 0.1}


NOTEBOOK = '''
import builtins
import functools
import numpy as np
import torch.nn.functional as F
from torch import nn
from tests.tasks import Blobs as Base

WIDTH, TABLE = 4, {"a": [1, 2]}
tensor = np.ones(3)
API_KEY = "0123456789"

def scale(loss):
    return loss * TABLE["a"][0]

def named(cls):
    cls.known = True
    return cls

class Deep(Base):
    @staticmethod
    def factor():
        return 2

Alias = Deep

@named
class Mine(Alias):
    """A task of a notebook."""

    def loss(self, outputs, batch):
        again = [scale(F.cross_entropy(outputs, batch[1])) for tensor in range(2)]
        return self.factor() * sum(again) / WIDTH

class Bad(Mine):
    def loss(self, outputs, batch):
        return tensor.sum()

class Secret(Mine):
    def dataset(self, split):
        return fetch(API_KEY)

class Silent(Base):
    pass

@functools.wraps(builtins.open)
def open(*args, **kwargs):  # as IPython has it
    return builtins.open(*args, **kwargs)

class Reading(Mine):
    def setup(self):
        with open("read", "w") as file:
            file.write("here")
'''


@pytest.fixture
def notebook(monkeypatch):
    """Run a cell; returns the notebook's names."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    cells = iter(range(100))

    def run(source):
        name = f"/cells/{next(cells)}.py"
        monkeypatch.setitem(
            linecache.cache,
            name,
            (len(source), None, source.splitlines(True), name),
        )
        exec(compile(source, name, "exec"), vars(main))  # noqa: S102
        return main

    return run


def test_a_notebook_s_class_trains_from_the_file_that_it_is_written_to(
    notebook,
):
    cells = notebook(NOTEBOOK)
    run = train(RUN, task=cells.Mine, epochs=1)
    [file] = Path("notebook_tasks").glob("*.py")
    module = importlib.import_module(f"notebook_tasks.{file.stem}")
    assert module.Mine.known
    assert (module.WIDTH, module.TABLE) == (4, {"a": [1, 2]})
    assert not hasattr(module, "tensor"), "only what is used"
    train(RUN, task=cells.Reading, epochs=1, name="reading")
    assert Path("read").read_text() == "here"
    assert (
        parse_mapping((Path(run.uri) / "config.yaml").read_text(), "f")["task"]
        == f"notebook_tasks.{file.stem}:Mine"
    )
    with pytest.raises(
        ConfigError,
        match="cannot be given to workers: `tensor` is a ndarray that only this notebook has",
    ):
        train(RUN, task=cells.Bad)
    with pytest.raises(
        ConfigError,
        match="`API_KEY` holds a secret, which must not be written to a file; read it from the environment",
    ):
        train(RUN, task=cells.Secret)
    with pytest.raises(
        ConfigError,
        match="cannot be given to workers: `Silent` has no source that can be found",
    ):
        train(RUN, task=cells.Silent)


def test_a_script_s_class_is_imported_from_the_script(tmp_path, monkeypatch):
    script = tmp_path / "my_script.py"
    script.write_text("class Mine: pass\n")
    main = ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec("class Mine: pass", vars(main))  # noqa: S102
    places = []
    assert plain(main.Mine, "train()", places) == "my_script:Mine"
    assert places == [tmp_path]


def test_a_call_that_an_import_of_its_task_s_module_makes_is_refused(
    tmp_path, monkeypatch
):
    """Whatever the process is that imports it: a trial's has another main module."""
    text = "import tune\nclass Mine: pass\ntune.sweep({'task': Mine}, {'seed': [0]})\n"
    (tmp_path / "my_script.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match='put it below `if __name__ == "__main__":`'
    ):
        importlib.import_module("my_script")
