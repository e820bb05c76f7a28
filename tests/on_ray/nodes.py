"""Further nodes of the session's cluster: raylets of this machine."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import Cluster, free_port
from tests.waits import until

RAY = str(Path(sys.executable).parent / "ray")


@dataclass(frozen=True)
class Node:
    """A node that was started here."""

    id: str
    raylet: subprocess.Popen[bytes]

    def cut_power(self) -> None:
        """End all of its processes at once."""
        if self.raylet.poll() is None:
            process = psutil.Process(self.raylet.pid)
            for one in (*process.children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            self.raylet.wait()


@contextlib.contextmanager
def another_node(cluster: Cluster, driver: Any, cpus: int) -> Iterator[Node]:
    """A node that has joined the cluster; it has left it at the end, or Ray
    would still use it for half a minute.
    """
    known = _alive(driver)
    # fmt: off
    command = [
        RAY, "start", f"--address={cluster.address}", f"--num-cpus={cpus}", "--block", "--disable-usage-stats",
        f"--dashboard-agent-listen-port={free_port()}",
    ]
    # fmt: on
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    raylet = subprocess.Popen(command, start_new_session=True, **quiet)
    try:
        until(lambda: _alive(driver) - known, "the node")
        [new] = _alive(driver) - known
        yield Node(new, raylet)
    finally:
        raylet.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            raylet.wait(20)
        Node("", raylet).cut_power()
        until(lambda: not _alive(driver) - known, "the node's end")


def _alive(driver: Any) -> set[str]:
    return {node["NodeID"] for node in driver.nodes() if node["Alive"]}
