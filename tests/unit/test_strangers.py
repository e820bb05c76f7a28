"""States that were read back and are not this run's: named, the one before is
used, and the process lives.
"""

import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.specs import whole_state
from tests.unit.test_checkpoint import folder, replace
from tests.unit.test_loop import train
from trainers.errors import CheckpointError

KEEP = {
    "checkpoint": {"every_steps": 5, "keep": 9},
    "evaluate": {"every_steps": 99},
}
Change = Callable[[dict[str, Any]], Any]


def rewrite(path, step, change, file="state.pt"):
    """Change a file of a checkpoint as somebody would who wants it to be believed."""
    where = folder(path, step)
    state = torch.load(where / file, weights_only=True)
    change(state)
    data = io.BytesIO()
    torch.save(state, data)
    replace(where, file, data.getvalue())


def moment(name, value):
    def change(state):
        state["optimizer"]["state"][0][name] = value

    return change


def cycle():
    inner = []
    inner.append(inner)
    return inner


STATES = {
    "a moment of another shape": moment("exp_avg", torch.zeros(4, 8)),
    "a moment that is a number": moment("exp_avg", 1.0),
    "a sparse moment": moment("exp_avg", torch.zeros(8, 4).to_sparse()),
    "a group of other parameters": lambda state: state["optimizer"][
        "param_groups"
    ][0].update(params=[0]),
    "no optimizer": lambda state: state.pop("optimizer"),
    "something more": lambda state: state.update(more=1),
    "a weight of another shape": lambda state: state["model"].update(
        {"0.weight": torch.zeros(8)}
    ),
    "a weight of whole numbers": lambda state: state["model"].update(
        {"0.weight": torch.zeros(8, 4, dtype=torch.int8)}
    ),
    "a sparse weight": lambda state: state["model"].update(
        {"0.weight": torch.zeros(8, 4).to_sparse()}
    ),
    "no weight": lambda state: state["model"].pop("0.weight"),
    "another step": lambda state: state["position"].update(step=9),
    "metrics that are text": lambda state: state["position"].update(
        metrics={"train_loss": "low"}
    ),
    "lists without end": lambda state: state["position"].update(
        metrics=cycle()
    ),
    "a task state that the task does not know": lambda state: state.update(
        task={}
    ),
}
RANDOM = {
    "numpy's position": lambda state: state["numpy"].update(pos=10**9),
    "torch of floats": lambda state: state.update(torch=torch.zeros(5056)),
    "nothing": lambda state: state.clear(),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run with the checkpoints of steps 5, 10 and 15."""
    path = tmp_path_factory.mktemp("ended")
    train(path, **KEEP)
    return path


def copied(ended, path, steps):
    for step in steps:
        target = folder(path, step)
        target.mkdir(parents=True)
        for file in folder(ended, step).iterdir():
            (target / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize(
    ("file", "name"),
    [("state.pt", one) for one in STATES]
    + [("rank-00000.pt", one) for one in RANDOM],
)
def test_a_state_that_does_not_fit_is_named_and_the_one_before_is_used(
    file, name, ended, tmp_path, caplog
):
    caplog.set_level(logging.INFO, "trainers")
    copied(ended, tmp_path, (5, 10))
    rewrite(
        tmp_path,
        10,
        STATES[name] if file == "state.pt" else RANDOM[name],
        file,
    )
    train(tmp_path, **KEEP)
    (said,) = [line for line in caplog.messages if "is left out" in line]
    assert said.startswith(f"checkpoint {folder(tmp_path, 10)} is left out: ")
    assert "resumed at step 5 from" in caplog.text
    assert_same_weights(tmp_path, ended)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 4},
        {"optimizer": {"name": "adamw", "lr": 0.01}},
        {"task_args": {"width": 3}},
    ],
)
def test_a_checkpoint_of_another_run_is_refused(changes, ended, tmp_path):
    train(tmp_path / "other", **KEEP | changes)
    copied(tmp_path / "other", tmp_path / "run", (10,))
    with pytest.raises(CheckpointError, match=f"with {next(iter(changes))}"):
        train(tmp_path / "run", **KEEP)
    copied(ended, tmp_path / "run", (5,))
    train(tmp_path / "run", **KEEP)
    assert_same_weights(tmp_path / "run", ended)


def assert_same_weights(path, reference):
    ours, theirs = (whole_state(one, 15)["model"] for one in (path, reference))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
