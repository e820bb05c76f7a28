"""Checkpoints of two ranks, written in the background: whole on both or an
error on both; killed, and resumed.
"""

import json
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.processes import run_processes
from tests.distributed.test_resume import run_killed, spec
from tests.specs import evaluations, losses
from tests.unit.test_checkpoint import replace
from tests.waits import HANG_S
from trainers.checkpoint.manifest import Best
from trainers.checkpoint.store import Archive, Checkpoints
from trainers.devices.group import Group
from trainers.errors import CheckpointError, StorageError
from trainers.launch.local import run_spawn
from trainers.storage import Storage

CPU = torch.device("cpu")
STATE = {"model": {"weight": torch.ones(1000)}, "position": {"step": 1}}


def write_beside_collectives(rank, world_size, path):
    """Collectives go on while files are written, rank 1's not before six of
    them; then rank 1's disk is full.
    """
    write = Archive.write
    met = threading.Event()

    def slow(archive, name, file, state):
        if rank == 1:
            assert met.wait(HANG_S)
            if name.endswith("2"):
                raise StorageError("injected: rank 1 has no room")
        return write(archive, name, file, state)

    Archive.write = slow
    group = Group(rank, world_size, CPU)
    checkpoints = Checkpoints(Storage(path), group, 2)
    steps = 0
    checkpoints.start(1, STATE, {"rank": rank}, {})
    where = None
    while checkpoints.pending:
        (busy,) = group.max(torch.tensor([float(checkpoints.busy)])).tolist()
        steps += 1
        if steps > 5:
            met.set()
        if not busy:
            where = checkpoints.advance()
    found = checkpoints.load()
    checkpoints.start(2, STATE, {"rank": rank}, {})
    try:
        checkpoints.finish()
    except StorageError as error:
        return [where, steps, found.rank_state, str(error)]
    return [where, steps, found.rank_state, None]


def test_both_ranks_hear_of_the_end_and_of_an_error_in_the_same_call(tmp_path):
    answers = run_processes(2, write_beside_collectives, str(tmp_path / "run"))
    for rank, (where, steps, rank_state, words) in enumerate(answers):
        assert where == str(tmp_path / "run/checkpoints/step-000000000001")
        assert steps > 5  # nobody waited for rank 1
        assert rank_state == {"rank": rank}
        assert (
            "step-000000000002 could not be written: injected: rank 1 has no room"
            in words
        )
    assert answers[0][1] == answers[1][1]
    assert not (
        tmp_path / "run/checkpoints/step-000000000002/manifest.json"
    ).exists()


def lookup(rank, world_size, path):
    checkpoints = Checkpoints(
        Storage(path),
        Group(rank, world_size, CPU),
        2,
        Best("val_accuracy", smaller=False),
    )
    newest = checkpoints.load()
    return [
        newest.name,
        *(
            checkpoints.improves({"val_accuracy": value})
            for value in (0.0, 2.0)
        ),
    ]


def test_two_ranks_keep_the_best_and_resume_bit_equal_after_a_kill(tmp_path):
    settings = {
        "checkpoint__async": True,
        "checkpoint__best": "val_accuracy",
        "checkpoint__keep": 1,
    }
    unbroken = spec(
        tmp_path,
        "unbroken",
        2,
        checkpoint__keep=1,
        checkpoint__best="val_accuracy",
    )
    broken = spec(tmp_path, "broken", 2, kill_at=[22], **settings)
    run_spawn(unbroken)
    run_killed(broken, "broken-killed")
    result = run_spawn(broken)
    assert (result.status, result.steps) == ("done", 40)
    assert losses(broken) == losses(unbroken)
    assert evaluations(broken) == evaluations(unbroken)

    accuracies = {
        int(found["step"]): found["val_accuracy"]
        for found in evaluations(broken)
    }
    best = max(accuracies, key=lambda step: (accuracies[step], -step))
    for run in (broken, unbroken):
        kept = run.storage.names("checkpoints")
        assert kept == sorted({f"step-{best:012d}", "step-000000000040"})
        manifest = json.loads(
            run.storage.read(f"checkpoints/step-{best:012d}/manifest.json")
        )
        assert manifest["metrics"]["val_accuracy"] == accuracies[best]
        assert manifest["world_size"] == 2
    # A choice that cannot be met is an error on both ranks, not a wait of one
    # for the other.
    found = run_processes(2, lookup, broken.uri)
    assert found == [["step-000000000040", False, True]] * 2


def take(rank, world_size, path):
    """What a rank loads; rank 1's use of a state refuses that of step 3."""

    def use(loaded):
        if rank == 1 and loaded.name.endswith("3"):
            raise CheckpointError("injected: rank 1 cannot take it")

    checkpoints = Checkpoints(Storage(path), Group(rank, world_size, CPU), 9)
    if not Path(path).exists():
        dist.barrier()
        for step in (1, 2, 3, 4):
            checkpoints.save(
                step, {"position": {"step": step}}, {"rank": rank}
            )
        where = Path(path, "checkpoints/step-000000000004")
        if rank == 0:
            replace(where, "rank-00001.pt", b"a stranger's")
        dist.barrier()
    loaded = checkpoints.load(use)
    return [loaded.name, loaded.rank_state]


def test_what_one_rank_cannot_take_none_takes(tmp_path):
    found = run_processes(2, take, str(tmp_path / "run"))
    assert found == [["step-000000000002", {"rank": rank}] for rank in (0, 1)]
    assert run_processes(1, take, str(tmp_path / "run")) == [
        ["step-000000000004", None]
    ]
