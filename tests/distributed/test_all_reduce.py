"""The all-reduce by which a cluster check compares nodes, between two processes that
stand for two nodes.
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from cluster.health.probes import all_reduce, free_port
from tests.distributed import processes
from tests.waits import HANG_S


def _node(rank, directory, port):
    if rank == 0:
        torch.cuda.is_available = lambda: True
    answer = all_reduce(rank, 2, "127.0.0.1", port, HANG_S)
    Path(directory, f"{rank}.json").write_text(json.dumps(asdict(answer)))


def test_a_node_without_a_free_gpu_meets_one_that_has_one_on_their_cpus(tmp_path):
    """Each by itself would choose another backend, and neither would hear of the other."""
    processes._fork(_node, (str(tmp_path), free_port("127.0.0.1")), nprocs=2)
    for rank in range(2):
        answer = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (answer["is_right"], answer["failure"]) == (True, None)
        assert answer["mb_per_s"] > 0


def test_a_node_whose_peer_does_not_come_says_so():
    answer = all_reduce(1, 2, "127.0.0.1", free_port("127.0.0.1"), 0.2)
    assert (answer.mb_per_s, bool(answer.failure)) == (None, True)
