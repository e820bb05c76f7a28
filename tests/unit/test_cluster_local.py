"""`python -m cluster check --local` as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.waits import HANG_S

REPOSITORY = Path(__file__).parent.parent.parent


@pytest.mark.full
def test_the_command_examines_this_machine_without_ray():
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
    assert node["device"]
