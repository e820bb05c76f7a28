"""Ranks on several hosts: other versions and storage that is not shared are
errors on every rank, before training.
"""

import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.distributed.processes import run_processes
from trainers.devices import peers
from trainers.devices.group import Group, join_group, leave_group
from trainers.errors import ConfigError
from trainers.storage import Storage


def outcome(rank, world_size, directories, torch_versions):
    """(error, how often it waited for storage) of a rank with this storage and
    this torch, in two checks.
    """
    found = peers.own_versions() | {"torch": torch_versions[rank]}
    peers.own_versions = lambda: found
    peers._LOOKS = 5
    group = Group(rank, world_size, torch.device("cpu"))
    naps = []
    peers.time = SimpleNamespace(sleep=naps.append)
    for _ in range(2):
        try:
            peers.check_peers(group, Storage(directories[rank]))
        except ConfigError as error:
            return str(error), len(naps)
    return "", len(naps)


def test_what_ranks_must_have_in_common(tmp_path):
    shared = str(tmp_path / "shared")
    own = str(tmp_path / "own")
    same = ["2.15.0"] * 3
    equal = run_processes(3, outcome, [shared] * 3, same)
    assert equal == [("", 0)] * 3, "no rank waits for a file that is there"
    assert list((tmp_path / "shared").iterdir()) == [], "no marker is left"

    apart = run_processes(3, outcome, [shared, shared, own], same)
    assert len({words.replace(own, shared) for words, *_ in apart}) == 1, (
        "all ranks end with the same words"
    )
    assert "must be shared by all nodes, but " in apart[0][0]
    assert "does not see a file that rank 0 wrote" in apart[0][0]
    assert apart[2][1] == 4, "NFS may show it late"

    other = run_processes(
        3,
        outcome,
        [shared] * 3,
        ["2.15.0", "2.14.1", "2.15.0"],
    )
    assert len({words for words, *_ in other}) == 1
    assert "`torch of rank 1 on" in other[0][0]
    assert "must be 2.15.0, as on rank 0" in other[0][0]


def again(rank, world_size, place):
    """Join a group twice in a store that stays; this rank's sums."""
    store = dist.FileStore(place, world_size)
    group = Group(rank, world_size, torch.device("cpu"))
    sums = []
    for number in range(2):
        leave_group(failed=False)
        time.sleep(number * (1 - rank))
        join_group("gloo", store, rank, world_size, 0)
        sums.append(group.sum(torch.ones(())).item())
    return sums


def test_two_runs_of_one_torchrun(tmp_path):
    place = str(tmp_path / "agent")
    assert run_processes(2, again, place) == [[2.0, 2.0]] * 2
