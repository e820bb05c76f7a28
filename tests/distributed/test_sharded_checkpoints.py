"""Checkpoints that all ranks write at once: resharded to any number of ranks
to the bit, and killed at every kind of write.
"""

import contextlib
import os
import signal
from functools import partial

import pytest
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
)

from tests.distributed.processes import run_processes
from tests.distributed.test_strategies import Averaged
from tests.specs import ranked, train_on, whole_state
from tests.unit.test_row_shards import same
from trainers.storage import Storage

STEPS = 7
KILLED_STEP = 4
NAME = f"step-{KILLED_STEP:012d}"
FILES = [
    (0, "state.pt"),
    (1, "rank-00001.pt"),
    (1, "shard-00001.safetensors"),
    (0, "manifest.json"),
]


def train(rank, world_size, path, name, source=None, **dotted):
    """A run of `STEPS` steps; with `source` one that begins, and ends, where
    that one did.
    """
    base = {
        "global_batch_size": 24,
        "max_steps": STEPS,
        "ema.decay": 0.9,
        "microbatch_size": 5,
        "optimizer.lr": 0.01,
    }
    context = ranked(rank, world_size, path / name)
    if source is not None:
        context.source = Storage(path / source)
    made = Averaged(samples=96, dtype="float64")
    train_on(made, context, **base | dotted)


def kept(path, step=STEPS):
    """All that a run's checkpoint holds but the time that it took."""
    state = whole_state(path, step)
    state["position"].pop("train_time_s")
    return state


@pytest.mark.campaign
def test_any_number_of_ranks_goes_on_with_what_any_other_wrote(tmp_path):
    before = None
    for number, (world_size, strategy) in enumerate(
        [
            (2, "fsdp"),
            (3, "fsdp"),
            (1, "fsdp"),
            (4, "fsdp"),
            (2, "ddp"),
            (3, "fsdp"),
            (3, "ddp"),
            (2, "fsdp"),
        ]
    ):
        name = f"{number}-{strategy}-{world_size}"
        run_processes(
            world_size,
            partial(train, strategy=strategy),
            tmp_path,
            name,
            before,
        )
        files = {
            file.name
            for file in (
                tmp_path / name / f"checkpoints/step-{STEPS:012d}"
            ).iterdir()
        }
        is_sharded = strategy == "fsdp" and world_size > 1
        shards = sum(file.startswith("shard") for file in files)
        assert shards == (world_size if is_sharded else 0)
        if before is not None:
            same(kept(tmp_path / name), kept(tmp_path / before))
        before = name


def train_killed(rank, world_size, path, victim, file, after, later):
    """The process of rank `victim` is killed in the middle of writing a file
    of a checkpoint, or right after it.
    """
    write = Storage.writer

    @contextlib.contextmanager
    def writer(storage, name):
        # The archive's paths begin with the checkpoint's name.
        strikes = rank == victim and name == f"{NAME}/{file}"
        with write(storage, name) as stream:
            if strikes and not after:
                stream.write(b"the beginning")
                stream.flush()
                (path / "struck").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield stream
        if strikes:
            (path / "struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "writer", writer)
        dotted = {"checkpoint.every_steps": 2, "checkpoint.async": later}
        train(rank, world_size, path, "killed", strategy="fsdp", **dotted)


@pytest.mark.full
def test_killed_at_every_kind_of_write_and_resumed_to_the_bit(tmp_path):
    # Right after a write is right before the next one, but for the last.
    cases = [*((*file, False) for file in FILES), (*FILES[-1], True)]
    for number, (victim, file, after) in enumerate(cases):
        with pytest.raises((ProcessExitedException, ProcessRaisedException)):
            run_processes(
                2,
                train_killed,
                tmp_path,
                victim,
                file,
                after,
                number % 2 == 0,
            )
        (tmp_path / "struck").unlink()
        done = (
            tmp_path / "killed/checkpoints" / NAME / "manifest.json"
        ).exists()
        assert done == (file == "manifest.json" and after)
    unbroken = partial(train, strategy="fsdp", **{"checkpoint.every_steps": 2})
    for name in ("killed", "unbroken"):
        run_processes(2, unbroken, tmp_path, name)
    same(*(kept(tmp_path / name) for name in ("killed", "unbroken")))
