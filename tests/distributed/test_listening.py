"""Where the processes of a real group of two listen: on the address that was
meant, and on no other.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.distributed import processes
from tests.specs import read_json

# an address that this machine has, and no other part of a group listens on
NODE = "127.0.0.2"


def listening():
    """The addresses on which this process accepts connections."""
    sockets = psutil.Process().net_connections("inet")
    addresses = {
        one.laddr.ip.removeprefix("::ffff:")
        for one in sockets
        if one.status == psutil.CONN_LISTEN
    }
    return sorted(addresses)


def _member(rank, directory, local_world_size, node):
    """One worker as Ray Train has it, but for Ray: its place in the group and
    its node's address are given.
    """
    from trainers.on_ray import worker_group

    numbers = {
        "world_rank": rank,
        "world_size": 2,
        "local_rank": 0,
        "local_world_size": local_world_size,
    }
    context = SimpleNamespace(
        **{
            f"get_{name}": lambda n=n: n
            for name, n in {**numbers, "node_rank": 0}.items()
        }
    )
    worker_group.ray = SimpleNamespace(
        train=SimpleNamespace(get_context=lambda: context),
        util=SimpleNamespace(get_node_ip_address=lambda: node),
    )
    worker_group.hide_unassigned_gpus = lambda: None
    worker_group.own_gpu = lambda: 0
    place = Path(directory, "place")
    if rank == 0:
        place.with_suffix(".new").write_text(
            json.dumps(worker_group._listen())
        )
        place.with_suffix(".new").rename(place)
    while not place.exists():
        time.sleep(0.01)
    worker_group._join(*read_json(place), "gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    found = {
        "sum": total.item(),
        "listening": listening(),
        "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
    }
    Path(directory, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    worker_group._leave()


def group(directory, local_world_size, node=NODE):
    """What both members of a group found."""
    processes._fork(
        _member, (str(directory), local_world_size, node), nprocs=2
    )
    found = [read_json(directory / f"{rank}.json") for rank in range(2)]
    assert [one["sum"] for one in found] == [2, 2]
    return found


def test_a_group_on_one_node_listens_on_the_loopback(tmp_path):
    found = group(tmp_path, local_world_size=2)
    assert {address for one in found for address in one["listening"]} == {
        "127.0.0.1"
    }
    assert {one["gloo"] for one in found} == {
        "lo" if sys.platform == "linux" else "lo0"
    }


@pytest.mark.skipif(
    sys.platform != "linux", reason="127.0.0.2 is an address of Linux"
)
def test_the_store_of_a_group_on_two_nodes_listens_on_its_node_s_address(
    tmp_path,
):
    found = group(tmp_path, local_world_size=1)
    assert NODE in found[0]["listening"]
    assert not {"0.0.0.0", "::"} & {  # noqa: S104
        address for one in found for address in one["listening"]
    }
    assert {one["gloo"] for one in found} == {None}, (
        "its interface is the cluster's to choose"
    )
