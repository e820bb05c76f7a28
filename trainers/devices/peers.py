"""Check what ranks on several hosts must share: versions and storage."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import trainers
from trainers.errors import ConfigError, StorageError
from trainers.storage import Storage
from trainers.versions import package_versions

if TYPE_CHECKING:
    from trainers.devices.group import Group

_SEEN_WITHIN_S = 5.0
"""How late a file of another host may appear: NFS caches a directory for a few seconds.
"""


def code_digest(packages: tuple[str, ...] = ("trainers",)) -> str:
    """Return a hash of Paceline's code as it is imported here.

    A job brings its own copy of the code, while hosts have one installed.
    """
    digest = hashlib.sha256()
    home = Path(trainers.__file__).parent.parent
    for package in packages:
        for file in sorted((home / package).rglob("*.py")):
            digest.update(str(file.relative_to(home)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def own_versions() -> dict[str, str]:
    """Return the versions that must be equal on all ranks."""
    return package_versions("torch") | {"paceline": code_digest()}


def check_peers(group: Group, storage: Storage | None) -> None:
    """Check that all ranks have equal versions and can read what rank 0 writes.

    Every rank must call it.

    Raises the same ConfigError on every rank. Takes a few milliseconds, and is for runs
    on more than one host.
    """
    seen = group.gather((socket.gethostname(), own_versions()))
    for name in seen[0][1]:
        usual = Counter(versions[name] for _, versions in seen).most_common(1)[0][0]
        for rank, (host, versions) in enumerate(seen):
            if versions[name] != usual:
                raise ConfigError(
                    f"{name} of rank {rank} on {host}",
                    versions[name],
                    f"must be {usual} as on the other ranks",
                    "install the same on every node; `python -m cluster check` names those that differ",
                )
    if storage is not None:
        _check_storage(group, storage, [host for host, _ in seen])


def _check_storage(group: Group, storage: Storage, hosts: list[str]) -> None:
    name = group.first(f".shared-{uuid.uuid4().hex[:8]}")
    wrong = None
    if group.rank == 0:
        try:
            storage.write(name, name.encode())
        except StorageError as error:
            wrong = f"cannot be written: {error}"
    answers = group.gather(group.first(wrong) or _read(storage, name))
    if group.rank == 0:
        with contextlib.suppress(StorageError):  # a hidden file of some bytes is left
            storage.delete(name)
    for host, answer in zip(hosts, answers, strict=True):
        if answer is not None:
            same = "mount the same directory on every node (for nodes of several users: PACELINE_FILE_MODE=644)"
            raise ConfigError(
                "storage_path",
                storage.uri,
                f"{answer} (on {host})",
                f"{same}, or use a URI such as s3://bucket/path",
            )


def _read(storage: Storage, name: str) -> str | None:
    deadline = time.monotonic() + _SEEN_WITHIN_S
    try:
        while not storage.exists(name):
            if time.monotonic() > deadline:
                return "must be shared by all nodes, and does not hold what rank 0 has written to it"
            time.sleep(0.1)
        if storage.read(name) != name.encode():
            return "must be shared by all nodes, and holds something else than rank 0 has written to it"
    except StorageError as error:
        return f"cannot be read: {error}"
    return None
