"""Anything for every door that reads what somebody else wrote: it is taken, or refused in one sentence of ours.

Run as:
    python -m tests.faults.fuzz [EXAMPLES] [SEED]      (20000, 0; each example at most 1 s of CPU and 300 MB)

tests/unit/test_fuzz.py runs a few examples of each target, always the same ones.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import io
import json
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import hypothesis
import torch
import yaml
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

import cluster.__main__
from tests.specs import REPOSITORY, whole_state
from tests.unit.cluster_files import LOCAL, parent_of, shipped
from trainers.__main__ import train
from trainers.command_line import Command
from trainers.config import TrainConfig
from trainers.config.reference import entries
from trainers.errors import ConfigError, ConfigErrors, PacelineError
from trainers.launch.run_directory import prepare_storage
from trainers.launch.spec import read_spec
from trainers.storage import Storage
from tune.config import SweepConfig
from tune.sweeps.spec import read_sweep

CPU_S, MEMORY_BYTES, HANG_S = 1.0, 300 * 2**20, 60


@dataclass(frozen=True)
class Target:
    """A door, and what is put through it."""

    name: str
    inputs: Callable[[], st.SearchStrategy[Any]]
    act: Callable[[Path, Any], None]
    """Reads the input in an empty directory."""
    share: int
    """Of a thousand examples."""


def judge(target: Target, given: Any) -> None:
    """Put an input through a door; raises AssertionError, or whatever the door raises that is no error of ours."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        target.act(directory, given)
    except PacelineError as error:
        check_sentence(error)
    finally:
        shutil.rmtree(directory)


def check_sentence(error: PacelineError) -> None:
    """One printable line each, that names field, rule and fix; exit code 2 where a value is wrong."""
    for one in error.errors if isinstance(error, ConfigErrors) else [error]:
        text = str(one)
        assert text.isprintable(), text
        assert 10 < len(text) < 4000, text
        if isinstance(one, ConfigError):
            assert one.exit_code == 2
            assert one.field
            assert one.rule
            assert one.fix


# What values are made of: plain ones, and those that have broken readers.

# fmt: off
NASTY = [
    0, -1, 1, 2**31, 2**63, 10**39, -(10**39), 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"),
    "", " ", "auto", "x" * 300, "a\0b", "a\nb", "\ud800", "\udc80", "../..", "/dev/zero", "/dev/stdin",
    "/proc/self/mem", "/", "~", "~nosuch/x", "${HOME}/x",
    "s3://", "file://x", "nosuch://x/y", "://", "é\u202e\x1b[31m", "null", "1e999",
    "9" * 5000, "!!python/object/apply:os.system [x]", "*a", "&a", "<<", "=", "500m", "nan", "2Gi", "1:30",
    "2026-13-45", [], {}, [[]], [None], {"": 1}, {"a": None}, [{}], {"a": {"b": {"c": 1}}},
    [1, "a", None], list(range(2000)), {"x" * 300: "y" * 300},
]
SNIPPETS = [
    "&a {x: *a}", "&a [*a]", "a: &a {b: {c: *a}}", "--- &a 1\n--- &a [*a]\n", "x: &a 1\n? *a\n: 2", "a: 1\na: 2",
    "<<: [1]", "a: &a {<<: *a}", "a: &a {x: 1}\nb: {<<: *a, x: 2}", "a: !!binary aGk=", "a: !!set {b}", "? {a: b}: c",
    "a: !!python/object/apply:os.getcwd []", "a: !!timestamp x", "a: !!int ''", "a: !!int [1]", "a: !!bool x",
    "a: 2026-99-99", "a: 0001-01-01T00:00:00+23:59", "a: !!omap [b: 1]", 'a: "\\0"', 'a: "\\ud800"',
    "1: 2", "~: 1", "!!str",
    "", "\n", "---", "...", "--- \n...\n---", "\ufeffa: 1", "a: b: c", "\t", "%YAML 9.9\n---\na: 1", "@", "`", "a: =",
]
ODD_NAMES = [
    "", ".", "a..b", "optimizer.", ".lr", "task_args." + "a." * 5000 + "b", "task_args.x", "epochs.x", "é", "a\nb",
]
# fmt: on
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(NASTY)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
DEPTHS = st.sampled_from([1, 10, 60, 64, 65, 500, 20_000])
RAW = st.one_of(
    DEPTHS.map(lambda n: "a: " + "[" * n),
    DEPTHS.map(lambda n: "a: " + "[" * n + "]" * n),
    DEPTHS.map(lambda n: "{a: " * n + "1" + "}" * n),
    DEPTHS.map(lambda n: "- " * n + "1"),
    DEPTHS.map(lambda n: "? " * n),
    DEPTHS.map(lambda n: "\n".join(" " * level + "a:" for level in range(min(n, 900)))),
    DEPTHS.map(lambda n: "a: " + "9" * n),
    DEPTHS.map(lambda n: "a: 0x" + "f" * n),
    DEPTHS.map(lambda n: "a: 1e" + "9" * n),
    DEPTHS.map(lambda n: "a: " + "1:" * n + "1"),
    DEPTHS.map(lambda n: "--- 1\n" * n),
    DEPTHS.map(lambda n: "".join(f"k{index}: v\n" for index in range(n))),
    DEPTHS.map(lambda n: "a: |\n" + "  text\n" * n),
    st.tuples(st.integers(1, 40), st.integers(1, 12)).map(lambda shape: laughs(*shape)),
    st.sampled_from(SNIPPETS),
)


def laughs(levels: int, width: int) -> str:
    """Aliases of aliases: `width` to the power of `levels` values in a few lines."""
    lines = ["a0: &a0 x"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


def paths(tree: Any, prefix: str = "") -> Iterator[str]:
    """The dotted path of every part."""
    if isinstance(tree, (dict, list)):
        for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield f"{prefix}{key}"
            yield from paths(part, f"{prefix}{key}.")


@st.composite
def trees(draw: st.DrawFn, bases: tuple[Any, ...], keys: tuple[str, ...] = ()) -> Any:
    """A good tree with a few parts replaced, removed, renamed, wrapped or added."""
    tree = copy.deepcopy(draw(st.sampled_from(bases)))
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 4]))):
        change = draw(st.sampled_from(["put", "put", "put", "drop", "rename", "wrap", "add"]))
        if change == "add" and keys:
            _set(tree, draw(st.sampled_from(keys)).split("."), copy.deepcopy(draw(VALUES)))
            continue
        there = sorted({path for path in paths(tree) if "" not in path.split(".")})
        if not there:
            break
        with contextlib.suppress(KeyError, ValueError, IndexError, TypeError):  # a key with a dot in it
            parent, key = parent_of(tree, draw(st.sampled_from(there)))
            value = parent.pop(key)
            if change == "rename" and isinstance(parent, dict):
                parent[
                    draw(st.text(max_size=8) | st.sampled_from(["lr", "batch_size", "early_stopping", "x" * 300]))
                ] = value
            elif change != "drop":
                made = copy.deepcopy(draw(VALUES)) if change == "put" else [value] if change == "wrap" else {"x": value}
                parent.insert(key, made) if isinstance(parent, list) else parent.__setitem__(key, made)
    return tree


def _set(tree: Any, path: list[str], value: Any) -> None:
    for part in path[:-1]:
        if not isinstance(tree, dict):
            return
        tree = tree.setdefault(part, {})
    if isinstance(tree, dict):
        tree[path[-1]] = value


def _dump(tree: Any) -> str:
    return str(yaml.safe_dump(tree, sort_keys=False))


@st.composite
def _damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes with some of them changed, doubled, or cut."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.sampled_from([0, 1, 1, 4, 8, 64]))
        data[at : at + length] = draw(
            st.binary(max_size=8) | st.sampled_from([b"\0", b"\xff" * 8, b"\x7f\xff\xff\xff"])
        )
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 4)) == 0 else data)


def files(bases: tuple[Any, ...], keys: tuple[str, ...] = ()) -> st.SearchStrategy[bytes]:
    """What somebody may have in a YAML file that should hold one of `bases`."""
    good = trees(bases, keys).map(_dump).map(partial(str.encode, errors="surrogatepass"))
    raw = RAW.map(partial(str.encode, errors="surrogatepass"))
    return st.one_of(good, good, good, raw, _damaged(good), st.binary(max_size=40))


def _write(directory: Path, data: bytes) -> str:
    path = directory / "given.yaml"
    path.write_bytes(data)
    return str(path)


# The doors.

TRAIN: dict[str, Any] = {
    "task": "tests.tasks:Blobs",
    "task_dir": str(REPOSITORY),
    "epochs": 1,
    "global_batch_size": 8,
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "scaling": {"num_workers": 1},
    "checkpoint": {"every_steps": 5},
    "launcher": "local",
}
SWEEP: dict[str, Any] = {
    "name": "s",
    "train": TRAIN,
    "space": {"global_batch_size": [8, 16], "optimizer.lr": [0.1, 0.2]},
    "objective": {"metric": "val_loss", "target": {"val_loss": 1.0}},
}
DRAWN = SWEEP | {"search": "random", "space": {"optimizer.lr": {"loguniform": [1e-3, 1e-1]}}, "budget": {"trials": 3}}
FRONTIER = SWEEP | {
    "search": "frontier",
    "space": {"global_batch_size": {"min": 8, "max": 64}},
    "objective": {"metric": "time_to_target", "target": {"val_loss": 1.0}},
}
TRAIN_KEYS = tuple([key for key, _, _ in entries(TrainConfig)] + list(TrainConfig.foreign))
SWEEP_KEYS = tuple([key for key, _, _ in entries(SweepConfig)] + list(SweepConfig.foreign))


def _train(directory: Path, data: bytes) -> None:
    read_spec(_write(directory, data), {})


def _sweep(directory: Path, data: bytes) -> None:
    read_sweep(_write(directory, data), {})


NAMES = st.sampled_from(TRAIN_KEYS) | st.text(max_size=12) | st.sampled_from(ODD_NAMES)
TYPED = VALUES.map(lambda value: str(yaml.safe_dump(value, default_flow_style=True))) | RAW | st.text(max_size=20)
ARGS = st.lists(
    st.tuples(NAMES, TYPED).flatmap(
        lambda pair: st.sampled_from([[f"--{pair[0]}", pair[1]], [f"--{pair[0]}={pair[1]}"]])
    )
    | st.text(max_size=8).map(lambda word: [word]),
    max_size=4,
)


def _overrides(directory: Path, args: list[list[str]]) -> None:
    file = _write(directory, _dump(TRAIN).encode())
    # What a shell can pass on: bytes without NUL.
    typed = [os.fsdecode(arg.encode(errors="surrogatepass")).replace("\0", "") for group in args for arg in group]
    given = Command("python -m trainers", train, TrainConfig).parse([file, *typed])
    read_spec(file, given["overrides"])


def _cluster(directory: Path, data: bytes) -> None:
    file = _write(directory, data)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cluster.__main__.main(["validate", file])
    assert code in (0, 2)
    lines = err.getvalue().splitlines()
    assert (code == 2) == any(line.startswith("error: ") for line in lines), lines
    assert all(line.startswith(("error: ", "warning: ")) and line.isprintable() for line in lines), lines


@cache
def _tables() -> tuple[bytes, ...]:
    """Small files of every kind and column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "number": pa.array(range(20), pa.float32()),
            "flag": [bool(index % 3) for index in range(20)],
            "text": [f"text {index}" for index in range(20)],
            "bytes": pa.array([bytes(index) for index in range(20)], pa.binary()),
            "list": [list(range(index % 4)) for index in range(20)],
            "wide": pa.FixedSizeListArray.from_arrays(pa.array(range(60), pa.int16()), 3),
            "word": pa.array(["a", "b"] * 10).dictionary_encode(),
        }
    )
    made = []
    for options in ({}, {"compression": "zstd"}):
        for kind in (pa.ipc.new_file, pa.ipc.new_stream):
            sink = pa.BufferOutputStream()
            with kind(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
                writer.write_table(table, max_chunksize=7)
            made.append(sink.getvalue().to_pybytes())
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=7)
    return (*made, sink.getvalue().to_pybytes())


def _arrow(directory: Path, data: bytes) -> None:
    from trainers.data.arrow import ArrowDataset

    (directory / "given.arrow").write_bytes(data)
    found = ArrowDataset(directory / "given.arrow", cache=directory)
    found.__getitems__([0, len(found) - 1, len(found) // 2])


# What is read back from storage: a run's and a sweep's own files, damaged or another's.


@cache
def _kept() -> Path:
    """A directory with two whole checkpoints, the second by rows, a result, a log, a trial and what is known of
    microbatches.
    """
    from tests.unit.report_records import curve, trial
    from trainers.checkpoint.manifest import Manifest, shard_file
    from trainers.checkpoint.row_shards import cut_rows
    from trainers.checkpoint.store import Archive
    from trainers.devices.group import Group
    from trainers.measure.result import RunResult
    from trainers.measure.run_log import RunLog
    from tune.trials.journal import Journal, write_boundary
    from tune.trials.microbatch_bounds import Boundary

    directory = Path(tempfile.mkdtemp(prefix="fuzz-kept-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    storage = Storage(str(directory))
    archive = Archive(storage)
    names = ("state.pt", "rank-00000.pt")
    written = {name: archive.write("step-000000000001", name, {"x": [1.0, 2]}) for name in names}
    archive.seal(Manifest(1, 1, written, {"val_loss": 0.5}, {"torch": "2"}, TRAIN), keep=2)
    weights = {"model": {"weight": torch.arange(300_000.0), "bias": torch.ones(3)}}
    cut = cut_rows(weights, Group(0, 1, torch.device("cpu")), {"weight"})
    written = {name: archive.write("step-000000000002", name, cut.rest) for name in names}
    written[shard_file(0)] = archive.write_rows("step-000000000002", shard_file(0), cut.rows)
    archive.seal(Manifest(2, 1, written, {"val_loss": 0.5}, {"torch": "2"}, TRAIN), keep=2)
    storage.write("result.json", RunResult("done", 1, 1.0, 1, 8, 8, 1, 0.5, 0.6, 1024).to_json().encode())
    log = RunLog(storage)
    log.add({"step": 1, "epoch": 1.0, "train_loss": 0.5})
    log.flush(1)
    Journal(storage).append(
        trial(1, "done", {"global_batch_size": 8}, samples_per_s=9.5, curve=curve(0.9, 0.1, 4.0, 8))
    )
    write_boundary(storage, Boundary())
    return directory


def kept(*patterns: str) -> st.SearchStrategy[tuple[str, bytes]]:
    """A kept file's name, and what stands in its place: another tree of JSON, other bytes, or anything."""

    def instead(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
        whole = (_kept() / name).read_bytes()
        options = [_damaged(st.just(whole)), st.binary(max_size=40), st.sampled_from([b"", b"[" * 5000, b"\xff\xfe"])]
        with contextlib.suppress(ValueError):
            found = trees((json.loads(whole.splitlines()[0] if name.endswith("l") else whole),))
            options += [found.map(lambda tree: json.dumps(tree).encode())] * 3
        return st.tuples(st.just(name), st.one_of(options))

    names = sorted(str(path.relative_to(_kept())) for pattern in patterns for path in _kept().glob(pattern))
    return st.sampled_from(names).flatmap(instead)


def _read_back(directory: Path, given: tuple[str, bytes]) -> None:
    from trainers.checkpoint.store import Archive
    from trainers.measure.run_log import read_log
    from tune.trials.journal import Journal, read_boundary

    shutil.copytree(_kept(), directory, dirs_exist_ok=True)
    (directory / given[0]).write_bytes(given[1])
    storage = Storage(str(directory))
    storage.write("config.yaml", _dump(TRAIN).encode())
    named = TRAIN | {"name": directory.name, "storage_path": str(directory.parent)}
    spec = read_spec(_write(directory, _dump(named).encode()), {})
    for door in (
        lambda: Archive(storage).choose("newest"),
        lambda: Archive(storage).read("step-000000000001", "state.pt"),
        lambda: whole_state(storage, 2),
        lambda: prepare_storage(spec, False),
        lambda: read_log(storage),
        lambda: Journal(storage).records(),
        lambda: read_boundary(storage),
    ):
        try:
            door()
        except PacelineError as error:
            check_sentence(error)


READ_BACK = (
    Target("checkpoint", lambda: kept("checkpoints/*/*"), _read_back, 100),
    Target("result and log", lambda: kept("*.json", "log/*"), _read_back, 50),
    Target("journal", lambda: kept("trials/*"), _read_back, 50),
)
TARGETS = (
    Target("train.yaml", lambda: files((TRAIN,), TRAIN_KEYS), _train, 280),
    Target("sweep.yaml", lambda: files((SWEEP, DRAWN, FRONTIER), SWEEP_KEYS), _sweep, 220),
    Target("overrides", lambda: ARGS, _overrides, 210),
    Target("ray up", lambda: files((LOCAL, *map(shipped, ("aws", "gcp", "azure", "onprem")))), _cluster, 60),
    Target("kuberay", lambda: files((shipped("kuberay"), shipped("kuberay", 1))), _cluster, 80),
    Target("arrow", lambda: _damaged(st.sampled_from(_tables())), _arrow, 150),
)


def fuzz(target: Target, examples: int, seed: int | None = None) -> None:
    """Try examples of a target; always the same ones without a seed, with one each within its limits.

    Raises what the first that goes wrong raises, made as small as it can be; the input is printed.
    """

    @hypothesis.settings(
        max_examples=examples,
        derandomize=seed is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @hypothesis.given(target.inputs())
    def probe(given: Any) -> None:
        (judge if seed is None else _within_limits)(target, given)

    (probe if seed is None else hypothesis.seed(seed)(probe))()


def _within_limits(target: Target, given: Any) -> None:
    def hangs(*_: object) -> None:
        raise TimeoutError(f"still reading after {HANG_S} s")

    before = _resident_bytes()
    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANG_S)
    start = time.process_time()
    try:
        judge(target, given)
    finally:
        signal.alarm(0)
    took_s, peak = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert took_s <= CPU_S, f"{took_s:.2f} s"
    assert peak - before <= MEMORY_BYTES or peak <= _WORST[0], f"{(peak - before) / 2**20:.0f} MB"
    _WORST[0] = max(_WORST[0], peak)


_WORST = [0]  # the peak so far: one example's must not be taken for the next one's


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    """Run the long form; prints each target's result."""
    given = [int(word) for word in sys.argv[1:]]
    examples, seed = (given + [20_000, 0][len(given) :])[:2]
    os.chdir(REPOSITORY)
    logging.disable(logging.WARNING)
    failed = 0
    for target in (*TARGETS, *READ_BACK):
        try:
            fuzz(target, 5)  # what is imported at the first use is no example's
            _WORST[0] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            fuzz(target, examples * target.share // 1200, seed)
            print(f"{target.name}: held", flush=True)
        except Exception as error:
            failed += 1
            print(
                *(text[:2000] for text in (f"{target.name}: {type(error).__name__}: {error}", *error.__notes__)),
                sep="\n",
                flush=True,
            )
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
