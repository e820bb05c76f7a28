"""The cluster that runs on this machine for this user beyond a command.

Its address lies in a directory of the user's own below the system's temporary one.

Environment read: RAY_ADDRESS, without which a cluster is embedded and nothing outlives a command.
"""

import contextlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

_CLUSTER = "cluster.json"


def directory() -> Path | None:
    """The directory of what this user runs, made where it is missing; None where anybody else could write to it."""
    place = _place()
    with contextlib.suppress(OSError):
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return place
    return None


def tidy() -> None:
    """Delete the directory where nothing is in it."""
    with contextlib.suppress(OSError):
        _place().rmdir()


def cluster() -> dict[str, Any] | None:
    """The cluster that `python -m cluster start` keeps on this machine; None where there is none, or it has died."""
    place = _place() / _CLUSTER
    if not place.exists() or directory() is None:
        return None
    try:
        known: dict[str, Any] = json.loads(place.read_text())
        return known if _begun(known["pid"]) == known["begun"] else None
    except (OSError, ValueError, KeyError):
        return None


def note_cluster(known: dict[str, Any] | None) -> None:
    """Note the cluster of this machine, or that it has ended."""
    if (place := directory()) is not None:
        if known is None:
            (place / _CLUSTER).unlink(missing_ok=True)
            tidy()
        else:
            (place / _CLUSTER).write_text(json.dumps({**known, "begun": _begun(known["pid"])}))


def _place() -> Path:
    return Path(tempfile.gettempdir(), f"paceline-{os.getuid()}")


def _begun(pid: int) -> str:
    """When a process began, as Linux has it: another one may have the number by now."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def join_cluster() -> None:
    """Let this process, where no RAY_ADDRESS says otherwise, use the cluster of this machine where there is one."""
    if not os.environ.get("RAY_ADDRESS") and (known := cluster()) is not None:
        os.environ["RAY_ADDRESS"] = known["address"]
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # as it was started, see trainers/on_ray/environment.py


def has_cluster() -> bool:
    """Whether this process has a cluster that was there before it: without one it embeds its own."""
    return os.environ.get("RAY_ADDRESS", "") not in ("", "local")
