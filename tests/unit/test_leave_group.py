"""A process that has left its group has nothing of it any more, whatever was imported meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.specs import REPOSITORY

SCRIPT = """
import sys
from pathlib import Path

import torch
from trainers.launch.local import join_group, leave_group

def threads():
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))

join_group("gloo", sys.argv[1], 0, 1, 0)
torch.use_deterministic_algorithms(True)
assert "torch._dynamo" in sys.modules, "imported while the group is there"
torch.distributed.all_reduce(torch.ones(1))
before = threads()
leave_group(failed=False)
print(before, threads())
"""


def test_a_group_that_was_left_is_gone(tmp_path: Path) -> None:
    """One that stays until the process ends makes it abort now and then: `terminate called ...`."""
    place = f"file://{tmp_path}/rendezvous"
    done = subprocess.run([sys.executable, "-c", SCRIPT, place], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert before > 0
    assert after == 0
