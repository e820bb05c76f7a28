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

_LOOKS = 50
"""How many times, every 0.1 s, to look for another host's file: NFS caches a
directory for a few seconds.
"""


def code_digest(packages: tuple[str, ...] = ("trainers",)) -> str:
    """Return a hash of the copy of Paceline's code that this process imports.

    A job brings its own copy, while hosts have one installed.
    """
    digest = hashlib.sha256()
    home = Path(trainers.__file__).parent.parent
    for package in packages:
        for file in sorted((home / package).rglob("*.py")):
            digest.update(
                str(file.relative_to(home)).encode() + file.read_bytes()
            )
    return digest.hexdigest()[:12]


def own_versions() -> dict[str, str]:
    """Return the versions that must be equal on all ranks."""
    return package_versions("torch") | {"paceline": code_digest()}


def check_peers(group: Group, storage: Storage | None) -> None:
    """Check that all ranks have equal versions and can read what rank 0 writes.

    Every rank must call it.

    Raises the same ConfigError on every rank. Meant for runs on several hosts.
    """
    seen = group.gather((socket.gethostname(), own_versions()))
    for name in seen[0][1]:
        counts = Counter(versions[name] for _, versions in seen)
        usual, _ = counts.most_common(1)[0]
        for rank, (host, versions) in enumerate(seen):
            if versions[name] != usual:
                like = next(
                    other
                    for other, (_, theirs) in enumerate(seen)
                    if theirs[name] == usual
                )
                raise ConfigError(
                    f"{name} of rank {rank} on {host}",
                    versions[name],
                    f"must be {usual}, as on rank {like}",
                    "install the same version on every node; `python -m cluster check` names nodes that differ",
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
            wrong = str(error)
    wrong = group.first(wrong)
    if wrong is not None:
        raise ConfigError(
            "storage_path",
            storage.uri,
            f"cannot be written from {hosts[0]}, the host of rank 0 ({wrong})",
            "give a directory or URI that this user may write to",
        )
    answers = group.gather(_read(storage, name, hosts[group.rank]))
    if group.rank == 0:
        with contextlib.suppress(StorageError):  # a small hidden file is left
            storage.delete(name)
    for answer in filter(None, answers):
        same = "mount the same directory on every node (if the nodes run as different users, set PACELINE_FILE_MODE=644)"
        raise ConfigError(
            "storage_path",
            storage.uri,
            answer,
            f"{same}, or use a URI such as s3://bucket/path",
        )


def _read(storage: Storage, name: str, host: str) -> str | None:
    looks = 0
    try:
        while not storage.exists(name):
            looks += 1
            if looks == _LOOKS:
                return f"must be shared by all nodes, but {host} does not see a file that rank 0 wrote"
            time.sleep(0.1)
        if storage.read(name) != name.encode():
            return f"must be shared by all nodes, but {host} reads something else than rank 0 wrote"
    except StorageError as error:
        return f"cannot be read from {host} ({error})"
    return None
