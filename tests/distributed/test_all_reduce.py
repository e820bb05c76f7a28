"""The all-reduce by which a cluster check compares links, between two processes that
stand for two nodes.
"""

import json
from pathlib import Path

import torch

from cluster.health.probes import free_port, link
from tests.distributed import processes
from tests.waits import HANG_S


def _node(rank, directory, port):
    if rank == 0:
        torch.cuda.is_available = lambda: True
    answer = link(rank, "127.0.0.1", port, HANG_S)
    Path(directory, f"{rank}.json").write_text(json.dumps(answer))


def test_a_node_without_a_free_gpu_meets_one_that_has_one_on_their_cpus(tmp_path):
    """Each by itself would choose another backend, and neither would hear of the other."""
    processes._fork(_node, (str(tmp_path), free_port("127.0.0.1")), nprocs=2)
    for rank in range(2):
        rate, why = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (rate > 0, why) == (True, "")


def test_a_node_whose_peer_does_not_come_says_so():
    rate, why = link(1, "127.0.0.1", free_port("127.0.0.1"), 0.2)
    assert (rate, bool(why)) == (0.0, True)
