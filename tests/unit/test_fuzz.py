"""Any input, for every door that reads what somebody else wrote: taken, or
refused in one sentence of ours.

Hypothesis draws the inputs: some dozens a door in the suite, always the same
ones, and thousands in `make faults` (`pytest --hypothesis-profile faults`).
"""

import contextlib
import copy
import io
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import cluster.__main__
from tests.specs import REPOSITORY, read_spec, whole_state
from tests.unit.cluster_files import LOCAL, parent_of, shipped
from tests.unit.report_records import curve, trial
from tests.unit.test_row_shards import cut_large
from trainers.__main__ import train
from trainers.checkpoint._row_shards import write_tensors
from trainers.checkpoint.manifest import Manifest, shard_file
from trainers.checkpoint.store import Archive
from trainers.command_line import Command, entries
from trainers.config import TrainConfig
from trainers.errors import ConfigError, ConfigErrors, PacelineError
from trainers.measure.result import RunResult
from trainers.measure.run_log import RunLog, read_log
from trainers.start import prepare_storage
from trainers.storage import Storage
from tune.config import SweepConfig
from tune.sweeps.spec import read_sweep
from tune.trials.journal import Journal, read_boundary, write_boundary
from tune.trials.microbatch_bounds import Boundary

TRAIN = {
    "task": "tests.tasks:Blobs",
    "task_dir": str(REPOSITORY),
    "epochs": 1,
    "global_batch_size": 8,
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "scaling": {"num_workers": 1},
    "checkpoint": {"every_steps": 5},
    "launcher": "local",
}
SWEEP = {
    "name": "s",
    "train": TRAIN,
    "space": {"global_batch_size": [8, 16], "optimizer.lr": [0.1, 0.2]},
    "objective": {"metric": "val_loss", "target": {"val_loss": 1.0}},
}
DRAWN = SWEEP | {
    "search": "random",
    "space": {"optimizer.lr": {"loguniform": [1e-3, 1e-1]}},
    "budget": {"trials": 3},
}
TRAIN_KEYS = [key for key, _, _ in entries(TrainConfig)] + list(
    TrainConfig.foreign
)
SWEEP_KEYS = [key for key, _, _ in entries(SweepConfig)] + list(
    SweepConfig.foreign
)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@contextlib.contextmanager
def refused_in_one_sentence():
    """An error of ours is one printable line with field, rule and fix; any
    other is the test's failure.
    """
    try:
        yield
    except PacelineError as error:
        for each in (
            error.errors if isinstance(error, ConfigErrors) else [error]
        ):
            assert str(each).isprintable()
            assert 10 < len(str(each)) < 4000
            if isinstance(each, ConfigError):
                assert each.exit_code == 2
                assert each.field
                assert each.rule
                assert each.fix


@contextlib.contextmanager
def door():
    """A new directory, in which an input is read."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        with refused_in_one_sentence():
            yield directory
    finally:
        shutil.rmtree(directory)


def write(directory, data):
    path = directory / "given.yaml"
    path.write_bytes(data)
    return str(path)


# --- what is drawn

# fmt: off
NASTY = [
    0, -1, 2**63, 10**39, 1e308, -1e308, 5e-324, float("inf"), float("nan"), "", " ", "auto", "x" * 300, "a\0b", "a\nb",
    "\ud800", "\udc80", "../..", "/dev/zero", "/dev/stdin", "/", "~nosuch/x", "${HOME}/x", "s3://", "nosuch://x/y",
    "://", "é\u202e\x1b[31m", "null", "1e999", "9" * 5000, "!!python/object/apply:os.system [x]", "*a", "<<", "500m",
    "1:30", "2026-13-45", [], {}, [[]], [None], {"": 1}, {"a": None}, [1, "a", None], list(range(2000)),
]
SNIPPETS = [
    "&a {x: *a}", "&a [*a]", "a: &a {b: {c: *a}}", "x: &a 1\n? *a\n: 2", "a: 1\na: 2", "<<: [1]", "a: &a {<<: *a}",
    "a: !!binary aGk=", "a: !!set {b}", "? {a: b}: c", "a: !!python/object/apply:os.getcwd []", "a: !!timestamp x",
    "a: !!int ''", "a: !!bool x", "a: 2026-99-99", "a: !!omap [b: 1]", 'a: "\\0"', 'a: "\\ud800"', "1: 2", "~: 1",
    "", "\n", "---", "--- \n...\n---", "\ufeffa: 1", "a: b: c", "\t", "%YAML 9.9\n---\na: 1", "@", "`", "a: =",
]
ODD_NAMES = ["", ".", "a..b", "optimizer.", ".lr", "task_args." + "a." * 5000 + "b", "epochs.x", "é", "a\nb"]
# fmt: on
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(NASTY)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
REPEATED = [
    ("a: ", "[", ""),
    ("", "{a: ", "1"),
    ("", "- ", "1"),
    ("", "? ", ""),
    ("a: ", "9", ""),
    ("a: 1e", "9", ""),
    ("a: ", "1:", "1"),
    ("", "--- 1\n", ""),
    ("a: |\n", "  text\n", ""),
]
"""What comes before, what comes again and again, and what comes after."""


def laughs(levels, width):
    """Aliases of aliases: `width` to the power of `levels` values in a few lines."""
    lines = ["a0: &a0 x"] + [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]"
        for n in range(1, levels)
    ]
    return "\n".join(lines)


RAW = st.one_of(
    st.tuples(
        st.sampled_from(REPEATED), st.sampled_from([1, 10, 64, 500, 20_000])
    ).map(lambda drawn: drawn[0][0] + drawn[0][1] * drawn[1] + drawn[0][2]),
    st.tuples(st.integers(1, 40), st.integers(1, 12)).map(
        lambda shape: laughs(*shape)
    ),
    st.sampled_from(SNIPPETS),
)


def paths(tree, prefix=""):
    """The dotted path of every part, of those whose keys have no dots."""
    if isinstance(tree, dict | list):
        for key, part in (
            tree.items() if isinstance(tree, dict) else enumerate(tree)
        ):
            if key != "" and "." not in str(key):
                yield f"{prefix}{key}"
                yield from paths(part, f"{prefix}{key}.")


@st.composite
def trees(draw, bases, keys):
    """A good tree with some parts replaced, removed or added."""
    tree = copy.deepcopy(draw(st.sampled_from(bases)))
    for _ in range(draw(st.integers(0, 3))):
        added = (
            draw(st.sampled_from(keys))
            if keys and draw(st.booleans())
            else None
        )
        if added is not None and isinstance(tree, dict):
            tree[added] = copy.deepcopy(draw(VALUES))
            continue
        there = sorted(paths(tree))
        if there:
            parent, key = parent_of(tree, draw(st.sampled_from(there)))
            if draw(st.booleans()):
                parent[key] = copy.deepcopy(draw(VALUES))
            else:
                del parent[key]
    return tree


@st.composite
def damaged(draw, whole):
    """Bytes with some of them changed, or cut."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 1, 8, 64]))
        data[at : at + length] = draw(
            st.binary(max_size=8) | st.just(b"\xff" * 8)
        )
    return bytes(
        data[: draw(st.integers(0, len(data)))]
        if draw(st.booleans())
        else data
    )


def dump(tree):
    return str(yaml.safe_dump(tree, sort_keys=False)).encode(
        errors="surrogatepass"
    )


def files(bases, keys=None):
    """What somebody may have in a YAML file that should hold one of `bases`."""
    good = trees(bases, keys or []).map(dump)
    raw = RAW.map(lambda text: text.encode(errors="surrogatepass"))
    return st.one_of(good, good, raw, damaged(good), st.binary(max_size=40))


# --- files and commands of users


@given(files([TRAIN], TRAIN_KEYS))
def test_train_yaml(data):
    with door() as directory:
        read_spec(write(directory, data), {})


@given(files([SWEEP, DRAWN], SWEEP_KEYS))
def test_sweep_yaml(data):
    with door() as directory:
        read_sweep(write(directory, data), {})


NAMES = st.sampled_from(TRAIN_KEYS + ODD_NAMES) | st.text(max_size=12)
TYPED = (
    VALUES.map(
        lambda value: str(yaml.safe_dump(value, default_flow_style=True))
    )
    | RAW
    | st.text(max_size=20)
)


@given(st.lists(st.tuples(NAMES, TYPED, st.booleans()), max_size=4))
def test_overrides(options):
    words = [
        [f"--{name}={value}"] if joined else [f"--{name}", value]
        for name, value, joined in options
    ]
    # What a shell can pass on: bytes without NUL.
    typed = [
        os.fsdecode(word.encode(errors="surrogatepass")).replace("\0", "")
        for each in words
        for word in each
    ]
    with door() as directory:
        file = write(directory, dump(TRAIN))
        read_spec(
            file,
            Command("python -m trainers", train, TrainConfig).parse(
                [file, *typed]
            )["overrides"],
        )


CLUSTERS = [LOCAL, *map(shipped, ("aws", "gcp", "azure", "onprem"))]


@given(files(CLUSTERS))
def test_cluster_files(data):
    out = io.StringIO()
    err = io.StringIO()
    with (
        door() as directory,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = cluster.__main__.main(["validate", write(directory, data)])
    lines = err.getvalue().splitlines()
    assert code == (
        2 if any(line.startswith("error: ") for line in lines) else 0
    )
    assert all(
        line.startswith(("error: ", "warning: ")) and line.isprintable()
        for line in lines
    ), lines


# --- data and what is read back from storage


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Two whole checkpoints, the second by rows, a result, a log, a trial, and
    what is known of microbatches.
    """
    directory = tmp_path_factory.mktemp("kept")
    storage = Storage(directory)
    archive = Archive(storage)
    names = ("state.pt", "rank-00000.pt")
    written = {
        name: archive.write("step-000000000001", name, {"x": [1.0, 2]})
        for name in names
    }
    archive.seal(
        Manifest(1, 1, written, {"val_loss": 0.5}, {"torch": "2"}, TRAIN),
        keep=2,
    )
    weights = {
        "model": {"weight": torch.arange(300_000.0), "bias": torch.ones(3)}
    }
    cut = cut_large(weights)
    written = {
        name: archive.write("step-000000000002", name, cut.rest)
        for name in names
    }
    written[shard_file(0)] = archive.write(
        "step-000000000002", shard_file(0), cut.rows, write_tensors
    )
    archive.seal(
        Manifest(2, 1, written, {"val_loss": 0.5}, {"torch": "2"}, TRAIN),
        keep=2,
    )
    storage.write(
        "result.json",
        RunResult("done", 1, 1.0, 1, 8, 8, 1, 0.5, 0.6, 1024)
        .to_json()
        .encode(),
    )
    log = RunLog(storage)
    log.add({"step": 1, "epoch": 1.0, "train_loss": 0.5})
    log.flush(1)
    record = trial(
        1,
        "done",
        {"global_batch_size": 8},
        samples_per_s=9.5,
        curve=curve(0.9, 0.1, 4.0, 8),
    )
    Journal(storage).append(record)
    write_boundary(storage, Boundary())
    return directory


READERS = [
    lambda storage: Archive(storage).choose("newest"),
    lambda storage: Archive(storage).read("step-000000000001", "state.pt"),
    lambda storage: whole_state(storage.uri, 2),
    read_log,
    lambda storage: Journal(storage).records(),
    read_boundary,
]


@pytest.mark.parametrize(
    "pattern", ["checkpoints/*/*", "*.json", "log/*", "trials/*"]
)
@given(data=st.data())
def test_files_of_a_run_or_sweep(pattern, kept, data):
    name = data.draw(
        st.sampled_from(
            sorted(str(path.relative_to(kept)) for path in kept.glob(pattern))
        )
    )
    whole = (kept / name).read_bytes()
    instead = [
        damaged(st.just(whole)),
        st.sampled_from([b"", b"[" * 5000, b"\xff\xfe"]),
    ]
    with contextlib.suppress(ValueError):
        tree = json.loads(
            whole.splitlines()[0] if name.endswith("l") else whole
        )
        instead.append(
            trees([tree], []).map(lambda changed: json.dumps(changed).encode())
        )
    with door() as directory:
        shutil.copytree(kept, directory, dirs_exist_ok=True)
        (directory / name).write_bytes(data.draw(st.one_of(instead)))
        (directory / "config.yaml").write_bytes(dump(TRAIN))
        named = TRAIN | {
            "name": directory.name,
            "storage_path": str(directory.parent),
        }
        spec = read_spec(write(directory, dump(named)), {})
        for read in [*READERS, lambda _: prepare_storage(spec, False)]:
            with refused_in_one_sentence():
                read(Storage(directory))
