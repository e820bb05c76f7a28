"""The exported model: bit-equal in the task's bare model, tied tensors whole,
every error one sentence.
"""

import json
import sys

import pytest
import safetensors
import safetensors.torch
import torch

from tests.specs import make, whole_state
from trainers.__main__ import main
from trainers.checkpoint.store import Checkpoints
from trainers.devices.group import Group
from trainers.inference import export
from trainers.launch.local import run_local
from trainers.launch.user_code import load_task
from trainers.start import prepare_storage
from trainers.storage import Storage


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """A finished run with checkpoints of steps 20 and 30, 10 being the worst
    by `val_loss` (its best_mode is max).
    """
    best = {
        "checkpoint__best": "val_loss",
        "checkpoint__best_mode": "max",
        "checkpoint__keep": 1,
    }
    made = make(tmp_path_factory.mktemp("export"), name="finished", **best)
    prepare_storage(made, fresh=False)
    run_local(made)
    return made


def read(path):
    with safetensors.safe_open(path, "pt") as file:
        return safetensors.torch.load_file(path), file.metadata()


def test_the_file_loads_into_the_bare_model(spec, tmp_path):
    out = tmp_path / "below" / "model.safetensors"
    assert main(["export", spec.uri, "--out", str(out)]) == 0
    weights, described = read(out)
    model = load_task(spec.config.task, spec.config.task_args, "test").model()
    model.load_state_dict(weights)  # strict: every name, none besides
    assert (described["task"], described["step"], described["format"]) == (
        "tests.tasks:Blobs",
        "30",
        "pt",
    )
    assert (
        json.loads(described["versions"])["torch"]
        == torch.__version__.partition("+")[0]
    )
    assert json.loads(described["metrics"]).keys() == {
        "train_loss",
        "val_loss",
        "val_accuracy",
    }


@pytest.mark.parametrize(
    ("which", "step"),
    [("newest", "30"), ("best", "10"), ("step-10", "10"), ("step-30", "30")],
)
def test_the_checkpoint_may_be_chosen_and_is_bit_equal(
    spec, tmp_path, which, step
):
    assert (
        main(
            [
                "export",
                spec.uri,
                "--out",
                str(tmp_path / "m.safetensors"),
                f"--checkpoint={which}",
            ]
        )
        == 0
    )
    weights, described = read(tmp_path / "m.safetensors")
    assert described["step"] == step
    saved = whole_state(spec.uri, int(step))["model"]
    assert all(torch.equal(weights[name], saved[name]) for name in saved)


def write_model(spec, tmp_path, model):
    """A run beside the real one whose only checkpoint holds this model."""
    run = Storage(tmp_path / "made")
    run.write("config.yaml", spec.storage.read("config.yaml"))
    position = {
        "step": 1,
        "global_batch_size": 24,
        "train_samples": 203,
        "train_time_s": 0.5,
    }
    position |= {"metrics": {}, "evaluated_step": -1}
    state = {
        "model": model,
        "optimizer": {},
        "scaler": {},
        "task": {},
        "position": position,
    }
    Checkpoints(
        run, Group(0, 1, torch.device("cpu")), 1, config=spec.config.tree()
    ).save(1, state, {})
    return run.uri


def test_tied_transposed_and_sliced_tensors_are_written_whole(spec, tmp_path):
    table = torch.randn(6, 4)
    model = {
        "embedding": table,
        "head": table,
        "transposed": table.t(),
        "slice": table[1:3],
        "half": torch.randn(3).to(torch.bfloat16),
        "number": torch.tensor(7),
        "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "nothing": torch.empty(0, 3),
    }
    export(write_model(spec, tmp_path, model), str(tmp_path / "m.safetensors"))
    weights, _ = read(tmp_path / "m.safetensors")
    assert weights.keys() == model.keys()
    for name, tensor in model.items():
        assert weights[name].dtype == tensor.dtype, name
        assert torch.equal(weights[name], tensor), name


def test_neither_ray_nor_the_task_is_needed(spec, tmp_path, command):
    """From another directory, with the import of Ray and of the task's package blocked."""
    script = (
        "import sys; sys.modules['ray'] = None; sys.modules['tests'] = None\n"
        "from trainers.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    done = command(
        "-c",
        script,
        "export",
        spec.uri,
        "--out m.safetensors",
        cwd=tmp_path,
        program=(sys.executable,),
    )
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(
        f"{tmp_path}/m.safetensors: 4 tensors, 0.0 MiB, of step 30, train_loss "
    )
    assert len(read(tmp_path / "m.safetensors")[0]) == 4
