"""Further nodes of the session's cluster: raylets of this machine."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import Cluster, free_port
from tests.waits import until


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
    raylet = ray_start(
        f"--address={cluster.address}",
        f"--num-cpus={cpus}",
        is_up=lambda: _alive(driver) - known,
    )
    try:
        [new] = _alive(driver) - known
        yield Node(new, raylet)
    finally:
        raylet.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            raylet.wait(20)
        Node("", raylet).cut_power()
        until(lambda: not _alive(driver) - known, "the node's end")


def ray_start(
    *options: str, is_up: Callable[[], object], **process: Any
) -> subprocess.Popen[bytes]:
    """`ray start`, once its node is up; started again where Ray has given up,
    since its raylet gives its agents 15 s to start, on a busy machine, too.
    """
    command = [
        # also where a test that hangs has ended this process
        "setpriv",
        "--pdeathsig=TERM",
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--block",
        "--disable-usage-stats",
        f"--dashboard-agent-listen-port={free_port()}",
        *options,
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    nodes: list[subprocess.Popen[bytes]] = []

    def started() -> object:
        if not nodes or nodes[-1].poll() is not None:
            new = subprocess.Popen(
                command, start_new_session=True, **(quiet | process)
            )
            nodes.append(new)
        return is_up()

    until(started, "a node of Ray")
    return nodes[-1]


def _alive(driver: Any) -> set[str]:
    return {node["NodeID"] for node in driver.nodes() if node["Alive"]}
