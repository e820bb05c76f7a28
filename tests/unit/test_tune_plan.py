"""The plan of a sweep on a cluster file: lanes, hours and dollars by hand, and one sentence for what cannot fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.files.prices import load_prices
from cluster.files.ray_up import load_cluster
from tests.specs import REPOSITORY
from trainers.config.yaml import dump_yaml
from trainers.errors import ConfigError
from tune.__main__ import main
from tune.sweeps.plan import Forecast, SweepPlan, lanes_for, make_plan, starts_at_once
from tune.sweeps.spec import prepare, read_sweep
from tune.trials.journal import Journal, trial_id
from tune.trials.record import TrialRecord

MODULE = "task_of_test_tune_plan"
TRAIN: dict[str, Any] = {
    "task": f"{MODULE}:Mine",
    "epochs": 2,
    "global_batch_size": 8,
    "optimizer": {"lr": 0.1},
    "scaling": {"num_workers": 2},
}
SPACE: dict[str, Any] = {"global_batch_size": [8, 16, 32, 64, 128], "precision": ["fp32", "bf16"]}
SWEEP: dict[str, Any] = {"name": "many", "train": TRAIN, "space": SPACE, "objective": {"metric": "val_loss"}}
# A head without CPUs to give, and up to 5 nodes of 2 GPUs: 5 groups of 2 workers.
HEAD = {"resources": {"CPU": 0}, "node_config": {"InstanceType": "m5.2xlarge"}}
NODE = {
    "resources": {"CPU": 8, "GPU": 2},
    "min_workers": 0,
    "max_workers": 5,
    "node_config": {"InstanceType": "g5.2xlarge"},
}
HEAD_USD, NODE_USD = (load_prices("aws", "us-east-1")[name].usd_per_hour for name in ("m5.2xlarge", "g5.2xlarge"))


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory, which is the working directory too."""
    (tmp_path / f"{MODULE}.py").write_text("from trainers.task import Task\n\nclass Mine(Task):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("PACELINE_STORAGE", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(user: Path, sweep: dict[str, Any], node: dict[str, Any]) -> tuple[str, str]:
    (user / "sweep.yaml").write_text(dump_yaml(SWEEP | sweep))
    tree = {
        "cluster_name": "lab",
        "max_workers": 5,
        "provider": {"type": "aws", "region": "us-east-1"},
        "auth": {"ssh_user": "ubuntu"},
        "available_node_types": {"head": HEAD, "gpu": NODE | node},
        "head_node_type": "head",
    }
    (user / "cluster.yaml").write_text(dump_yaml(tree))
    return str(user / "sweep.yaml"), str(user / "cluster.yaml")


def plan(user: Path, minutes: float | None = None, node: dict[str, Any] | None = None, **sweep: Any) -> Forecast:
    file, cluster = write(user, sweep, node or {})
    return make_plan(read_sweep(file, {}, own_workers=False), load_cluster(cluster), minutes)


def finish(user: Path, seconds: list[float], status: Any = "done") -> None:
    """Trials of the sweep that have ended, after so many seconds each."""
    spec = read_sweep(str(user / "sweep.yaml"), {}, own_workers=False)
    prepare(spec, fresh=False)
    for number, time_s in enumerate(seconds):
        config = {"number": number, "status": status}
        Journal(spec.storage).append(TrialRecord(trial_id(config), config, status, 1000.0, 1000.0 + time_s))


def test_the_figures_are_those_of_a_calculation_by_hand(user: Path) -> None:
    found = plan(user, minutes=30)
    assert (found.trials, found.plan.num_lanes, found.plan.max_lanes) == (10, 5, 5)
    assert found.usd_per_hour == pytest.approx(HEAD_USD + 5 * NODE_USD)
    assert found.time_s == 2 * 30 * 60  # ten trials in five lanes
    assert found.usd == pytest.approx(HEAD_USD + 5 * NODE_USD)
    text = "\n".join(found.lines())
    assert "each 2 workers of 1 CPU and 1 GPU;" in text
    usd = HEAD_USD + 5 * NODE_USD
    assert f"fully grown  the head and 5 gpu: 40 CPUs, 10 GPUs, {usd:.2f} USD/hour" in text


def test_only_the_nodes_that_the_lanes_need_are_paid_for(user: Path) -> None:
    found = plan(user, minutes=60, lanes=2)
    assert (found.plan.num_lanes, found.plan.max_lanes) == (2, 5)
    assert found.usd_per_hour == pytest.approx(HEAD_USD + 2 * NODE_USD)
    assert found.time_s == 5 * 3600
    few = plan(user, space={"precision": ["fp32", "bf16"]})
    assert (few.plan.num_lanes, few.trials) == (2, 2)  # an idle lane costs and gives nothing


def test_the_price_may_be_given(user: Path) -> None:
    found = plan(user, minutes=30, usd_per_hour=20.0)
    assert found.usd == 20.0
    assert "USD/hour     20.00 (given: usd_per_hour)" in list(found.lines())


def test_an_unknown_price_is_said_and_not_guessed(user: Path) -> None:
    found = plan(user, minutes=30, node={"node_config": {"InstanceType": "x99.huge"}})
    assert (found.usd_per_hour, found.usd) == (None, None)
    text = "\n".join(found.lines())
    assert "no price of gpu: give --usd_per_hour" in text
    assert "USD          unknown" in text


def test_an_unknown_duration_is_said_and_not_guessed(user: Path) -> None:
    found = plan(user)
    assert (found.trial_s, found.time_s, found.usd) == (None, None, None)
    text = "\n".join(found.lines())
    assert "give --minutes_per_trial" in text
    assert "time         unknown\n" in text
    with_budget = plan(user, budget={"usd": 10.0}, usd_per_hour=5.0)
    assert "time         unknown, at most 2 h by the budget" in "\n".join(with_budget.lines())


def test_earlier_trials_of_the_same_sweep_tell_the_duration_and_are_not_run_again(user: Path) -> None:
    write(user, {}, {})
    finish(user, [100.0, 200.0, 300.0])
    finish(user, [5.0], "out_of_memory")  # ended early: no measure of a trial
    found = plan(user)
    assert (found.trials, found.ended, found.trial_s) == (6, 4, 200.0)
    assert found.time_s == 2 * 200.0
    assert "mean of 3 that ended" in found.trial_source
    assert plan(user, minutes=10).trial_s == 600


def test_a_budget_cuts_the_sweep_off(user: Path) -> None:
    found = plan(user, minutes=30, lanes=2, budget={"time_s": 6000})
    assert (found.within, found.time_s) == (6, 6000)  # three rounds of two end within 100 minutes
    assert "about 6 of 10 trials" in "\n".join(found.lines())
    exact = plan(user, minutes=30, lanes=2, budget={"time_s": 5400})
    assert (exact.within, exact.time_s) == (6, 5400)
    short = plan(user, minutes=30, lanes=2, budget={"time_s": 5399.9})
    assert (short.within, short.time_s) == (4, 5399.9)
    roomy = plan(user, minutes=30, lanes=2, budget={"time_s": 60_000})
    assert (roomy.within, roomy.time_s) == (10, 9000)
    assert plan(user, minutes=30, budget={"trials": 4}).trials == 4


@pytest.mark.parametrize(
    ("sweep", "node", "field", "words"),
    [
        ({"lanes": 6}, {}, "lanes", "at most the 5 worker groups"),
        (
            {"train": TRAIN | {"scaling": {"num_workers": 11}}},
            {},
            "train.scaling.num_workers",
            "can grow to 10 workers",
        ),
        (
            {"train": TRAIN | {"scaling": {"cpus_per_worker": 9}}},
            {},
            "train.scaling.num_workers",
            "can grow to 0 workers of 9 CPU",
        ),
        ({}, {"max_workers": 0}, "train.scaling.num_workers", "can grow to 0 workers"),
        ({"budget": {"time_s": 60}}, {}, "budget.time_s", "before the first trial ends"),
        ({"budget": {"usd": 0.1}, "usd_per_hour": 6.0}, {}, "budget.usd", "at 6.00 USD an hour"),
    ],
)
def test_a_sweep_that_cannot_fit_is_refused_with_the_reason(
    user: Path, sweep: dict[str, Any], node: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(user, 30, node, **sweep)
    (line,) = str(raised.value).splitlines()
    assert f"`{field}`" in line
    assert words in line


def test_elastic_workers_need_their_smallest_number(user: Path) -> None:
    found = plan(user, train=TRAIN | {"scaling": {"num_workers": [2, 40]}})
    assert found.plan.num_lanes == 5


def test_cpu_training_does_not_count_gpus(user: Path) -> None:
    found = plan(user, train=TRAIN | {"scaling": {"num_workers": 2, "use_gpu": False}})
    assert found.plan.max_lanes == 20
    assert any("each 2 workers of 1 CPU;" in line for line in found.lines())


def test_lanes_are_those_of_the_running_sweep() -> None:
    assert lanes_for("auto", 5, 3) == 3
    assert lanes_for("auto", 5, 30) == 5
    assert lanes_for("auto", 5, None) == 5
    assert lanes_for("auto", 0, 3) == 1  # nodes may still be on their way
    assert lanes_for(4, 5, 3) == 4
    with pytest.raises(ConfigError, match="lanes"):
        lanes_for(6, 5, 30)


def test_the_command_prints_the_plan_and_starts_nothing(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, cluster = write(user, {}, {})
    assert main(["plan", file, "--cluster", cluster, "--minutes_per_trial", "30", "--lanes", "5"]) == 0
    out = capsys.readouterr().out
    assert "many on lab (aws, us-east-1)" in out
    assert "trials       10" in out
    assert "lanes        5, each 2 workers of 1 CPU and 1 GPU; 2 trials one after the other" in out
    assert f"USD          {HEAD_USD + 5 * NODE_USD:.2f}" in out
    assert not (user / "results").exists()


def test_the_plan_as_json(user: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, cluster = write(user, {}, {})
    assert main(["plan", file, "--cluster", cluster, "--minutes-per-trial", "30", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["trials"], found["time_s"]) == (10, 2 * 30 * 60)
    assert found["usd"] == pytest.approx(HEAD_USD + 5 * NODE_USD)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--cluster", "cluster.yaml"], "`SWEEP.yaml` is required"),
        (["sweep.yaml"], "`--cluster` is required"),
        (["sweep.yaml", "--cluster", "none.yaml"], "does not exist"),
        (
            ["sweep.yaml", "--cluster", "cluster.yaml", "--minutes_per_trial", "0"],
            "`--minutes-per-trial` is 0, but must be greater than 0",
        ),
        (
            ["sweep.yaml", "--cluster", "cluster.yaml", "--minutes_per_trial", "soon"],
            '`--minutes-per-trial` is "soon", but must be a number',
        ),
        (["sweep.yaml", "--cluster", "cluster.yaml", "--lanes", "9"], "at most the 5 worker groups"),
        (["sweep.yaml", "--cluster", "cluster.yaml", "--minuts_per_trial", "5"], "did you mean `--minutes-per-trial`?"),
    ],
)
def test_the_command_says_what_is_wrong_with_exit_code_2(
    user: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    write(user, {}, {})
    assert main(["plan", *args]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("aws", 0, "lanes        8, each 1 worker of 1 CPU and 1 GPU"),
        ("kuberay", 0, "8 GPUs, unknown USD/hour"),
        ("onprem", 2, "`resources of a worker` is not known before the node is up"),
    ],
)
def test_the_digits_sweep_on_the_shipped_cluster_files(
    name: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, cluster = REPOSITORY / "examples/digits/sweep.yaml", REPOSITORY / f"cluster/{name}.yaml"
    assert main(["plan", str(sweep), "--cluster", str(cluster)]) == code
    shown = capsys.readouterr()
    assert words in shown.out + shown.err


@pytest.mark.parametrize(
    ("sweep", "is_independent", "total"),
    [
        ({}, True, 10),
        ({"search": "random", "budget": {"trials": 4}}, True, 4),
        ({"search": "optuna", "budget": {"trials": 4}}, False, 4),
    ],
)
def test_one_plan_says_what_the_live_sweep_runs_on(
    user: Path, sweep: dict[str, Any], is_independent: bool, total: int
) -> None:
    if sweep.get("search") == "optuna":
        pytest.importorskip("optuna")
    file, _ = write(user, {"usd_per_hour": 6.0} | sweep, {})
    spec = read_sweep(file, {}, own_workers=False)
    up, at_most = [{"CPU": 4.0}], [{"CPU": 4.0}] * 3  # two workers a lane: two lanes now, four more with two nodes
    found = SweepPlan.make(spec, up, at_most, use_gpu=False)
    assert (found.is_independent, found.num_trials) == (is_independent, total)
    assert (found.max_lanes, found.num_lanes) == (6, min(6, found.num_trials))
    assert found.num_at_once == found.num_lanes, "some of them wait for a node"
    assert found.lane_usd_per_hour == 6.0 / found.num_lanes
    assert found.precisions == (("fp32", "bf16") if "space" not in sweep else (found.train.precision,))


@pytest.mark.parametrize(
    ("count", "fits", "cpus", "workers", "expected"),
    [
        (2, 2, [2], 1, 1),  # two cores: one after the other
        (2, 2, [0, 2, 2], 1, 2),  # two nodes beside a head
        (8, 8, [16], 1, 4),
        (8, 8, [4, 96, 96], 1, 49),  # more than there are: all
        (4, 4, [96], 8, 5),
        (4, 4, [16], 8, 1),
        (2, 2, [4] * 8, 4, 3),
        (6, 2, [2], 1, 6),  # four wait for a node that only their waiting brings
    ],
)
def test_lanes_that_would_slow_each_other_start_in_turn(
    count: int, fits: int, cpus: list[float], workers: int, expected: int
) -> None:
    assert starts_at_once(count, fits, cpus, workers) == expected
