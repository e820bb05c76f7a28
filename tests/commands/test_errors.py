"""A mistake in a file or an option: one sentence, exit code 2, before any
worker starts.

One process without torch and Ray is given all commands in turn.
"""

import json

import pytest

from tests.specs import BASE
from trainers.config.yaml import dump_yaml

TRAIN = ["trainers", "examples/digits/train.yaml"]
SWEEP = ["tune", "examples/digits/sweep.yaml"]

# What is typed, and what the sentence must say.
TYPED = {
    "a nested key": (
        [*TRAIN, "--optimizer.weight_deacy", "1"],
        ["did you mean `optimizer.weight_decay`?"],
    ),
    "text for a number": (
        [*TRAIN, "--optimizer.lr", "fast"],
        ['`optimizer.lr: "fast"`', "number"],
    ),
    "no such module": (
        [*TRAIN, "--task", "tests.taks:Blobs"],
        ['"tests.taks:Blobs"', "no tests/taks.py"],
    ),
    "too many here": (
        [*TRAIN, "--launcher", "spawn", "--scaling.num_workers", "4096"],
        ["`scaling.num_workers: 4096`"],
    ),
    "too many cores here": (
        [*TRAIN, "--launcher", "local", "--scaling.cpus_per_worker", "100000"],
        ["each worker takes 100000"],
    ),
    "too many on Ray": (
        [*TRAIN, "--scaling.num_workers", "4096"],
        ["`scaling.num_workers: 4096`"],
    ),
    "a space's key": (
        [*SWEEP, "--space", "{precison: [fp32]}"],
        ["space.precison", "did you mean"],
    ),
    "a range in a grid": (
        [*SWEEP, "--space", "{global_batch_size: {min: 8, max: 64}}"],
        ["`search: ", "set `search: random`"],
    ),
    "no target": (
        [*SWEEP, "--objective", "{metric: time_to_target}"],
        ["objective.target", "add `target:"],
    ),
    "a run's value": (
        [*SWEEP, "--train.optimizer.lr", "-1"],
        ["`optimizer.lr: -1`", "greater than 0"],
    ),
}

# An interpreter in which neither torch nor Ray can be imported is the proof
# that they are not.
ALL_IN_TURN = """
import contextlib, importlib, io, json, sys
sys.modules.update(dict.fromkeys(("torch", "ray")))
said = {}
for name, (package, *arguments) in json.loads(sys.argv[1]).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = importlib.import_module(f"{package}.__main__").main(arguments)
    said[name] = code, out.getvalue(), err.getvalue()
print(json.dumps(said))
"""


def check(code, out, err, words):
    """It is one sentence, which has all words."""
    assert code == 2, err
    [line] = [line for line in err.splitlines() if line]
    assert line.startswith("error: ")
    assert "Traceback" not in out + err
    assert all(word in line for word in words), line


def test_without_torch_and_ray(command):
    done = command(
        "-c",
        ALL_IN_TURN,
        json.dumps(
            {name: arguments for name, (arguments, _) in TYPED.items()}
        ),
    )
    assert done.code == 0, done.err
    said = json.loads(done.out)
    for name, (_, words) in TYPED.items():
        check(*said[name], words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "tests.tasks:Blob"}, "did you mean `tests.tasks:Blobs`?"),
        ({"precision": "tf32", "device": "cpu"}, '`precision: "tf32"`'),
    ],
)
def test_what_torch_has_to_say(changes, words, tmp_path, command):
    file = tmp_path / "train.yaml"
    file.write_text(
        dump_yaml({**BASE, "storage_path": str(tmp_path / "runs"), **changes})
    )
    done = command("-m trainers", str(file), forked=True)
    check(done.code, done.out, done.err, [str(file), words])
    assert not (tmp_path / "runs").exists(), "nothing was written"
