"""What-if: step times by hand where all is known, wide intervals where little is, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.files.prices import all_prices
from trainers.config.yaml import dump_yaml
from trainers.errors import ConfigError
from tune.__main__ import main
from tune.objective import Objective
from tune.sweeps.spec import prepare, read_sweep
from tune.trials.journal import Journal, trial_id
from tune.trials.record import Ran, TrialRecord, make_record
from tune.what_if.shapes import MEASURED, cheapest, device_of, read_shapes
from tune.what_if.step_time import Link, Measured, Roofline, StepTimes, Where, learn

PRICES = tuple(all_prices().values())
LAN = {"lan": Link(1e9, 1e-5, 0.1)}


def spread(known: StepTimes, where: Where) -> tuple[float, float, float]:
    low, middle, high = np.quantile(known.predict(where), [0.025, 0.5, 0.975])
    return low, middle, high


def single(each_s: float = 0.001, fixed_s: float = 0.01, device: str = "cpu") -> list[Measured]:
    return [Measured(Where(device, 1, size), fixed_s + each_s * size, 0.005) for size in (16, 32, 64, 128)]


def test_one_worker_between_measured_sizes_is_known_and_beyond_them_less_so() -> None:
    known = learn(single(), 4e6, LAN)
    low, middle, high = spread(known, Where("cpu", 1, 48))
    assert middle == pytest.approx(0.058, rel=0.05)
    assert high / low < 1.3
    far_low, _, far_high = spread(known, Where("cpu", 1, 4096))
    assert far_high / far_low > 1.3 * high / low


def test_without_a_run_of_several_workers_overlap_lies_between_none_and_full() -> None:
    # 64 samples on two workers: 42 ms of compute; 20 MB over 1 GB/s: 20 ms, all of which may be hidden.
    low, middle, high = spread(learn(single(), 2e7, LAN), Where("cpu", 2, 32, link="lan"))
    assert 0.036 < low < 0.045
    assert 0.045 < middle < 0.059
    assert 0.058 < high < 0.075


def test_a_run_of_two_workers_tells_of_eight() -> None:
    measured = [
        *single(),
        *(Measured(Where("cpu", 2, s, link="lan"), 0.01 + 0.001 * s + 0.02, 0.005) for s in (32, 64)),
    ]
    known = learn(measured, 2e7, LAN)
    low, middle, high = spread(known, Where("cpu", 8, 8, link="lan"))
    assert low < 0.01 + 0.008 + 7 / 4 * 0.02 < high  # nothing is hidden, as with two
    assert middle == pytest.approx(0.053, rel=0.15)
    # And another setting begins with what this one has shown of workers.
    other = learn(single(each_s=0.0005), 2e7, LAN, told=known.draws)
    assert spread(other, Where("cpu", 2, 32, link="lan"))[0] > 0.026 + 0.01
    assert np.quantile(np.exp(other.draws["spread"]), 0.5) < 0.05


def test_a_link_far_from_what_is_usual_is_found_by_what_it_does() -> None:
    """200 Mbit/s and nothing hidden, as hosts of tests/lab had it: steps of 1 and 2 workers tell of 3 to 6."""

    def step_s(workers: int, batch: int) -> float:
        return 0.004 + 0.002 * batch / workers + 2 * (workers - 1) / workers * 0.8e6 / 21e6

    at = [(workers, batch) for workers in (1, 2) for batch in (32, 64, 128, 256)]
    measured = [Measured(Where("cpu", n, b // n, link="here"), step_s(n, b), 0.01) for n, b in at]
    known = learn(measured, 0.8e6, {"here": MEASURED})
    for workers in (3, 4, 5, 6):
        for batch in (32, 256):
            low, middle, high = spread(known, Where("cpu", workers, -(-batch // workers), link="here"))
            assert low < step_s(workers, batch) < high
            assert middle == pytest.approx(step_s(workers, batch), rel=0.1)


def test_a_gpu_follows_from_the_roofline_and_from_what_another_one_has_reached() -> None:
    rooflines = {"A10G": Roofline(4e-4, 1e-4, 100), "H100": Roofline(5e-5, 2e-5, 100)}
    known = learn(single(each_s=0.001, fixed_s=0.001, device="A10G"), 4e6, {}, rooflines)  # 40 % of the roofline's rate
    low, middle, high = spread(known, Where("H100", 1, 512))
    assert low < 512 * 5e-5 / 0.4 + 0.001 < high
    assert middle == pytest.approx(512 * 5e-5 / 0.4 + 0.001, rel=0.2)
    from_cpu = spread(learn(single(), 4e6, {}, rooflines), Where("H100", 1, 512))
    assert from_cpu[2] / from_cpu[0] > 1.5 * high / low, "a processor says nothing of what a GPU reaches"
    assert not learn(single(), 4e6, {}).can("H100")


def test_accumulation_repeats_some_of_what_is_fixed() -> None:
    known = learn(single(), 4e6, {})
    low, _, high = spread(known, Where("cpu", 1, 128, passes=4))
    assert low < 0.138 * 1.05
    assert high > 0.138 + 0.9 * 0.03 * 0.9


SWEEP: dict[str, Any] = {
    "name": "blobs",
    "train": {"task": "tests.tasks:Blobs", "epochs": 2, "global_batch_size": 8, "optimizer": {"lr": 0.1}},
    "space": {"global_batch_size": [16, 64], "optimizer.lr": [0.1, 0.2]},
    "objective": {"metric": "time_to_target", "target": {"val_accuracy": 0.9}},
}


def sweep(tmp_path: Path, name: str = "blobs", workers: int = 0, device: str = "cpu, 15.6 GiB") -> str:
    """A sweep of 10 ms a step and 0.1 ms a sample, with as many epochs to the target as its batch size is large."""
    file = tmp_path / f"{name}.yaml"
    file.write_text(dump_yaml(SWEEP | {"name": name, "storage_path": str(tmp_path)}))
    spec = read_sweep(str(file), {}, own_workers=False)
    prepare(spec, fresh=False)
    for size in (16, 64) if workers else ():
        config = {"global_batch_size": size, "optimizer.lr": 0.1}
        step_s = 0.01 + 1e-4 * size / workers
        curve = [
            {"step": 10.0 * n, "epoch": n * 1.0, "train_time_s": 10 * n * step_s, "val_accuracy": 0.2 * n}
            for n in range(1, 6)
        ]
        ran = Ran(device, workers, size, size // workers, 1)
        record = TrialRecord(trial_id(config), config, "done", 0.0, 9.0, size / step_s, step_s, curve=curve, ran=ran)
        Journal(spec.storage).append(record)
    return str(file)


def test_a_record_says_on_what_its_trial_ran() -> None:
    result = {"steps": 3, "world_size": 2, "global_batch_size": 64, "microbatch_size": 16, "accumulation": 2}
    outcome = {"status": "done", "result": result, "device": "NVIDIA A10G, 22.5 GiB"}
    row = {"step": 3.0, "val_loss": 1.0}
    made = make_record("a", {}, Objective(metric="val_loss"), 0.0, [row], outcome)
    assert made.ran == Ran("NVIDIA A10G, 22.5 GiB", 2, 64, 16, 2)
    assert make_record("a", {}, Objective(metric="val_loss"), 0.0, [row], {"status": "hung"}).ran is None


def predicted(capfd: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["plan", *args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_the_command_predicts_each_configuration_on_each_shape(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = sweep(tmp_path, workers=1)
    found = predicted(capfd, file, "--what-if", "1xcpu,3xcpu@10Gbit,2xH100")["predicted"]
    assert [one["shape"] for one in found] == ["1xcpu"] * 2 + ["3xcpu@10Gbit"] * 2 + ["2xH100"] * 2
    same = {one["configuration"]["global_batch_size"]: one for one in found[:2]}
    for size, one in same.items():
        low, middle, high = one["step_time_s"]
        assert low < 0.01 + 1e-4 * size < high
        # The target was met at step 50: as many samples on any shape, at the time of one.
        assert one["time_to_target_s"][1] == pytest.approx(50 * middle, rel=0.1)
        assert one["fits"] is None
        assert one["usd_to_target"] is None
    gpu = found[4]
    assert gpu["fits"] is True
    assert gpu["link"] == "in a machine"
    assert gpu["usd_per_hour"] == min(one.usd_per_hour for one in PRICES if one.gpu_model == "H100" and one.gpus >= 2)
    low, middle, high = gpu["time_to_target_s"]
    assert gpu["usd_to_target"][1] == pytest.approx(middle * gpu["usd_per_hour"] / 3600, rel=1e-6)
    assert high / low > 3, "a processor says little of a GPU"


def test_runs_of_several_workers_in_another_sweep_narrow_what_is_said_of_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = sweep(tmp_path, workers=1)
    sweep(tmp_path, "two", workers=2)

    def width(*more: str) -> float:
        low, _, high = predicted(capfd, file, "--what-if", "4xcpu", *more)["predicted"][0]["step_time_s"]
        return float(high / low)

    assert width("--measured", str(tmp_path / "two")) < width()


def test_the_table_says_what_it_goes_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", sweep(tmp_path, workers=1), "--what-if", "3xcpu,2xA10G"]) == 0
    shown = capsys.readouterr().out
    assert "blobs: expected, with 95 % intervals, from 2 measured trials" in shown
    assert "--train.scaling.num_workers 2" in shown
    assert "2xA10G: link in a machine; microbatches of" in shown


def test_without_a_measured_trial_it_says_what_to_run_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = sweep(tmp_path)
    assert main(["plan", file, "--what-if", "3xcpu"]) == 2
    assert f"run `python -m tune {file}` on what is at hand first" in capsys.readouterr().err
    assert main(["plan", sweep(tmp_path, "gpu", 1, "NVIDIA A10G, 22.5 GiB"), "--what-if", "3xcpu"]) == 1
    assert "no trial was measured on a processor" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["H100", "0xH100", "8xH100@fast", "8xH101", "8x", "2xA100", "1xcpu@0Gbit"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"`--what-if` is .*{text}"):
        read_shapes(f"1xcpu,{text}")


def test_devices_have_the_names_of_their_data_sheets() -> None:
    assert device_of("NVIDIA H100 80GB HBM3, 79.2 GiB") == "H100"
    assert device_of("NVIDIA A100-SXM4-40GB, 39.4 GiB") == "A100-40GB"
    assert device_of("cpu, 15.6 GiB") == "cpu"
    assert device_of("NVIDIA Something New, 9 GiB") == "NVIDIA Something New"
    assert device_of("NVIDIA RTX A6000, 47.5 GiB") == "A6000"
    within, beyond = read_shapes("8xH100,16xH100")
    links = [shape.link_name({"measured on H100": 2}, PRICES) for shape in (within, beyond)]
    assert links == ["measured on H100", "between machines"]
    (shape,) = read_shapes("5xa10g@25Gbit/50us")
    assert (shape.workers, shape.device) == (5, "A10G")
    usd, machines = cheapest(shape, "", PRICES) or (0.0, "")
    assert usd == min(-(-5 // p.gpus) * p.usd_per_hour for p in PRICES if p.gpu_model == "A10G")
    assert machines
