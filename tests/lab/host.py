"""What process 1 of a lab's host does: makes the host's own files and address, starts
sshd, reaps orphans.

run as:  unshare ... python -I host.py DIRECTORY NAME ADDRESS,... GATEWAY VISIBLE...
(tests/lab/hosts.py does it)

Needs nothing but the standard library: it runs before the interpreter's own home is
mounted again.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HIDDEN = ("/root", "/tmp")
"""What every host has for itself; what lies below and must stay visible is
mounted again.
"""
SHARED = "/srv/nfs"


def run(*command: str):
    """One command, which must succeed."""
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def bind(source: str, target: str):
    """Show a directory at a second place."""
    Path(target).mkdir(parents=True, exist_ok=True)
    run("mount", "--rbind", source, target)


def set_up(
    directory: str,
    name: str,
    addresses: list[str],
    gateway: str,
    visible: list[str],
):
    """Files, then the network: the bridge's other end appears a moment after
    this process.
    """
    run("hostname", name)
    run("mount", "-t", "tmpfs", "-o", "size=2g", "shm", "/dev/shm")
    # Its disk is its own: on one that all hosts share, whoever writes first
    # has most of it.
    run(
        "mount",
        "-t",
        "tmpfs",
        "-o",
        "size=2g,mode=1777",
        "tmp",
        f"{directory}/tmp",
    )
    run("mount", "--bind", f"{directory}/run", "/run")
    # A host that does not know its own name makes gloo listen on its loopback.
    run("mount", "--bind", f"{directory}/hosts", "/etc/hosts")
    if Path(f"{directory}/passwd").exists():
        run("mount", "--bind", f"{directory}/passwd", "/etc/passwd")
    # A name server that nobody reaches makes torch's rendezvous wait ten
    # seconds for the name of each peer.
    if Path("/etc/resolv.conf").exists():
        run("mount", "--bind", f"{directory}/resolv.conf", "/etc/resolv.conf")
    run("mount", "-t", "tmpfs", "srv", "/srv")
    bind(f"{directory}/../shared", SHARED)
    for path in visible:
        if path.startswith(tuple(f"{hidden}/" for hidden in HIDDEN)):
            bind(path, directory + path)
    # The host's own directory may lie below /tmp, which goes last.
    for hidden in HIDDEN:
        run("mount", "--rbind", directory + hidden, hidden)
    run("ip", "link", "set", "lo", "up")
    while subprocess.run(
        ["ip", "link", "show", "eth0"], capture_output=True
    ).returncode:
        time.sleep(0.02)
    for address in addresses:
        run("ip", "address", "add", address, "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")
    if not is_gateway(addresses, gateway):
        # It leads nowhere, and Ray needs it to find the host's own address.
        run("ip", "route", "add", "default", "via", gateway)


def is_gateway(addresses: list[str], gateway: str) -> bool:
    """Whether this host is the gateway of the others."""
    return addresses[0].startswith(f"{gateway}/")


def main():
    """Set up, say so, and live until killed."""
    directory, name, assigned, gateway, *visible = sys.argv[1:]
    addresses = assigned.split(",")
    set_up(directory, name, addresses, gateway, visible)
    os.chdir("/root")
    if not is_gateway(addresses, gateway):
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        sshd = ["/usr/sbin/sshd", "-D", "-e", "-f", "/root/.ssh/sshd_config"]
        with Path("/root/.ssh/sshd.log").open("wb") as log:
            subprocess.Popen(
                sshd, env=environment, stdin=subprocess.DEVNULL, stderr=log
            )
    Path("/run/ready").touch()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.2)


if __name__ == "__main__":
    main()
