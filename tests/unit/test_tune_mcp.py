"""What an agent is told, and that its mistakes are told in sentences."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from tests.specs import REPOSITORY
from tests.unit.report_records import config, done, failed
from trainers.config.yaml import dump_yaml
from trainers.storage import Storage
from tune.__main__ import main
from tune.mcp import Limits, make_server
from tune.sweeps.spec import prepare, read_sweep
from tune.sweeps.steer import order_extension
from tune.trials.journal import Journal

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
                return result.is_error, said if result.is_error else json.loads(said)

        return anyio.run(ask)

    return call


@pytest.fixture
def swept(tmp_path):
    """A sweep whose trials have ended, some of them badly."""
    storage = Storage(str(tmp_path / "digits-sweep"))
    saved = config().model_dump(mode="json", exclude_none=True)
    storage.write("sweep.yaml", dump_yaml(saved).encode())
    for record in [*done(), *failed()[:2]]:
        Journal(storage).append(record)
    return storage.uri


def budget(trials=8, usd=0.5, **more):
    return {"budget.trials": trials, "budget.usd": usd, **more}


MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, "is no tool of this server"),
    ("strat", {}, "its tools are validate, plan, start"),
    ("_run", {}, "is no tool of this server"),
    ("__init__", {}, "is no tool of this server"),
    ("\x00", {}, "is no tool of this server"),
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
    ("validate", {"sweep": CLUSTER}, "there is no such key"),
    ("validate", {"sweep": SWEEP, "swep": 1}, "did you mean `sweep`?"),
    ("validate", {"sweep": SWEEP, "settings": 3}, "must be a mapping"),
    ("validate", {"sweep": SWEEP, "settings": {"lanes": -1}}, "at least 1"),
    ("validate", {"sweep": SWEEP, "settings": {"lans": 1}}, "did you mean `lanes`?"),
    ("validate", {"sweep": SWEEP, "settings": {"": 1}}, "no such key"),
    ("validate", {"sweep": SWEEP, "settings": {"space.lr": [1]}}, "space.lr"),
    ("validate", {"sweep": SWEEP, "settings": {"train.epochs": "ten"}}, "epochs"),
    ("validate", {"sweep": SWEEP, "settings": {"train": 7}}, "train"),
    ("plan", {"sweep": SWEEP}, "`cluster` is required"),
    ("plan", {"sweep": SWEEP, "cluster": SWEEP}, "sweep.yaml"),
    (
        "plan",
        {"sweep": SWEEP, "cluster": CLUSTER, "minutes_per_trial": 0},
        "greater than 0",
    ),
    ("start", {"sweep": SWEEP}, "`budget.usd` must be at most 1"),
    ("start", {"sweep": SWEEP, "settings": budget(usd=1.5)}, "`budget.usd` is 1.5"),
    ("start", {"sweep": SWEEP, "settings": budget(usd="1")}, "must be a number"),
    ("start", {"sweep": SWEEP, "settings": budget(usd=float("nan"))}, "budget.usd"),
    (
        "start",
        {
            "sweep": SWEEP,
            "settings": budget(12, **{"space.global_batch_size": [*range(8, 17)]}),
        },
        "`budget.trials` is 12, but must be at most 8",
    ),
    (
        "start",
        {"sweep": SWEEP, "settings": {"budget.usd": 1, "space.optimizer.lr": "around"}},
        "`budget.trials` must be at most 8",
    ),
    ("start", {"sweep": SWEEP, "settings": budget(fresh=True)}, "no such key"),
    ("extend", {"directory": "nowhere"}, "holds no sweep"),
    ("extend", {"directory": SWEEP}, "holds no sweep"),
    ("stop", {"directory": "nowhere"}, "is no sweep that this server runs"),
    ("stop", {"directory": "nowhere", "trial": "1"}, "holds no sweep"),
    ("explain", {"directory": "nowhere"}, "`trial` is required"),
    ("explain", {"directory": "SWEPT", "trial": "zzz"}, "is no trial of this sweep"),
    ("explain", {"directory": "SWEPT", "trial": ""}, "`TRIAL` is needed"),
    ("answer", {"directory": "nowhere"}, "holds no sweep"),
    ("watch", {"directory": "ftp://host/x"}, "ftp"),
]


def test_what_is_malformed_is_answered_with_a_sentence(swept):
    """By another process: its standard output has nothing but the protocol."""

    async def ask():
        async with Client(SERVER) as client:
            for tool, given, words in MALFORMED:
                arguments = json.loads(json.dumps(given).replace("SWEPT", swept))
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


def test_a_sweep_that_was_extended_is_not_started_as_it_was(tmp_path):
    """The extension is to come, with what it was granted."""
    settings = {"storage_path": str(tmp_path), "budget.usd": 0.5, "usd_per_hour": 0.5}
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
    assert any(words.startswith("how far another run") for words in found["not_known"])
    _, seen = call("watch", directory=swept)
    assert seen["state"] == "cut"
    assert seen["so_far"]["best"] == found["best"]


def test_a_failed_trial_is_explained(swept, call):
    for record in failed()[:2]:
        _, said = call("explain", directory=swept, trial=record.id[:10])
        assert said["said"].startswith(f"{record.id} ended as {record.status}")
        assert said["trial"]["traceback"] == record.traceback
        assert said["advice"]
        assert said["not_known"]
