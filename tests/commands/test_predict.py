"""`evaluate` and `predict` as users type them: the same answers from one, two and three workers."""

import json
import re
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import REPOSITORY, Command
from trainers.measure.run_log import read_log
from trainers.storage import Storage

# fmt: off
TORCHRUN = (str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "3", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "127.0.0.1:0", "-m", "trainers")
# fmt: on
SPAWN = ("--scaling.num_workers", "2", "--launcher", "spawn")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory, command: Command) -> Path:
    directory = tmp_path_factory.mktemp("digits")
    train = str(REPOSITORY / "examples/digits/train.yaml")
    # fmt: off
    done = command("-m", "trainers", train, "--launcher", "local", "--epochs", "2", "--storage_path", str(directory),
                   "--evaluate.microbatch_size", "20", forked=True)
    # fmt: on
    assert done.code == 0, done.err
    return directory / "digits"


def on_workers(num_workers: int, command: Command, *args: str) -> str:
    """What the command prints: here, spawned, or under torchrun."""
    if num_workers == 3:
        done = command(*args, program=TORCHRUN)
    else:
        done = command("-m", "trainers", *args, *(SPAWN if num_workers == 2 else ()), forked=True)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.parametrize("num_workers", [2, pytest.param(3, marks=pytest.mark.campaign)])
def test_evaluate_says_what_training_said(num_workers: int, digits: Path, command: Command) -> None:
    last = [record for record in read_log(Storage(str(digits))) if "val_loss" in record][-1]
    out = on_workers(num_workers, command, "evaluate", str(digits))
    for name in ("val_loss", "val_accuracy"):
        assert f"  {name} {last[name]!r}" in out.splitlines(), "the training's own figure, to the last bit"
    assert re.search(rf"[\d,]+ samples/s \(.* s; {num_workers} worker", out)
    assert json.loads((digits / "result.json").read_text())["metrics"]["val_accuracy"] == last["val_accuracy"]


@pytest.mark.full
def test_predict_writes_the_same_bytes(digits: Path, tmp_path: Path, command: Command) -> None:
    files = [tmp_path / f"{num_workers}.parquet" for num_workers in (1, 2, 3)]
    for num_workers, file in enumerate(files, 1):
        assert str(file) in on_workers(num_workers, command, "predict", str(digits), "--out", str(file))
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    assert pq.read_table(files[2])["index"].to_pylist() == list(range(359))
    assert not list(tmp_path.glob("*.tmp"))
