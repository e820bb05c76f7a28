"""The main job as the user runs it: train, sweep, interrupt, resume, train the
winner; on an embedded Ray.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPOSITORY
from tests.specs import read_json
from tests.waits import HANG_S

SWEEP = "examples/digits/sweep.yaml"
HELD = f"""
import sys
import time
from pathlib import Path

sys.path.append({str(REPOSITORY)!r})
from examples.digits.task import Digits

class Held(Digits):
    def transform(self, batch, training):
        while training and len(batch[0]) > 32 and not Path(__file__).with_name("go").exists():
            time.sleep(0.1)
        return super().transform(batch, training)
"""
"""Only the batches up to 32 train before the file `go` is there."""


def test_train_yaml_reaches_97_percent(tmp_path, command):
    # From another directory, by the local launcher.
    train = str(REPOSITORY / "examples/digits/train.yaml")
    done = command(
        "-m trainers", train, "--launcher local", cwd=tmp_path, forked=True
    )
    assert done.code == 0, done.err
    result = read_json(tmp_path / "results/digits/result.json")
    assert result["metrics"]["val_accuracy"] >= 0.97
    assert (
        "global batch 64 = microbatch 64 x accumulation 1 x 1 worker"
        in done.out
    )
    assert result["checkpoint"] in done.out
    assert (Path(result["checkpoint"]) / "manifest.json").is_file()


@pytest.mark.full
def test_interrupted_and_resumed_sweep(tmp_path, command):
    (tmp_path / "held.py").write_text(HELD, encoding="utf-8")
    task = ("--train.task", "held:Held", "--train.task_dir", str(tmp_path))
    few = (*task, "--finalists", "2", "--storage_path", str(tmp_path))
    environment = {
        key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"
    }
    # fmt: off
    sweep = subprocess.Popen(
        [sys.executable, "-m", "tune", SWEEP, *few], cwd=REPOSITORY, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )
    # fmt: on
    assert any(line.startswith("trial 2/8") for line in sweep.stdout)
    family = psutil.Process(sweep.pid).children(recursive=True)
    assert len(family) > 5
    os.killpg(sweep.pid, signal.SIGINT)  # what Ctrl-C in a terminal does
    rest = sweep.stdout.read()
    sweep.wait()
    assert sweep.returncode == 130
    assert " kept; continue with" in rest
    assert f"-m tune {tmp_path}/digits-sweep" in rest
    _, alive = psutil.wait_procs(family, timeout=HANG_S)
    assert not alive, f"left behind: {alive}"

    kept = {
        path.name: path.stat().st_mtime_ns
        for path in (tmp_path / "digits-sweep/trials").iterdir()
    }
    assert 2 <= len(kept) <= 4
    (tmp_path / "go").touch()
    done = command(
        "-m tune resume", str(tmp_path / "digits-sweep"), forked=True
    )
    assert done.code == 0, done.err
    trials = {
        path.name: path.stat().st_mtime_ns
        for path in (tmp_path / "digits-sweep/trials").iterdir()
    }
    assert len(trials) >= 8  # and the repeats of the finalists
    assert kept.items() <= trials.items(), "no finished trial was run again"
    check_answer(tmp_path / "digits-sweep", done, command, tmp_path)
    again = command(
        "-m tune",
        SWEEP,
        *few,
        env={"RAY_TMPDIR": str(tmp_path / "ray")},
        forked=True,
    )
    assert again.code == 0
    assert "is complete already" in again.out
    assert not (tmp_path / "ray").exists(), "no cluster was started for it"


def check_answer(sweep, done, command, tmp_path):
    """The table, the files of the contract, and a best.yaml that keeps the
    report's promise.
    """
    import pandas as pd

    assert "digits-sweep: 8 trials" in done.out
    assert (
        done.out.rstrip().splitlines()[-1]
        == f"report.html: {sweep}/report.html"
    )
    rows = pd.read_parquet(sweep / "results.parquet")
    frame = rows[rows["purpose"] == "trial"]
    assert len(frame) == 8
    repeated = rows[rows["purpose"] == "repeat"]
    counts = repeated.groupby(["global_batch_size", "precision"]).size()
    assert len(counts) != 1, (
        "finalists are compared: there are several, or none"
    )
    assert counts.isin(range(2, 17)).all()
    assert set(frame["status"]) <= {"done", "stopped"}, (
        "bf16 is certain to be beaten where it is emulated"
    )
    done_ones = frame[frame["status"] == "done"]
    for column in (
        "samples_per_s",
        "peak_memory_bytes",
        "val_accuracy",
        "time_to_target_s",
        "starting_s",
    ):
        assert (done_ones[column] > 0).all(), column
    assert read_json(sweep / "progress.json")["state"] == "ended"
    summary = read_json(sweep / "summary.json")
    best = frame[frame["id"] == summary["best"]["id"]].iloc[0]
    if len(repeated):
        repeats = repeated[
            repeated["global_batch_size"] == best["global_batch_size"]
        ]
        assert len(repeats[repeats["precision"] == best["precision"]]) >= 2, (
            "the best is one of those run again"
        )
    else:
        assert best["time_to_target_s"] == frame["time_to_target_s"].min()

    trained = command(
        "-m trainers",
        str(sweep / "best.yaml"),
        "--launcher local",
        cwd=tmp_path,
        forked=True,
    )
    assert trained.code == 0, trained.err
    result = read_json(tmp_path / "digits-sweep-best/result.json")
    assert result["metrics"]["val_accuracy"] >= best["val_accuracy"] - 0.01
