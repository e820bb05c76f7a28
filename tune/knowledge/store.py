"""The store of what sweeps have found: `knowledge/` beside them, a small JSON file a sweep, written once.

A file's name begins with digests of the task's name and of its code, so that a sweep reads the files of its own kind
only. Many sweeps may write at once: no file is ever changed. What is no entry is named in the log, and skipped.
"""

import hashlib
import json
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import asdict

from trainers.errors import CheckpointError, StorageError
from trainers.storage import Storage
from tune.knowledge.entry import Entry

logger = logging.getLogger(__name__)

_NAME = re.compile(r"([0-9a-f]{8})-([0-9a-f]{8})-(\d{14}-[0-9a-f]{8})\.json")
_MOST_READ = 32
"""The newest of a kind that a sweep reads."""


class Store:
    """The entries below a directory that holds sweeps."""

    def __init__(self, sweeps: Storage) -> None:
        self.storage = sweeps.child("knowledge")

    def write(self, entry: Entry) -> None:
        """Write an entry; return when it is durable. One that is there stays as it is."""
        name = f"{_short(entry.task)}-{_short(entry.code)}-{entry.id}.json"
        if not self.storage.exists(name):
            self.storage.write(name, json.dumps(asdict(entry)).encode())

    def related(self, task: str, code: str) -> list[Entry]:
        """Return the newest entries of a task, by its name or by its code, the newest first."""
        own = _short(task), _short(code)
        of_code = own[1] if code else None
        names = [(it[3], name) for name, it in self._names() if it[1] == own[0] or it[2] == of_code]
        return [entry for _, name in sorted(names, reverse=True)[:_MOST_READ] if (entry := self._read(name))]

    def entries(self) -> list[Entry]:
        """Return all entries, the oldest first."""
        return sorted(filter(None, (self._read(name) for name, _ in self._names())), key=lambda one: (one.time, one.id))

    def delete(self, name: str) -> bool:
        """Delete the entry of an id; return whether there was one."""
        files = [file for file, found in self._names() if found[3] == name]
        for file in files:
            self.storage.delete(file)
        return bool(files)

    def _names(self) -> Iterator[tuple[str, re.Match[str]]]:
        for name in self.storage.names():
            if found := _NAME.fullmatch(name):
                yield name, found

    def _read(self, name: str) -> Entry | None:
        try:
            return self.storage.read_json(name, Entry)
        except (CheckpointError, StorageError) as error:  # damaged, deleted meanwhile, or another user's
            logger.warning("%s: what that sweep found does not count", error)
            return None


def entry_id(sweep: str, began: float) -> str:
    """Return the id of a sweep's entry: the time of its first trial, and a digest of that and of its directory."""
    digest = hashlib.sha256(f"{sweep} {began!r}".encode()).hexdigest()[:8]
    return f"{time.strftime('%Y%m%d%H%M%S', time.gmtime(began))}-{digest}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
