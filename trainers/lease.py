"""Leases: of all starts of a run or sweep, one at a time writes to its directory.

`lease.json` names the holder: a token, the process, and a count that a thread
of the holder raises every five seconds. A new start that finds a lease

- of an ended process on this machine takes the lease over immediately;
- of a live process on this machine is refused;
- of any other process, or with damaged content, is refused if the count
  changes within 30 s, and otherwise takes the lease over.

Clocks of different machines are never compared. On a local directory two
starts never both create a lease (O_EXCL). Elsewhere (pyarrow has no
conditional put) and in a takeover, a start writes the lease and reads it again
a second later: the last writer holds it. If a delayed process writes even
later, the fence protects the run: before a write or deletion in the run's
directory, each process of the run reads the lease, unless it did so within the
last half second, and raises LeaseError if the lease is gone or belongs to
another start. So a process that has lost the lease starts no write after half
a second; it may only finish a file that it had begun.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainers.errors import (
    ConfigError,
    LeaseError,
    StorageError,
    first_line,
)
from trainers.storage import Storage

logger = logging.getLogger(__name__)

LEASE = "lease.json"
_WRITTEN = {
    "config.yaml": r"config\.yaml|metrics\.csv|newest_report\.txt"
    r"|(checkpoint_manager_snapshot|environment|explanation|microbatch|newest_report|result)\.json"
    r"|checkpoints(/step-\d+)?|checkpoint_\d.*|(live|log)(/\d+\.jsonl)?|tensorboard(/events\..*)?"
    r"|(hangs|memory|profile|tracking)(/.*)?|\.(nfs|shared-|validate_storage_marker).*",
    "sweep.yaml": r"(best|sweep)\.yaml|metrics\.csv|results\.parquet|report\.html"
    r"|(boundary|progress|summary)\.json|(steering|trials)(/.+\.json)?|before(/.+\.(json|yaml))?"
    r"|(lanes|population|states|tensorboard|tracking|tune)(/.*)?|\.(nfs|shared-|validate_storage_marker).*",
}
"""The files, with the directories above them, that Paceline, Ray and NFS write
there, by the file that marks a directory. Earlier versions' files are included.
"""
BEAT_S = 5.0
STALE_S = 30.0
SETTLE_S = 1.0
_LOOK_S = 1.0
_TRUSTED_S = 0.5
"""How long a check of the lease stays valid: shorter than SETTLE_S, after
which a newcomer begins to write.
"""


class InUseError(ConfigError):
    """Another process has the lease."""


@dataclass(frozen=True)
class Holder:
    """The content of `lease.json`."""

    token: str
    host: str
    machine: str | None
    """The machine's boot id and the namespace of its process ids; None if the
    system does not tell.
    """
    pid: int
    started: str | None
    """When the process started, in ticks since the boot."""
    since: str
    count: int = 0

    @staticmethod
    def this_process() -> Holder:
        """Return this process as a new holder."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        pid = os.getpid()
        return Holder(
            secrets.token_hex(8),
            socket.gethostname(),
            _machine(),
            pid,
            _started(pid),
            since,
        )

    @staticmethod
    def read(data: bytes) -> Holder | None:
        """Parse `lease.json`; None if it is damaged or incomplete."""
        try:
            return Holder(**json.loads(data))
        except (ValueError, TypeError):
            return None

    def write(self) -> bytes:
        """Return the content of `lease.json`."""
        return json.dumps(asdict(self)).encode()

    @property
    def is_here(self) -> bool:
        """Whether the holder is on this machine, where its process can be checked."""
        return self.machine is not None and self.machine == _machine()

    @property
    def is_alive(self) -> bool:
        """Whether the holder's process, which must be on this machine, is running."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        started = _started(self.pid)
        if started is None:
            return False
        return not self.started or started in ("", self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def _machine() -> str | None:
    try:
        boot = (
            Path("/proc/sys/kernel/random/boot_id")
            .read_text(encoding="ascii")
            .strip()
        )
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """Return when a process started; None if it has ended, "" if that is unreadable."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(
            encoding="utf-8", errors="replace"
        )
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else rest[18]


class Fence:
    """Raises LeaseError if `token` no longer holds a directory's lease.

    A Fence can be pickled for every process of a run.

    `mark` is the file that identifies the directory's kind: if it is missing,
    the directory was deleted.
    """

    def __init__(self, storage: Storage, mark: str, token: str) -> None:
        self._storage = storage
        self._mark = mark
        self._token = token
        self._looked = -math.inf

    def __reduce__(self) -> tuple[type[Fence], tuple[Storage, str, str]]:
        return (Fence, (self._storage, self._mark, self._token))

    def __call__(self) -> None:
        """Check the lease, unless it was checked within the last half second."""
        now = time.monotonic()
        if now - self._looked < _TRUSTED_S:
            return
        check_token(self._storage, self._token)
        if not self._storage.exists(self._mark):
            raise _gone(self._storage, self._mark)
        self._looked = now


def fenced(storage: Storage, mark: str, token: str) -> Storage:
    """Return a Storage that only writes while `token` holds the directory's lease.

    An empty token means that there is no lease to check.
    """
    return (
        Storage(storage.uri, Fence(storage, mark, token)) if token else storage
    )


def check_token(storage: Storage, token: str) -> None:
    """Raise LeaseError unless `token` holds the lease of the directory."""
    data = _read(storage)
    if data is None:
        raise _gone(storage, LEASE)
    holder = Holder.read(data)
    if holder is None or holder.token != token:
        by = holder or "another start"
        raise LeaseError(
            f"{storage.uri} was taken over by {by}: this process writes nothing more there"
        )


def is_held(storage: Storage) -> bool:
    """Return whether a process holds the lease, as far as this machine can tell."""
    data = _read(storage)
    holder = Holder.read(data) if data is not None else None
    if holder is None:
        return False
    return not holder.is_here or holder.is_alive


def _gone(storage: Storage, name: str) -> LeaseError:
    return LeaseError(
        f"{storage.locate(name)} is gone: the directory was deleted, or moved, while it was in use"
    )


def _read(storage: Storage) -> bytes | None:
    """Return the content of the lease; None if there is none."""
    try:
        return storage.read(LEASE)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


@contextlib.contextmanager
def held(storage: Storage, mark: str) -> Iterator[str]:
    """Hold the lease of a directory during the block, and yield its token.

    Use this context in the main thread.

    Raises ConfigError at the start if another process holds the lease, or the
    directory is not writable or of another kind, and LeaseError at the end if
    the lease was lost.
    When the lease is lost, this process receives SIGTERM. If SIGTERM and
    SIGHUP have no handlers, they end the block as Ctrl-C does.
    """
    unheeded = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in unheeded:
        signal.signal(number, signal.default_int_handler)
    try:
        storage.prove_writable()
        lease = _Lease(storage)
        # Files of starts that have ended: from here on only this start writes.
        storage.clear_aside()
        try:
            _check_kind(storage, mark, list(filter(storage.exists, _WRITTEN)))
            yield lease.token
            Fence(storage, mark, lease.token)()
        except (ConfigError, LeaseError):
            raise
        except BaseException as error:
            lease.explain(error)
            raise
        finally:
            lease.release()
    finally:
        for number in unheeded:
            signal.signal(number, signal.SIG_DFL)


class _Lease:
    """A directory's lease, from claim to release."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._holder = Holder.this_process()
        self.token = self._holder.token
        while not self._claim():
            pass
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, name="lease", daemon=True
        )
        self._thread.start()

    def _claim(self) -> bool:
        """Write the lease if that is allowed; return whether this process holds it."""
        found = _read(self._storage)
        data = self._holder.write()
        if found is not None and not self._may_take(found):
            return False
        if found is None and self._storage.is_local:
            return self._create(data)
        self._storage.write(LEASE, data)
        time.sleep(SETTLE_S)
        return _read(self._storage) == data

    def _create(self, data: bytes) -> bool:
        """Create the lease file; return False if it already exists."""
        try:
            new = os.open(
                Path(self._storage.path, LEASE),
                os.O_WRONLY | os.O_CREAT | os.O_EXCL,
                0o600,
            )
            with os.fdopen(new, "wb") as file:
                file.write(data)
        except FileExistsError:
            return False
        except OSError as error:
            raise StorageError(
                f"could not write {self._storage.locate(LEASE)}: {first_line(error)}"
            ) from error
        return True

    def _may_take(self, found: bytes) -> bool:
        """Return whether the holder is gone; ConfigError if it is alive.

        Returns False if the lease has changed meanwhile.
        """
        holder = Holder.read(found)
        who = holder or "a start that left no readable lease"
        if holder is not None and holder.is_here:
            if holder.is_alive:
                raise self._in_use(holder)
        else:
            logger.info(
                "%s is held by %s: checking for %.0f s whether that process is alive",
                self._storage.uri,
                who,
                STALE_S,
            )
            deadline = time.monotonic() + STALE_S
            while time.monotonic() < deadline:
                time.sleep(_LOOK_S)
                now = _read(self._storage)
                if now != found:
                    new = Holder.read(now or b"")
                    if holder and new and new.token == holder.token:
                        raise self._in_use(new)
                    return False
        logger.info(
            "%s is taken over from %s, which has ended", self._storage.uri, who
        )
        return True

    def _in_use(self, holder: Holder) -> ConfigError:
        rule = f"is in use: {holder}, writes to {self._storage.uri}"
        fix = "stop that process, or give another `--name`"
        return InUseError("name", self._storage.name, rule, fix)

    def _beat(self) -> None:
        """Renew the lease until it is released or lost; the body of a thread."""
        while not self._over.wait(BEAT_S):
            try:
                check_token(self._storage, self.token)
                self._holder = replace(
                    self._holder, count=self._holder.count + 1
                )
                self._storage.write(LEASE, self._holder.write())
            except LeaseError as error:
                logger.error("%s", error)
                signal.pthread_kill(
                    threading.main_thread().ident or 0, signal.SIGTERM
                )
                return
            except StorageError as error:
                logger.warning("the lease could not be renewed: %s", error)

    def explain(self, error: BaseException) -> None:
        """Raise LeaseError if the lease is lost, since that caused `error`."""
        try:
            check_token(self._storage, self.token)
        except LeaseError as lost:
            raise lost from error
        except StorageError:
            pass  # storage that cannot be read tells nothing

    def release(self) -> None:
        """Delete the lease, if it is still ours."""
        self._over.set()
        self._thread.join()
        with contextlib.suppress(StorageError):
            check_token(self._storage, self.token)
            self._storage.delete(LEASE)


def _check_kind(storage: Storage, mark: str, names: Sequence[str]) -> None:
    """Raise ConfigError if a directory with files `names` is not of the kind of `mark`."""
    for name in names:
        if mark not in names or not re.fullmatch(_WRITTEN[mark], name):
            rule = f"names {storage.uri}, which holds {name} beside what belongs to {mark}"
            fix = "give another `--name`, or move that elsewhere"
            raise ConfigError("name", storage.name, rule, fix)


def delete_own(storage: Storage, mark: str) -> None:
    """Delete all files but the lease; ConfigError if any is not of a `mark`'s kind."""
    names = [name for name in storage.names() if name != LEASE]
    inner = []
    for name in names:
        if storage.info(name).type.name == "Directory":
            inner += [f"{name}/{below}" for below in storage.names(name)]
    _check_kind(storage, mark, names + inner)
    # The mark goes last: as long as it exists, an interrupted deletion can be
    # repeated.
    for name in sorted(names, key=lambda name: name == mark):
        storage.delete(name)
