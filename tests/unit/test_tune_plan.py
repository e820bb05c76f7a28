"""The plan of a sweep on a cluster file: lanes, hours and dollars by hand, and
one sentence for what cannot fit.
"""

import json

import pytest

from cluster.files.capacity import load_prices
from cluster.files.ray_up import load_cluster
from tests.specs import REPOSITORY, error_of
from trainers.config.yaml import dump_yaml
from trainers.errors import ConfigError
from tune.__main__ import main
from tune.search.space import open_trials
from tune.sweeps.plan import SweepPlan, lanes_for, make_plan, starts_at_once
from tune.sweeps.spec import prepare, read_sweep
from tune.trials.journal import Journal
from tune.trials.record import Spent, TrialRecord, trial_id

MODULE = "task_of_test_tune_plan"
TRAIN = {
    "task": f"{MODULE}:Mine",
    "epochs": 2,
    "global_batch_size": 8,
    "optimizer": {"lr": 0.1},
    "scaling": {"num_workers": 2},
}
SPACE = {
    "global_batch_size": [8, 16, 32, 64, 128],
    "precision": ["fp32", "bf16"],
}
SWEEP = {
    "name": "many",
    "train": TRAIN,
    "space": SPACE,
    "objective": {"metric": "val_loss"},
}
# A head without CPUs to give, and up to 5 nodes of 2 GPUs: 5 groups of 2
# workers.
HEAD = {"resources": {"CPU": 0}, "node_config": {"InstanceType": "m5.2xlarge"}}
NODE = {
    "resources": {"CPU": 8, "GPU": 2},
    "min_workers": 0,
    "max_workers": 5,
    "node_config": {"InstanceType": "g5.2xlarge"},
}
HEAD_USD, NODE_USD = (
    load_prices("aws", "us-east-1")[name].usd_per_hour
    for name in ("m5.2xlarge", "g5.2xlarge")
)


@pytest.fixture
def user(user, monkeypatch):
    """With a task; it is the working directory, too."""
    (user / f"{MODULE}.py").write_text(
        "from trainers.task import Task\n\nclass Mine(Task):\n    pass\n"
    )
    monkeypatch.chdir(user)
    return user


def write(user, sweep, node):
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


def plan(user, minutes=None, node=None, **sweep):
    file, cluster = write(user, sweep, node or {})
    return make_plan(
        read_sweep(file, {}, own_workers=False), load_cluster(cluster), minutes
    )


def finish(user, seconds, status="done", purpose="trial", spent=None):
    """Trials of the sweep that have ended, after so many seconds each."""
    spec = read_sweep(str(user / "sweep.yaml"), {}, own_workers=False)
    prepare(spec, fresh=False)
    left = open_trials(spec.config, Journal(spec.storage).records())
    for config, time_s in zip(left, seconds, strict=False):
        name = trial_id(config, purpose)
        given = {"purpose": purpose, "spent": spent}
        Journal(spec.storage).append(
            TrialRecord(name, config, status, 1000.0, 1000.0 + time_s, **given)
        )


FIVE_USD = HEAD_USD + 5 * NODE_USD
TWO_USD = HEAD_USD + 2 * NODE_USD
ON_CPU = {"train": TRAIN | {"scaling": {"num_workers": 2, "use_gpu": False}}}
ELASTIC = {"train": TRAIN | {"scaling": {"num_workers": [2, 40]}}}
UNPRICED = {"node_config": {"InstanceType": "x99.huge"}}


@pytest.mark.parametrize(
    (
        "minutes",
        "sweep",
        "node",
        "lanes",
        "trials",
        "usd_per_hour",
        "time_s",
        "words",
    ),
    [
        # Ten trials of half an hour in five lanes.
        (
            30,
            {},
            {},
            (5, 5),
            10,
            FIVE_USD,
            3600,
            "each 2 workers of 1 CPU and 1 GPU;",
        ),
        # Only nodes that the lanes need are paid for, and an idle lane gives
        # nothing.
        (
            60,
            {"lanes": 2},
            {},
            (2, 5),
            10,
            TWO_USD,
            5 * 3600,
            "2 of at most 5",
        ),
        (
            30,
            ELASTIC,
            {},
            (5, 5),
            10,
            FIVE_USD,
            3600,
            "each 2 workers",
        ),  # at least
        (
            30,
            ON_CPU,
            {},
            (10, 20),
            10,
            HEAD_USD + 3 * NODE_USD,
            1800,
            "each 2 workers of 1 CPU;",
        ),
        (
            30,
            {"usd_per_hour": 20.0},
            {},
            (5, 5),
            10,
            20.0,
            3600,
            "USD/hour     20.00 (given: usd_per_hour)",
        ),
        # What is not known is said, and not guessed.
        (
            30,
            {},
            UNPRICED,
            (5, 5),
            10,
            None,
            3600,
            "no price for gpu: give --usd_per_hour",
        ),
        (
            None,
            {"budget": {"usd": 10.0}, "usd_per_hour": 5.0},
            {},
            (5, 5),
            10,
            5.0,
            None,
            "unknown, at most 2 h",
        ),
    ],
)
def test_the_figures_are_those_of_a_calculation_by_hand(
    user, minutes, sweep, node, lanes, trials, usd_per_hour, time_s, words
):
    found = plan(user, minutes, node, **sweep)
    shown = "\n".join(found.lines)
    num_lanes, most = lanes
    of_most = f" of at most {most}" if most > num_lanes else ""
    assert f"lanes        {num_lanes}{of_most}, each" in shown
    assert (found.trials, found.time_s) == (trials, time_s)
    assert found.usd_per_hour == (
        None if usd_per_hour is None else pytest.approx(usd_per_hour)
    )
    known = time_s is not None and usd_per_hour is not None
    assert found.usd == (
        pytest.approx(usd_per_hour * time_s / 3600) if known else None
    )
    assert words in shown


def test_earlier_trials_of_the_same_sweep_tell_the_duration_and_are_not_run_again(
    user,
):
    write(user, {}, {})
    finish(user, [100.0, 200.0, 300.0])
    finish(user, [5.0], "out_of_memory")  # ended early: no measure of a trial
    waited = Spent(
        began=3700.0, starting_s=0.0, training_s=200.0, total_s=200.0
    )
    finish(user, [3900.0], purpose="clone", spent=waited)
    found = plan(user)
    assert (found.trials, found.ended, found.trial_s) == (6, 4, 200.0)
    assert found.time_s == 2 * 200.0
    assert "mean of 4 that ended" in "\n".join(found.lines)
    assert plan(user, minutes=10).trial_s == 600
    with error_of("space"):  # as a start of it
        plan(user, space=SPACE | {"global_batch_size": [256]})


@pytest.mark.parametrize(
    ("budget_s", "within", "time_s"),
    [
        (6000, 6, 6000),
        (5400, 6, 5400),
        (5399.9, 4, 5399.9),
        (60_000, 10, 9000),
    ],
)
def test_a_budget_cuts_the_sweep_off(user, budget_s, within, time_s):
    """Rounds of two trials, half an hour each."""
    found = plan(user, minutes=30, lanes=2, budget={"time_s": budget_s})
    assert found.time_s == time_s
    assert (f"about {within} of 10 trials" in "\n".join(found.lines)) == (
        within < 10
    )


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
    ],
)
def test_a_sweep_that_cannot_fit_is_refused_with_the_reason(
    user, sweep, node, field, words
):
    with pytest.raises(ConfigError) as raised:
        plan(user, 30, node, **sweep)
    (line,) = str(raised.value).splitlines()
    assert f"`{field}: " in line or f"`{field}` " in line
    assert words in line


def test_lanes_are_those_of_the_running_sweep():
    assert lanes_for("auto", 5, 3) == 3
    assert lanes_for("auto", 5, 30) == 5
    assert lanes_for("auto", 0, 3) == 1  # nodes may still be on their way
    assert lanes_for(4, 5, 3) == 4
    with pytest.raises(ConfigError, match="lanes"):
        lanes_for(6, 5, 30)


def test_the_command_prints_the_plan_and_starts_nothing(user, capfd):
    file, cluster = write(user, {}, {})
    given = [
        "plan",
        file,
        "--cluster",
        cluster,
        "--minutes_per_trial",
        "30",
        "--lanes",
        "5",
    ]
    assert main(given) == 0
    out = capfd.readouterr().out
    assert "many on lab (aws, us-east-1)" in out
    assert (
        "lanes        5, each 2 workers of 1 CPU and 1 GPU; 2 trials one after the other"
        in out
    )
    assert main([*given, "--quiet"]) == 0
    assert capfd.readouterr().out == f"USD          {FIVE_USD:.2f}\n"
    assert main([*given, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["trials"], found["time_s"]) == (10, 2 * 30 * 60)
    assert found["usd"] == pytest.approx(FIVE_USD)
    assert not (user / "results").exists()
    assert main([*given, "--minutes_per_trial", "0"]) == 2


def test_a_shipped_cluster_file_that_does_not_say_what_its_nodes_have(capsys):
    sweep = REPOSITORY / "examples/digits/sweep.yaml"
    cluster = REPOSITORY / "cluster/onprem.yaml"
    assert main(["plan", str(sweep), "--cluster", str(cluster)]) == 2
    rule = "`resources of a worker` must say how many CPUs a node has"
    assert rule in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sweep", "is_independent", "total"),
    [
        ({}, True, 10),
        ({"search": "random", "budget": {"trials": 4}}, True, 4),
        ({"search": "optuna", "budget": {"trials": 4}}, False, 4),
    ],
)
def test_one_plan_says_what_the_live_sweep_runs_on(
    user, sweep, is_independent, total
):
    if sweep.get("search") == "optuna":
        pytest.importorskip("optuna")
    file, _ = write(user, {"usd_per_hour": 6.0} | sweep, {})
    spec = read_sweep(file, {}, own_workers=False)
    up, at_most = (
        [{"CPU": 4.0}],
        [{"CPU": 4.0}] * 3,
    )  # two workers a lane: two lanes now, four more with two nodes
    found = SweepPlan.make(spec, up, at_most, use_gpu=False)
    assert (found.is_independent, found.num_trials) == (is_independent, total)
    assert (found.max_lanes, found.num_lanes) == (6, min(6, found.num_trials))
    assert found.num_at_once == found.num_lanes, "some of them wait for a node"
    assert found.lane_usd_per_hour == 6.0 / found.num_lanes
    assert found.precisions == (
        ("fp32", "bf16") if "space" not in sweep else (found.train.precision,)
    )


@pytest.mark.parametrize(
    ("count", "fits", "cpus", "workers", "expected"),
    [
        (2, 2, [2], 1, 1),  # two cores: one after the other
        (2, 2, [0, 2, 2], 1, 2),  # two nodes beside a head
        (2, 2, [4] * 8, 4, 3),
        (
            6,
            2,
            [2],
            1,
            6,
        ),  # four wait for a node that only their waiting brings
    ],
)
def test_lanes_that_would_slow_each_other_start_in_turn(
    count, fits, cpus, workers, expected
):
    assert starts_at_once(count, fits, cpus, workers) == expected
