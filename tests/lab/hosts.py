"""Hosts on one machine: namespaces of their own on one bridge, with an sshd, a home, a
/tmp and a /dev/shm each.

    with Lab(num_hosts=3) as lab:
        lab.run("ctl", "ssh", "h0", "hostname")
        lab.power_cut("h2")
        lab.start("h2")

`ctl` is the user's laptop and holds the bridge; h0, h1, ... are the hosts, at
10.77.0.10 and up. `add` puts further ones on it, at addresses of their own. Packets
stay on the bridge. All that a lab makes lies in its namespaces and in one temporary
directory: with the lab's processes it is gone, and they end with the process that made
them, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest

from tests.lab import host
from tests.waits import HANG_S, until

NETWORK = "10.77.0"
CONTROL = "ctl"
REPOSITORY = Path(__file__).parents[2]
NEEDED = (
    "/usr/sbin/sshd",
    "ssh",
    "ssh-keygen",
    "rsync",
    "ip",
    "unshare",
    "nsenter",
    "setpriv",
    "mount",
)
RAYS = {
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "20000",
}
"""What looks at all files and processes of a host does so twice a second and
every twenty seconds, not always: the hosts share one machine's processors.
"""
SSHD = """
Port 22
{listen}
HostKey /root/.ssh/hostkey
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
AuthorizedKeysFile /root/.ssh/authorized_keys
UsePAM no
UseDNS no
PidFile none
MaxStartups 100:30:200
SetEnv {settings}
Subsystem sftp internal-sftp
"""


def missing() -> str | None:
    """Why there can be no lab on this machine; None when there can."""
    if sys.platform != "linux":
        return "hosts are Linux namespaces"
    if os.geteuid() != 0:
        return "namespaces with a network need root"
    absent = [
        name
        for name in NEEDED
        if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
        is None
    ]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install openssh-server rsync iproute2 util-linux)"
    # What follows is refused in most containers.
    script = "mount -t tmpfs none /srv && ip link add eth0 type bridge"
    tried = subprocess.run(
        [*_unshare(), "sh", "-c", script], capture_output=True, text=True
    )
    return (
        f"namespaces are refused ({tried.stderr.strip()})"
        if tried.returncode
        else None
    )


def outside() -> tuple[str, str]:
    """What a lab must leave as it was: mounts and network links of this machine."""
    links = subprocess.run(
        ["ip", "-o", "link"], capture_output=True, text=True, check=True
    ).stdout
    return Path("/proc/self/mountinfo").read_text(), links


@contextlib.contextmanager
def lab_of(num_hosts: int) -> Iterator[Lab]:
    """A lab that must leave nothing behind; the test is skipped where there
    can be none.
    """
    if why := missing():
        pytest.skip(f"there can be no lab here: {why}")
    before = outside()
    with Lab(num_hosts=num_hosts) as lab:
        yield lab
    assert lab.processes() == []
    assert not lab.directory.exists()
    assert outside() == before


def logged_steps(run: Path) -> list[int]:
    """The steps in a run's log, in the order of its files."""
    files = sorted((run / "log").glob("*.jsonl"))
    records = [
        json.loads(line)
        for file in files
        for line in file.read_text().splitlines()
    ]
    return [record["step"] for record in records if "train_loss" in record]


def address_of(name: str) -> str:
    """A host's address on the bridge."""
    return (
        f"{NETWORK}.1"
        if name == CONTROL
        else f"{NETWORK}.{10 + int(name[1:])}"
    )


@dataclass(frozen=True)
class Site:
    """A host's place on the network."""

    address: str
    """That of its own."""
    gateway: str = ""
    """Whom it asks for any other; `ctl` where nothing is said."""
    prefix: int = 24
    others: tuple[str, ...] = ()
    """Addresses by which it is reached, too."""

    @property
    def card(self) -> str:
        """The hardware address: a new one after a power cut would not be known
        to the others for seconds.
        """
        return "02:00:" + ":".join(
            f"{int(part):02x}" for part in self.address.split(".")
        )

    @property
    def assigned(self) -> list[str]:
        """Its addresses as `ip` takes them."""
        return [
            f"{self.address}/{self.prefix}",
            *(f"{other}/32" for other in self.others),
        ]


class Lab:
    """The hosts, from `with` until its end."""

    def __init__(self, num_hosts: int):
        self.names = [f"h{index}" for index in range(num_hosts)]
        self.directory = Path()
        self._sites = {
            name: Site(address_of(name)) for name in (CONTROL, *self.names)
        }
        self._inits = {}
        self._outer = {}
        self._started = []
        self.namespaces = set()
        """Network namespaces (inodes) that the lab has made, gone ones too."""

    def __enter__(self) -> Lab:
        self.directory = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))
        try:
            (self.directory / "shared").mkdir()
            self._keygen(self.directory / "id")
            for name in (CONTROL, *self.names):
                self._prepare(name)
                self.start(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ):
        self.close()

    def close(self):
        """Switch everything off, and delete its files."""
        for name in (*self.names, CONTROL):
            if name in self._outer:
                self._kill(name)
        for process in self._started:  # they ended with their hosts
            process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def shared(self) -> Path:
        """What the hosts see as /srv/nfs."""
        return self.directory / "shared"

    def home(self, name: str) -> Path:
        """A host's /root, as this process sees it."""
        return self.directory / name / "root"

    def add(self, name: str, site: Site, key: str, login: str):
        """Switch another host on: with one public key, and a login of root's,
        as cloud images have them.
        """
        self.names.append(name)
        self._sites[name] = site
        self._prepare(name)
        (self.home(name) / ".ssh" / "authorized_keys").write_text(f"{key}\n")
        users = [
            line
            for line in Path("/etc/passwd").read_text().splitlines()
            if not line.startswith(f"{login}:")
        ]
        (self.directory / name / "passwd").write_text(
            "\n".join([*users, f"{login}:x:0:0::/root:/bin/bash", ""])
        )
        for other in site.others:
            self._ip(CONTROL, "route", "replace", f"{other}/32", "dev", "eth0")
        self.start(name)

    def remove(self, name: str):
        """Switch a host off for ever."""
        self.power_cut(name)
        self.names.remove(name)
        for other in self._sites.pop(name).others:
            self._ip(CONTROL, "route", "delete", f"{other}/32", "dev", "eth0")
        shutil.rmtree(self.directory / name)

    def hosts(self) -> dict[str, str]:
        """The hosts by their own addresses."""
        return {self._sites[name].address: name for name in self.names}

    def answer_to(self, address: str):
        """Give `ctl` one more address (ADDRESS/PREFIX): the gateway of a
        network of hosts that are added.
        """
        self._ip(CONTROL, "address", "add", address, "dev", "eth0")

    def listen(self, name: str, address: str, port: int = 0) -> socket.socket:
        """A socket of this process that listens on a host's own network: what
        runs here is reached there alone.
        """

        def make() -> socket.socket:
            # Of this thread alone, which ends with that: the socket stays
            # where it was made.
            with Path(f"/proc/{self._inits[name]}/ns/net").open() as network:
                if ctypes.CDLL(None, use_errno=True).setns(
                    network.fileno(), 0
                ):
                    raise OSError(
                        ctypes.get_errno(),
                        f"no thread enters the network of {name}",
                    )
            return socket.create_server((address, port))

        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(make).result()

    def start(self, name: str):
        """Switch a host on, with the files that it had; nothing happens to one
        that is on.
        """
        if name in self._outer:
            return
        directory = self.directory / name
        site = self._sites[name]
        (directory / "run" / "ready").unlink(missing_ok=True)
        visible = list(
            dict.fromkeys([sys.base_prefix, sys.prefix, str(REPOSITORY)])
        )
        script = [
            sys.executable,
            "-I",
            str(Path(host.__file__)),
            str(directory),
            name,
        ]
        with (directory / "init.log").open("wb") as log:
            outer = subprocess.Popen(
                [
                    *_unshare(),
                    *script,
                    ",".join(site.assigned),
                    site.gateway or address_of(CONTROL),
                    *visible,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._outer[name] = outer
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        said = (directory / "init.log").read_text
        until(children.read_text, said, every_s=0.02)
        self._inits[name] = int(children.read_text())
        # The child is there a moment before its namespaces are.
        until(
            lambda: _namespace(self._inits[name]) != _namespace(os.getpid()),
            said,
            every_s=0.02,
        )
        self.namespaces.add(_namespace(self._inits[name]))
        if name == CONTROL:
            self._ip(
                CONTROL,
                "link",
                "add",
                "eth0",
                "address",
                site.card,
                "type",
                "bridge",
            )
        else:
            card = [
                "name",
                "eth0",
                "address",
                site.card,
                "netns",
                str(self._inits[name]),
            ]
            self._ip(
                CONTROL,
                "link",
                "add",
                f"v{name}",
                "type",
                "veth",
                "peer",
                *card,
            )
            self._ip(CONTROL, "link", "set", f"v{name}", "master", "eth0")
            self.heal(name)
        until((directory / "run" / "ready").exists, said, every_s=0.02)

    def power_cut(self, name: str):
        """Switch a host off at once: no process and no packet of it leaves a word."""
        # The link would go with the last process, which may take a while.
        self._ip(CONTROL, "link", "delete", f"v{name}")
        self._kill(name)

    def partition(self, name: str):
        """Pull a host's cable; what runs on it goes on."""
        self._ip(CONTROL, "link", "set", f"v{name}", "down")

    def heal(self, name: str):
        """Plug the cable in."""
        self._ip(CONTROL, "link", "set", f"v{name}", "up")

    def run(
        self, name: str, *command: str, check: bool = True, cwd: str = "/root"
    ) -> subprocess.CompletedProcess[str]:
        """A command on a host, with what it printed; a failing one raises with it."""
        limited = ["timeout", "--kill-after=5", f"{HANG_S:g}", *command]
        done = subprocess.run(
            [*self._enter(name, cwd), *limited],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=HANG_S + 20,
        )
        if check and done.returncode:
            raise AssertionError(
                f"{name}: {' '.join(command)} ended with {done.returncode}:\n{done.stdout[-6000:]}"
            )
        return done

    def popen(
        self, name: str, *command: str, cwd: str = "/root", **keywords: object
    ) -> subprocess.Popen[str]:
        """A command on a host that goes on; it ends with the host at the latest."""
        process = subprocess.Popen(  # type: ignore[call-overload]
            [*self._enter(name, cwd), *command],
            **{"stdin": subprocess.DEVNULL, "text": True, **keywords},
        )
        self._started.append(process)
        return process

    def processes(self) -> list[int]:
        """Every process of this machine that lives in a namespace of the lab."""
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit()
            and _namespace(int(entry.name)) in self.namespaces
        ]

    def _enter(self, name: str, cwd: str) -> list[str]:
        settings = {
            "HOME": "/root",
            "USER": "root",
            "TERM": "xterm",
            "LANG": "C.UTF-8",
            "RAY_USAGE_STATS_ENABLED": "0",
            **RAYS,
            "PATH": f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        }
        assignments = [f"{key}={value}" for key, value in settings.items()]
        spaces = ["--mount", "--pid", "--net", "--uts", "--ipc", f"--wd={cwd}"]
        return [
            "nsenter",
            f"--target={self._inits[name]}",
            *spaces,
            "env",
            "-i",
            *assignments,
        ]

    def _ip(self, name: str, *arguments: str):
        subprocess.run(
            [
                "nsenter",
                f"--target={self._inits[name]}",
                "--net",
                "ip",
                *arguments,
            ],
            check=True,
        )

    def _kill(self, name: str):
        with contextlib.suppress(ProcessLookupError):
            os.kill(
                self._inits.pop(name, self._outer[name].pid), signal.SIGKILL
            )
        self._outer.pop(name).wait()

    def _keygen(self, file: Path):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)],
            check=True,
        )

    def _prepare(self, name: str):
        """A host's files, before it is switched on for the first time."""
        directory = self.directory / name
        ssh = directory / "root" / ".ssh"
        for path, mode in (
            (ssh, 0o700),
            (ssh.parent, 0o700),
            (directory / "tmp", 0o1777),
        ):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(mode)
        (directory / "run" / "sshd").mkdir(parents=True, mode=0o755)
        known = [
            ("127.0.0.1", "localhost"),
            *((site.address, each) for each, site in self._sites.items()),
        ]
        (directory / "hosts").write_text(
            "".join(f"{address} {each}\n" for address, each in known)
        )
        (directory / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        if name == CONTROL:
            shutil.copy(self.directory / "id", ssh / "paceline")
            return
        shutil.copy(self.directory / "id.pub", ssh / "authorized_keys")
        self._keygen(ssh / "hostkey")
        site = self._sites[name]
        listen = "\n".join(
            f"ListenAddress {address}"
            for address in (site.address, *site.others)
        )
        settings = " ".join(f"{name}={value}" for name, value in RAYS.items())
        (ssh / "sshd_config").write_text(
            SSHD.format(listen=listen, settings=settings)
        )
        # As if it had been installed there.
        (directory / "root" / "paceline").symlink_to(sys.prefix)


def _unshare() -> list[str]:
    """New namespaces whose processes end with this one."""
    spaces = [
        "--mount",
        "--pid",
        "--net",
        "--uts",
        "--ipc",
        "--fork",
        "--kill-child=KILL",
        "--mount-proc",
    ]
    return [
        "setpriv",
        "--pdeathsig=KILL",
        "unshare",
        *spaces,
        "--propagation=private",
    ]


def _namespace(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
