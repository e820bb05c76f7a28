"""`python -m cluster check --local`: why torch sees no GPU, and the command as a user
types it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cluster.health.probes import seconds_of, unseen
from tests.waits import HANG_S

REPOSITORY = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("seen", "built_for", "visible", "words"),
    [
        (0, None, None, "is a CPU build; install one for CUDA 12"),
        (0, "13.2", None, "built for CUDA 13.2, and the driver stops at 12.8"),
        # a minor version runs on an older driver
        (0, "12.9", "", 'CUDA_VISIBLE_DEVICES is ""'),
        (0, "12.9", None, "CUDA does not start"),
        (1, "12.8", None, "on the others; look at `nvidia-smi`"),
    ],
)
def test_why_torch_does_not_see_the_gpus_of_the_driver(seen, built_for, visible, words):
    finding = unseen(seen, 2, (12, 8), built_for, visible)
    assert (finding.level, finding.value) == ("error", seen)
    assert words in str(finding)


def test_a_rate_is_of_what_was_run():
    runs = []
    assert seconds_of(lambda: runs.append(1), torch.device("cpu")) > 0
    assert len(runs) > 5


@pytest.mark.full
def test_the_command_measures_this_machine_without_ray():
    code = "import sys; sys.modules['ray'] = None; from cluster.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "check", "--local", "--json"],
        cwd=REPOSITORY,
        capture_output=True,
        timeout=HANG_S,
    )
    report = json.loads(done.stdout)
    assert done.returncode == bool(report["findings"])
    [node] = report["nodes"]
    assert torch.__version__.startswith(node["versions"]["torch"])
    assert node["rates"]
    assert all(rate > 0 for rate in node["rates"].values())
