"""One command line for all doors: the same help, the same options, and one
sentence for every mistake.
"""

import io
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

import cluster.__main__
import trainers.__main__
import tune.__main__
from trainers.command_line import Command, run
from trainers.config import TrainConfig
from trainers.errors import ConfigError, RunFailedError
from trainers.output import TORCHRUN

DOORS = {
    "trainers": trainers.__main__.main,
    "tune": tune.__main__.main,
    "cluster": cluster.__main__.main,
}
COMMANDS = [
    # door, command, what it needs, an option with a typing error, what it
    # should have been, an option with a value
    ("trainers", [], ["train.yaml"], "--frsh", "--fresh", "--seed"),
    ("trainers", ["evaluate"], ["run"], "--splt", "--split", "--split"),
    (
        "trainers",
        ["predict"],
        ["run", "--out=x.parquet"],
        "--checkpont",
        "--checkpoint",
        "--out",
    ),
    (
        "trainers",
        ["export"],
        ["run", "--out=x.safetensors"],
        "--chekpoint",
        "--checkpoint",
        "--checkpoint",
    ),
    ("tune", [], ["sweep.yaml"], "--no_chck", "--no-check", "--train.seed"),
    ("tune", ["resume"], ["sweep"], "--no-chek", "--no-check", None),
    ("tune", ["watch"], ["sweep"], "--prt", "--port", "--port"),
    (
        "tune",
        ["plan"],
        ["sweep.yaml", "--cluster=c"],
        "--minuts_per_trial",
        "--minutes-per-trial",
        "--cluster",
    ),
    ("cluster", ["validate"], ["a.yaml"], "--stict", "--strict", None),
    (
        "cluster",
        ["check"],
        [],
        "--storage-pth",
        "--storage-path",
        "--storage-path",
    ),
]
each_command = pytest.mark.parametrize(
    ("door", "command", "needs", "mistyped", "meant", "valued"),
    COMMANDS,
    ids=lambda value: str(value)[:24],
)
Told = Callable[..., str]


@pytest.fixture
def told(capsys):
    """What a command that is typed wrong says: one sentence on standard error,
    with exit code 2.
    """

    def run(door, *args):
        assert DOORS[door](list(args)) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        assert line.startswith("error: command line: `")
        return line

    return run


@each_command
def test_help_and_mistakes(
    door, command, needs, mistyped, meant, valued,
    told, capsys,
):  # fmt: skip
    call = " ".join(["python -m", door, *command])
    for args in (
        [*command, "--help"],
        [*command, "-h"],
        [*command, *needs, "--help"],
    ):
        assert DOORS[door](args) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        assert f"usage: {call} " in shown.out
        assert "Exit codes: 0 " in shown.out
        assert meant is None or f"  {meant}" in shown.out
        assert max(map(len, shown.out.splitlines())) <= 120
    sentence = told(door, *command, *needs, mistyped, "1")
    assert f"`{mistyped}` is not an option of `{call}`" in sentence
    assert meant is None or sentence.endswith(f"did you mean `{meant}`?")
    assert f"`-x` is not an option of `{call}`" in told(
        door, *command, *needs, "-x"
    )
    if valued is not None:
        for args in ([valued], [valued, "--help-me"]):
            assert (
                f"`{valued}` needs a value; write `{valued} VALUE`."
                in told(door, *command, *needs, *args)
            )
    if command != ["validate"]:
        assert f"`surplus` is one argument too many for `{call}`" in told(
            door, *command, *needs, "surplus"
        )
    if needs:
        assert "is required" in told(
            door, *command, *needs[1:], *(["--fresh"] if not command else [])
        )


@pytest.mark.parametrize(
    ("door", "args", "words"),
    [
        (
            "cluster",
            ["validat", "x"],
            "`validat` is not a command of `python -m cluster`; did you mean `validate`?",
        ),
        (
            "cluster",
            ["--strict"],
            "use one of validate, check, watch, autoscale",
        ),
        (
            "trainers",
            ["evalute", "results/digits"],
            "did you mean `evaluate`?",
        ),
        ("tune", ["resum", "results/sweep"], "did you mean `resume`?"),
        ("tune", ["plna", "sweep.yaml"], "did you mean `plan`?"),
    ],
)
def test_a_command_that_does_not_exist(door, args, words, told):
    assert words in told(door, *args)


def example(
    file: str,
    overrides: dict[str, Any],
    *,
    checkpoint: str = "newest",
    out: str = "",
    wait_s: float = 0.5,
    count: int | None = None,
    strict: bool = False,
    price: tuple[str, ...] = (),
) -> int:
    """Do nothing."""
    return 0


def parse(*args):
    return Command("example", example, TrainConfig).parse(args)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], {}),
        (["--out", "1e3"], {"out": "1e3"}),
        (["--out=a=b"], {"out": "a=b"}),
        (["--out=--wait-s"], {"out": "--wait-s"}),
        (["--out", "a", "--out", "b"], {"out": "b"}),
        (["--wait-s", "1e2"], {"wait_s": 100.0}),
        (["--wait_s=2"], {"wait_s": 2.0}),
        (["--count", "-3"], {"count": -3}),
        (["--count", "null"], {"count": None}),
        (["--strict"], {"strict": True}),
        (["--strict=false"], {"strict": False}),
        (["--price", "a=1", "--price=b=2"], {"price": ("a=1", "b=2")}),
    ],
)
def test_options_are_read(args, expected):
    defaults = {
        "checkpoint": "newest",
        "out": "",
        "wait_s": 0.5,
        "count": None,
        "strict": False,
        "price": (),
        "overrides": {},
    }
    for typed in (["f", *args], [*args, "f"]):
        assert parse(*typed) == {**defaults, "file": "f", **expected}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--seed=1"], {"seed": 1}),
        (["--optimizer.lr", "1e-3"], {"optimizer.lr": 1e-3}),
        (["--compile=off"], {"compile": "off"}),
        (["--seed", "-1e-3", "--epochs=-2"], {"seed": -1e-3, "epochs": -2}),
        (["--task_args.x", "[1, 2]"], {"task_args.x": [1, 2]}),
        (["--task_args={x: 1}"], {"task_args": {"x": 1}}),
        (["--task_args.x", '"#f00"'], {"task_args.x": "#f00"}),
        (["--task_args.x", "'a #1' # b"], {"task_args.x": "a #1"}),
        (["--task_args.x", "a#1"], {"task_args.x": "a#1"}),
        (["--task_args.x", "1 # one"], {"task_args.x": 1}),
        (["--task_args.x", "null # none"], {"task_args.x": None}),
        (["--name="], {"name": None}),
        (["--name", ""], {"name": None}),
        (["--name", "two words"], {"name": "two words"}),
        (
            ["--storage-path", "s3://bucket/x"],
            {"storage_path": "s3://bucket/x"},
        ),
        (["--scaling.num-workers", "2"], {"scaling.num_workers": 2}),
        (["--task-args.my-key", "2"], {"task_args.my-key": 2}),
        (["--seed", "1", "--seed", "2"], {"seed": 2}),
        (
            ["--checkpoint.every-s", "1"],
            {"checkpoint.every_s": 1},
        ),  # beside an option `--checkpoint`
        (["--sede", "1"], {"sede": 1}),  # TrainConfig says what is near
    ],
)
def test_keys_of_the_configuration_are_read(args, expected):
    assert parse("f", *args)["overrides"] == expected


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--seed", "--name", "1"], "`--seed` needs a value"),
        (["-seed", "1"], "`-seed` is not an option"),
        (["--"], "`--` is not an option"),
        (["--seed", "1", "stray"], "`stray` is one argument too many"),
        (["--seed", "[1"], "--seed"),
        (["--task_args.x", "#f00"], "--task_args.x: `#f00` has a `#`"),
        (["--storage_path", "runs #2"], "`runs #2` has a `#`"),
        (["--task_args.x", "!!python/object/apply:os.system [x]"], "python"),
        (
            ["--count", "2.5"],
            "`count: 2.5` must be a whole number; write a valid `count`.",
        ),
        (["--wait-s", "soon"], '`wait_s: "soon"` must be a number'),
        (
            ["--strict=perhaps"],
            '`strict: "perhaps"` must be true or false',
        ),
    ],
)
def test_what_is_no_option_is_a_config_error(args, words):
    with pytest.raises(ConfigError) as raised:
        parse("f", *args)
    assert words in str(raised.value)
    assert "command line" in str(raised.value)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (TORCHRUN, "^$"),
        ({"RANK"}, "`the file` is not there"),
        (TORCHRUN - {"LOCAL_RANK"}, "`LOCAL_RANK` is not set, unlike RANK"),
    ],
)
def test_an_error_is_said_once_for_all_of_torchruns_workers(
    names, said, monkeypatch, capsys
):
    """And of nothing else: not with a lone RANK, nor if another launcher set it."""
    for name in names:
        monkeypatch.setenv(name, "1")
    assert trainers.__main__.main(["nosuch.yaml"]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_each_of_torchruns_workers_says_its_own_failure(monkeypatch, capsys):
    def fails(*_):
        raise RunFailedError(
            "error", "rank 1: ValueError: it is bad (task.py:3)"
        )

    for name in TORCHRUN:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(trainers.__main__, "read_run", fails)
    assert trainers.__main__.main(["train.yaml"]) == 1
    assert capsys.readouterr().err.startswith(
        "error: the run ended as `error`: rank 1: ValueError: it is bad"
    )


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["paceline-train", "train.yaml"])
    monkeypatch.setattr(trainers.__main__, "read_run", interrupted)
    assert trainers.__main__.main() == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_what_nobody_has_foreseen_ends_in_a_sentence_too(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise LookupError("no such host\nin the task's constructor")

    monkeypatch.setattr(trainers.__main__, "read_run", fail)
    assert trainers.__main__.main(["train.yaml"]) == 1
    *trace, sentence = capsys.readouterr().err.strip().splitlines()
    assert trace[0].startswith("Traceback")
    assert sentence == "error: LookupError: no such host"


def test_what_an_encoding_has_not_ends_no_command(monkeypatch):
    def say():
        """Say it."""
        print("größer", flush=True)
        return 0

    shown = io.BytesIO()
    monkeypatch.setattr(
        sys, "stdout", io.TextIOWrapper(shown, encoding="ascii")
    )
    assert run("python -m say", "It says.", {"say": say}, ["say"]) == 0
    assert shown.getvalue() == b"gr\\xf6\\xdfer\n"
