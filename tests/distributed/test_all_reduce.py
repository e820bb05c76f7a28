"""The all-reduce by which a cluster check compares nodes, between two processes that
stand for two nodes.
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from cluster.health.probes import all_reduce, free_port
from tests.distributed import processes


def _node(rank: int, directory: str, port: int, has_gpu: bool) -> None:
    if has_gpu and rank == 0:
        torch.cuda.is_available = lambda: True
    Path(directory, f"{rank}.json").write_text(
        json.dumps(asdict(all_reduce(rank, 2, "127.0.0.1", port, 60.0)))
    )


@pytest.mark.parametrize("has_gpu", [False, True])
def test_nodes_without_a_free_gpu_meet_those_that_have_one_on_their_cpus(
    tmp_path: Path, has_gpu: bool
) -> None:
    """Each by itself would choose another backend, and neither would hear of the other."""
    processes._fork(_node, (str(tmp_path), free_port("127.0.0.1"), has_gpu), nprocs=2)
    for rank in range(2):
        answer = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (answer["is_right"], answer["failure"]) == (True, None)
        assert answer["mb_per_s"] > 0


def test_a_node_whose_peer_does_not_come_says_so() -> None:
    answer = all_reduce(1, 2, "127.0.0.1", free_port("127.0.0.1"), 0.2)
    assert (answer.mb_per_s, bool(answer.failure)) == (None, True)
