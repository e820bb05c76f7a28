"""`evaluate` and `predict` as users type them: the same answers from one
worker and from two.
"""

import re

import pyarrow.parquet as pq
import pytest

from tests.conftest import REPOSITORY
from tests.specs import logged, read_json

SPAWN = ("--scaling.num_workers", "2", "--launcher", "spawn")


@pytest.fixture(scope="module")
def digits(tmp_path_factory, command):
    directory = tmp_path_factory.mktemp("digits")
    train = str(REPOSITORY / "examples/digits/train.yaml")
    # fmt: off
    done = command("-m trainers", train, "--launcher local --epochs 2 --storage_path", str(directory),
                   "--evaluate.microbatch_size 20", forked=True)
    # fmt: on
    assert done.code == 0, done.err
    return directory / "digits"


def said(command, *args):
    """What `python -m trainers ARGS` prints."""
    done = command("-m trainers", *args, forked=True)
    assert done.code == 0, done.err
    return done.out


def test_evaluate_says_what_training_said(digits, command):
    last = logged(digits, "val_loss")[-1]
    out = said(command, "evaluate", str(digits), *SPAWN)
    for name in ("val_loss", "val_accuracy"):
        assert f"  {name} {last[name]!r}" in out.splitlines(), (
            "the training's own figure, to the last bit"
        )
    assert re.search(r"[\d,]+ samples/s \(.* s; 2 workers", out)
    assert (
        read_json(digits / "result.json")["metrics"]["val_accuracy"]
        == last["val_accuracy"]
    )


@pytest.mark.full
def test_predict_writes_the_same_bytes(digits, tmp_path, command):
    files = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    for file, launcher in zip(files, ((), SPAWN), strict=True):
        assert str(file) in said(
            command, "predict", str(digits), "--out", str(file), *launcher
        )
    assert files[0].read_bytes() == files[1].read_bytes()
    assert pq.read_table(files[1])["index"].to_pylist() == list(range(359))
    assert not list(tmp_path.glob("*.tmp"))
