"""What an agent is told, and that its mistakes are told in sentences."""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from subprocess import Popen
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from tests.specs import REPOSITORY
from tests.unit.report_records import config, done, failed
from tests.unit.test_extension import NEVER, begin, record
from tests.waits import HANG_S
from trainers.config.yaml import dump_yaml, parse_typed
from trainers.lease import LEASE, Holder
from trainers.storage import Storage
from tune import mcp as served
from tune.__main__ import main
from tune.mcp import Limits, Tools, make_server
from tune.sweeps.spec import prepare, read_sweep
from tune.sweeps.steer import order_extension
from tune.trials.journal import Journal, Live, Running, write_live
from tune.trials.record import trial_id

SWEEP = str(REPOSITORY / "examples/digits/sweep.yaml")
CLUSTER = str(REPOSITORY / "cluster/aws.yaml")
LIMITS = "--allow-run --max-trials 8 --max-usd 1 --usd-per-hour 0.5"
SERVER = StdioServerParameters(
    command=sys.executable,
    args=["-m", "tune", "mcp", *LIMITS.split()],
    env=dict(os.environ),
    cwd=REPOSITORY,
)
Call = Callable[..., tuple[bool, Any]]


@pytest.fixture
def call():
    """Calls a tool of a server that may run nothing: whether it failed, what it said."""

    def call(tool, **arguments):
        async def ask():
            async with Client(make_server(None)) as client:
                result = await client.call_tool(tool, arguments)
                said = result.content[0].text
                return (
                    result.is_error,
                    said if result.is_error else json.loads(said),
                )

        return anyio.run(ask)

    return call


@pytest.fixture
def swept(tmp_path):
    """A sweep whose trials have ended, some of them badly."""
    storage = Storage(tmp_path / "digits-sweep")
    saved = config().model_dump(mode="json", exclude_none=True)
    storage.write("sweep.yaml", dump_yaml(saved).encode())
    for trial in [*done(), *failed()[:2]]:
        Journal(storage).append(trial)
    return storage.uri


@pytest.fixture
def commands(monkeypatch):
    """The commands of the sweeps that are started: each only waits to be stopped."""
    found: list[list[str]] = []
    started: list[Popen[bytes]] = []

    def start(command, *options, **more):
        found.append(command)
        started.append(Popen(["sleep", "infinity"], *options, **more))
        return started[-1]

    monkeypatch.setattr(served, "Popen", start)
    yield found
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def ended(tmp_path):
    """The directory of a sweep that has ended, and that can be extended."""
    spec = begin(tmp_path, space={"global_batch_size": [8]})
    Journal(spec.storage).append(record({"global_batch_size": 8}, NEVER))
    write_live(spec.storage, Live("ended"))
    return spec.uri


def budget(trials=8, usd=0.5, **more):
    return {"budget.trials": trials, "budget.usd": usd, **more}


MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, "is not a tool of this server"),
    ("strat", {}, "its tools are validate, plan, start"),
    ("_run", {}, "is not a tool of this server"),
    ("__init__", {}, "is not a tool of this server"),
    ("\x00", {}, "is not a tool of this server"),
    ("validate", {}, "`sweep` is required"),
    ("validate", {"sweep": None}, "must be text"),
    ("validate", {"sweep": 3}, "must be text"),
    ("validate", {"sweep": ["a"]}, "must be text"),
    ("validate", {"sweep": "nowhere.yaml"}, "is not there"),
    ("validate", {"sweep": ""}, "the file"),
    ("validate", {"sweep": "/"}, "/"),
    ("validate", {"sweep": "\x00"}, "null"),
    ("validate", {"sweep": "x" * 5000}, "too long"),
    ("validate", {"sweep": "ftp://host/x.yaml"}, "ftp"),
    ("validate", {"sweep": CLUSTER}, "is not a known key"),
    ("validate", {"sweep": SWEEP, "swep": 1}, "did you mean `sweep`?"),
    ("validate", {"sweep": SWEEP, "settings": 3}, "must be a mapping"),
    ("validate", {"sweep": SWEEP, "settings": {"lanes": -1}}, "at least 1"),
    (
        "validate",
        {"sweep": SWEEP, "settings": {"lans": 1}},
        "did you mean `lanes`?",
    ),
    ("validate", {"sweep": SWEEP, "settings": {"": 1}}, "not a known key"),
    ("validate", {"sweep": SWEEP, "settings": {"space.lr": [1]}}, "space.lr"),
    (
        "validate",
        {"sweep": SWEEP, "settings": {"train.epochs": "ten"}},
        "epochs",
    ),
    ("validate", {"sweep": SWEEP, "settings": {"train": 7}}, "train"),
    ("plan", {"sweep": SWEEP}, "`cluster` is required"),
    ("plan", {"sweep": SWEEP, "cluster": SWEEP}, "sweep.yaml"),
    (
        "plan",
        {"sweep": SWEEP, "cluster": CLUSTER, "minutes_per_trial": 0},
        "greater than 0",
    ),
    ("start", {"sweep": SWEEP}, "`budget.usd` must be at most 1"),
    (
        "start",
        {"sweep": SWEEP, "settings": budget(usd=1.5)},
        "`budget.usd: 1.5`",
    ),
    (
        "start",
        {"sweep": SWEEP, "settings": budget(usd="1")},
        "must be a number",
    ),
    (
        "start",
        {"sweep": SWEEP, "settings": budget(usd=float("nan"))},
        "budget.usd",
    ),
    (
        "start",
        {
            "sweep": SWEEP,
            "settings": budget(
                12, **{"space.global_batch_size": [*range(8, 17)]}
            ),
        },
        "`budget.trials: 12` must be at most 8",
    ),
    (
        "start",
        {
            "sweep": SWEEP,
            "settings": {"budget.usd": 1, "space.optimizer.lr": "around"},
        },
        "`budget.trials` must be at most 8",
    ),
    (
        "start",
        {"sweep": SWEEP, "settings": budget(fresh=True)},
        "not a known key",
    ),
    ("extend", {"directory": "nowhere"}, "holds no sweep"),
    ("extend", {"directory": SWEEP}, "holds no sweep"),
    ("stop", {"directory": "nowhere"}, "is not a sweep that this server runs"),
    ("stop", {"directory": "nowhere", "trial": "1"}, "holds no sweep"),
    ("explain", {"directory": "nowhere"}, "`trial` is required"),
    (
        "explain",
        {"directory": "SWEPT", "trial": "zzz"},
        "is not a trial of this sweep",
    ),
    ("explain", {"directory": "SWEPT", "trial": ""}, "`TRIAL` is needed"),
    ("answer", {"directory": "nowhere"}, "holds no sweep"),
    ("watch", {"directory": "ftp://host/x"}, "ftp"),
]


def test_what_is_malformed_is_answered_with_a_sentence(swept):
    """By another process: its standard output has nothing but the protocol."""

    async def ask():
        async with Client(SERVER) as client:
            for tool, given, words in MALFORMED:
                arguments = json.loads(
                    json.dumps(given).replace("SWEPT", swept)
                )
                result = await client.call_tool(tool, arguments)
                said = result.content[0].text
                assert result.is_error, (tool, arguments)
                assert words in said, (tool, given, said)
                assert "Traceback" not in said
                assert 'File "' not in said
                assert "pydantic" not in said

    assert len(MALFORMED) >= 40
    anyio.run(ask)


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        ("start", {"sweep": SWEEP, "settings": budget()}),
        ("extend", {"directory": "nowhere"}),
        ("stop", {"directory": "nowhere"}),
    ],
)
def test_without_leave_nothing_is_run(tool, given, call):
    is_error, said = call(tool, **given)
    assert is_error
    assert said.startswith("`--allow-run` was not given to this server")


def test_settings_reach_the_sweep_as_they_were_given(commands, tmp_path):
    note = "gut \N{GRINNING FACE}\x7f # off"
    settings = {
        "train.task_args.note": note,
        "storage_path": str(tmp_path),
        "budget.usd": 0.5,
    }
    Tools(Limits(99, 1.0, 0.5)).start(SWEEP, settings)
    option = commands[0][4]
    assert parse_typed(option.partition("=")[2], "f") == note


def test_a_sweep_that_was_extended_is_not_started_as_it_was(tmp_path):
    """The extension is to come, with what it was granted."""
    settings = {
        "storage_path": str(tmp_path),
        "budget.usd": 0.5,
        "usd_per_hour": 0.5,
    }
    spec = read_sweep(SWEEP, settings)
    prepare(spec, fresh=False)
    order_extension(spec.uri, {"train.epochs": 99})

    async def ask():
        async with Client(make_server(Limits(99, 1.0, 0.5))) as client:
            given = {"sweep": SWEEP, "settings": settings}
            return await client.call_tool("start", given)

    result = anyio.run(ask)
    assert result.is_error
    said = result.content[0].text
    assert "was extended" in said
    assert f"call `extend` with {spec.uri}" in said


def test_limits_and_the_leave_to_run_come_together(capsys):
    for args in (
        ["--allow-run"],
        ["--max-trials", "3"],
        ["--allow-run", "--max-trials", "3", "--max-usd", "1"],
    ):
        assert main(["mcp", *args]) == 2
        assert "give all four of them, or none" in capsys.readouterr().err


def test_plans_and_answers_say_what_is_not_known(swept, call, tmp_path):
    # A sweep of that name may lie in results/: `make sweep` has left it.
    settings = {"storage_path": str(tmp_path / "planned")}
    _, checked = call("validate", sweep=SWEEP)
    assert (checked["trials"], checked["not_known"][0][:7]) == (8, "whether")
    _, planned = call("plan", sweep=SWEEP, cluster=CLUSTER, settings=settings)
    assert planned["expected"] == {"trials": 8, "time_s": None, "usd": None}
    assert planned["not_known"] == ["time_s", "usd"]
    _, found = call("answer", directory=swept)
    assert found["answer"] in found["said"]
    assert found["time_to_target_s"] is None
    assert any(
        words.startswith("how much another run")
        for words in found["not_known"]
    )
    _, seen = call("watch", directory=swept)
    assert seen["state"] == "cut"
    assert seen["so_far"]["best"] == found["best"]


def test_a_failed_trial_is_explained(swept, call):
    for failure in failed()[:2]:
        _, said = call("explain", directory=swept, trial=failure.id[:10])
        assert said["said"].startswith(
            f"{failure.id} ended as {failure.status}"
        )
        assert said["trial"]["traceback"] == failure.traceback
        assert said["advice"]
        assert said["not_known"]


def test_a_sweep_whose_process_has_no_lease_yet_has_not_ended(ended, commands):
    tools = Tools(Limits(8, 1.0, 0.5))
    assert tools.watch(ended)["state"] == "ended"
    tools.extend(ended, {"budget.usd": 0.5, "train.epochs": 8})
    seen = tools.watch(ended)
    assert len(commands) == 1
    assert (seen["state"], "process" in seen) == ("running", False)
    assert "starts or ends now" in seen["said"]
    assert seen["not_known"] == ["the results of trials that have not ended"]


def test_a_sweep_is_stopped_by_any_spelling_of_its_directory(ended, commands):
    for spelling in ("{}/", "file://{}", "file://{}/"):
        tools = Tools(Limits(8, 1.0, 0.5))
        tools.extend(ended, {"budget.usd": 0.5})
        assert tools.watch(spelling.format(ended))["state"] == "running"
        tools.stop(spelling.format(ended))
        process, _ = tools._processes[ended]
        assert process.wait(HANG_S) == -signal.SIGTERM
        seen = tools.watch(spelling.format(ended))
        assert seen["process"]["exit_code"] == -signal.SIGTERM
    assert len(commands) == 3


def test_a_sweep_of_the_home_is_extended_there(
    ended, commands, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    tools = Tools(Limits(8, 1.0, 0.5))
    tools.extend("~/many", {"budget.usd": 0.5})
    assert commands[0][3] == ended


def test_a_trial_that_has_not_ended_is_explained(tmp_path, call):
    spec = begin(tmp_path)
    for size, status in ((8, "running"), (16, "waiting")):
        trial = {"global_batch_size": size}
        name = trial_id(trial)
        if status == "running":
            run = Running(name, 0, 1.0, trial)
            spec.storage.write(LEASE, Holder.this_process().write())
            write_live(spec.storage, Live("running", 2, 1, [run]))
        _, said = call("explain", directory=spec.uri, trial=name)
        assert said["said"] == f"{name} has not ended: it is {status}"
        assert said["trial"] == {"config": trial, "status": status}
        assert said["not_known"] == [f"how {name} will end"]


def test_where_a_trial_hung_is_in_its_record(tmp_path, call):
    spec = begin(tmp_path)
    hung = record({"global_batch_size": 8}, NEVER, status="hung")
    Journal(spec.storage).append(hung)
    _, said = call("explain", directory=spec.uri, trial=hung.id)
    assert "hangs/" not in said["advice"]
    assert "`traceback`" in said["advice"]


def test_a_sweep_that_was_killed_has_no_trial_that_runs(tmp_path, call):
    spec = begin(tmp_path)
    killed = replace(Holder.this_process(), pid=2**22 + 1)
    spec.storage.write(LEASE, killed.write())
    trial = {"global_batch_size": 8}
    run = Running(trial_id(trial), 0, 1.0, trial)
    write_live(spec.storage, Live("running", 2, 1, [run]))
    _, seen = call("watch", directory=spec.uri)
    assert (seen["state"], seen["running"]) == ("cut", [])
