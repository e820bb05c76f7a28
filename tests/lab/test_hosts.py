"""Whatever becomes of a lab, it leaves nothing on this machine: no process, no mount, no link, no file."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys

import pytest

from tests.lab import hosts
from tests.lab.hosts import REPOSITORY, Lab, outside
from tests.waits import until

pytestmark = [pytest.mark.full, pytest.mark.lab]

KILLED = """
import os, signal
from tests.lab.hosts import Lab
lab = Lab(1).__enter__()
print(lab.directory, *lab.namespaces, flush=True)
assert len(lab.processes()) > 2
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def possible() -> None:
    if why := hosts.missing():
        pytest.skip(f"there can be no lab here: {why}")


def test_a_lab_that_fails_leaves_nothing() -> None:
    before = outside()
    lab = Lab(num_hosts=1)

    def fail() -> None:
        with lab:
            lab.popen("h0", "sleep", "1000")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert lab.processes() == []
    assert not lab.directory.exists()
    assert outside() == before


def test_a_lab_that_is_killed_leaves_no_process() -> None:
    before = outside()
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=REPOSITORY, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    directory, *spaces = killed.stdout.split()
    lab = Lab(num_hosts=1)
    lab.namespaces = {int(space) for space in spaces}
    until(lambda: not lab.processes(), "the end of the killed lab")
    shutil.rmtree(directory)
    assert outside() == before


def test_hosts_reach_each_other_and_a_cut_cable_parts_them() -> None:
    with Lab(num_hosts=2) as lab:
        ssh = ("ssh", "-i", "/root/.ssh/paceline", "-o", "StrictHostKeyChecking=no", "-o", "ConnectTimeout=2")
        assert lab.run("ctl", *ssh, "h1", "hostname").stdout.split()[-1] == "h1"
        (lab.shared / "note").write_text("one place")
        assert lab.run("h0", "cat", "/srv/nfs/note").stdout == "one place"
        lab.partition("h1")
        assert lab.run("ctl", *ssh, "h1", "hostname", check=False).returncode == 255
        lab.heal("h1")
        assert lab.run("ctl", *ssh, "h1", "hostname").stdout.split()[-1] == "h1"
        lab.power_cut("h1")
        lab.start("h1")
        assert lab.run("ctl", *ssh, "h1", "hostname").stdout.split()[-1] == "h1", "it comes back with its files"
