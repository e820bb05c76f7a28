"""`evaluate` and `predict` as users type them: the same answers from one, two and three workers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import REPOSITORY, Done
from trainers.measure.run_log import read_log
from trainers.storage import Storage

HERE = (sys.executable, "-m", "trainers")
# fmt: off
TORCHRUN = (str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "3", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "127.0.0.1:0", "-m", "trainers")
# fmt: on
SPAWN = ("--scaling.num_workers", "2", "--launcher", "spawn")


@pytest.fixture
def digits(tmp_path: Path, command: Callable[..., Done]) -> Path:
    train = str(REPOSITORY / "examples/digits/train.yaml")
    # fmt: off
    done = command("-m", "trainers", train, "--launcher", "local", "--epochs", "2", "--storage_path", str(tmp_path),
                   "--evaluate.microbatch_size", "20")
    # fmt: on
    assert done.code == 0, done.err
    return tmp_path / "digits"


def test_one_two_and_three_workers_agree(digits: Path, tmp_path: Path, command: Callable[..., Done]) -> None:
    ways: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "1": (HERE, ()),
        "2": (HERE, SPAWN),
        "3": (TORCHRUN, ()),
    }
    last = [record for record in read_log(Storage(str(digits))) if "val_loss" in record][-1]
    for workers, (program, options) in ways.items():
        done = command("evaluate", str(digits), *options, program=program, cwd=tmp_path)
        assert done.code == 0, done.err
        for name in ("val_loss", "val_accuracy"):
            assert f"  {name} {last[name]!r}" in done.out.splitlines(), "the training's own figure, to the last bit"
        assert re.search(rf"[\d,]+ samples/s \(.* s; {workers} worker", done.out)
        out = tmp_path / f"{workers}.parquet"
        done = command("predict", str(digits), "--out", str(out), *options, program=program, cwd=tmp_path)
        assert done.code == 0, done.err
        assert str(out) in done.out
    files = [(tmp_path / f"{workers}.parquet").read_bytes() for workers in ways]
    assert files[0] == files[1] == files[2]
    table = pq.read_table(tmp_path / "3.parquet")
    assert table["index"].to_pylist() == list(range(359))
    assert not list(tmp_path.glob("*.tmp"))
    accuracy = json.loads((digits / "result.json").read_text())["metrics"]["val_accuracy"]
    assert accuracy == last["val_accuracy"]
