"""A cluster that stays up on this machine: started, stopped and shown."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster.health.probes import free_port
from trainers import residents
from trainers.errors import ClusterError
from trainers.on_ray import reaper

_RAY, _LOG = "ray", "cluster.log"
_START_S, _STOP_S, _LOOK_S = 90.0, 10.0, 0.1


def start(num_cpus: int | None) -> str:
    """Start a cluster on the loopback, unless there is one; returns its address. Raises ClusterError."""
    if (known := residents.cluster()) is not None:
        return str(known["address"])
    place = residents.directory()
    if place is None:
        raise ClusterError("others may write to Paceline's directory below the temporary one: delete it")
    port, log = free_port("127.0.0.1"), place / _LOG
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address=127.0.0.1", f"--port={port}", "--dashboard-host=127.0.0.1"]
    command += [f"--temp-dir={place / _RAY}"]
    command += [] if num_cpus is None else [f"--num-cpus={num_cpus}"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    # As Ray does for a cluster that `ray.init` starts; `ray start` asks for it.
    subprocess.run([command[0], "get-auth-token", "--generate"], env=environment, capture_output=True, check=False)  # noqa: S603
    with log.open("w") as file:
        process = subprocess.Popen(  # noqa: S603 (our own command)
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    deadline = time.monotonic() + _START_S
    while "Ray runtime started" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            words = log.read_text().strip()[-500:]
            _end(process.pid, place)
            raise ClusterError(f"`ray start` gave no cluster: {words}")
        time.sleep(_LOOK_S)
    address = f"127.0.0.1:{port}"
    residents.note_cluster({"pid": process.pid, "address": address})
    return address


def stop() -> bool:
    """Stop the cluster of this machine, and what runs on it; returns whether there was one."""
    known, place = residents.cluster(), residents.directory()
    if known is not None and place is not None:
        for driver, found in residents.drivers().items():
            if found["address"] == known["address"]:
                residents.ask(driver, {"end": True})
        _end(known["pid"], place)
    residents.note_cluster(None)
    return known is not None


def _end(process: int, place: Path) -> None:
    """End the processes of `ray start`, and delete what they have written."""
    session = (place / _RAY / "session_latest").resolve()
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)
            os.kill(process, 0)
            time.sleep(_LOOK_S)
        os.killpg(process, signal.SIGKILL)
    for left in reaper.processes(str(session)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
    shutil.rmtree(place / _RAY, ignore_errors=True)
    (place / _LOG).unlink(missing_ok=True)
