"""The checkpoints of one run as one process sees them: files and manifests.

Nothing here unpickles code, and nothing is a collective:
trainers/checkpoint/checkpoints.py makes the ranks agree.
"""

import contextlib
import hashlib
import io
import logging
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainers.checkpoint.manifest import Best, FileEntry, Manifest, folder_name, surplus
from trainers.checkpoint.row_shards import RowReader, write_tensors
from trainers.errors import CheckpointError, StorageError, first_line
from trainers.storage import Storage, retrying

logger = logging.getLogger(__name__)
_MOST_MANIFEST_BYTES = 16 << 20  # some 100,000 ranks


class _Hashing(io.RawIOBase):
    """A stream that counts and hashes what passes through it on its way to storage."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self.sha256.update(view)
        self.size += len(view)
        return len(view)


class Archive:
    """The directory `checkpoints` of a run.

    Methods raise StorageError when storage fails for good.

    With `config`, the run's own, a checkpoint of another run is none: CheckpointError
    says which key differs.
    """

    def __init__(
        self,
        run: Storage,
        best: Best | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.storage = run.child("checkpoints")
        self.best = best
        self._config = config

    def names(self) -> list[str]:
        """All checkpoints, whole or not, oldest first."""
        return [
            name
            for name in self.storage.names()
            if re.fullmatch("step-[0-9]{12}", name)
        ]

    def is_complete(self, name: str) -> bool:
        """Whether it was written to its end; it may have been damaged since."""
        return self.storage.exists(f"{name}/manifest.json")

    def begin(self, name: str) -> None:
        """Delete the manifest: a checkpoint that changes must not look complete."""
        self.storage.delete(f"{name}/manifest.json")

    def write(self, name: str, file: str, state: dict[str, Any]) -> FileEntry:
        """Write one file of a checkpoint; its entry in the manifest."""
        # To a stream, not to a path: there torch would hold the GIL through the whole
        # write.
        return self._write(name, file, lambda stream: torch.save(state, stream))

    def write_rows(self, name: str, file: str, rows: Mapping[str, Tensor]) -> FileEntry:
        """Write one rank's rows; their file's entry in the manifest."""
        return self._write(name, file, lambda stream: write_tensors(stream, rows))

    @retrying
    def _write(self, name: str, file: str, content: Callable[[Any], None]) -> FileEntry:
        path = f"{name}/{file}"
        try:
            with self.storage.writer(path) as stream:
                hashing = _Hashing(stream)
                content(hashing)
        except (
            RuntimeError
        ) as error:  # torch's zip writer hides the stream's own error in one of these
            cause = _os_error(error) or error
            raise StorageError(
                f"could not write {self.storage.locate(path)}: {cause}"
            ) from cause
        return FileEntry(hashing.size, hashing.sha256.hexdigest())

    def seal(self, manifest: Manifest, keep: int) -> None:
        """Write the manifest, which makes the checkpoint whole; delete surplus ones."""
        name = folder_name(manifest.step)
        if missing := [
            file for file in manifest.files if not self.storage.exists(f"{name}/{file}")
        ]:
            fix = "storage_path must be shared by all nodes"
            raise StorageError(
                f"{missing[0]} was written by another worker and is not seen by rank 0: {fix}"
            )
        self.storage.clear_aside(
            name
        )  # every rank has written: what is there is a killed one's
        self.storage.write(f"{name}/manifest.json", manifest.to_json())
        names = self.names()
        complete = [other for other in names if self.is_complete(other)]
        ranked = self._ranked([other for other in complete if other <= name])
        for other in surplus(
            names, complete, name, keep, ranked[0] if ranked else None
        ):
            self.storage.delete(other)

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises CheckpointError when it is incomplete, damaged or another run's.
        """
        if not self.is_complete(name):
            raise CheckpointError("it has no manifest: writing it was cut off")
        found = Manifest.from_json(
            self.storage.read(f"{name}/manifest.json", _MOST_MANIFEST_BYTES)
        )
        if folder_name(found.step) != name:
            raise CheckpointError(f"it is that of step {found.step}, by its manifest")
        if self._config:
            found.require_run(self._config)
        return found

    def newest(self) -> str | None:
        """The newest complete checkpoint; damaged ones are named in the log."""
        return self._first_whole(self.names()[::-1])

    def best_name(self) -> str | None:
        """Return the complete checkpoint with the best evaluation.

        Damaged ones are named in the log.
        """
        return self._first_whole(self._ranked(self.names()))

    def best_value(self) -> float | None:
        """The figure of that evaluation."""
        name = self.best_name()
        if self.best and name:
            return self.manifest(name).metrics[self.best.metric]
        return None

    def choose(self, which: str) -> str:
        """Return the checkpoint that a user means by `newest`, `best` or `step-123`.

        Raises CheckpointError when there is none.
        """
        if which in ("newest", "best"):
            if which == "best" and self.best is None:
                rule = "is the best: its configuration has no `checkpoint.best`; name newest, or a step"
                raise CheckpointError(
                    f"no checkpoint of {self.storage.parent.uri} {rule}"
                )
            found = self.newest() if which == "newest" else self.best_name()
            if found is None:
                evaluated = " of an evaluated step" if which == "best" else ""
                raise CheckpointError(
                    f"there is no complete checkpoint{evaluated} in {self.storage.uri}"
                )
            return found
        step = which.removeprefix("step-")
        name = folder_name(int(step)) if step.isdecimal() and len(step) <= 12 else which
        names = self.names()
        if name not in names:
            there = (
                ", ".join(f"step-{int(other.removeprefix('step-'))}" for other in names)
                or "none"
            )
            raise CheckpointError(
                f"there is no checkpoint {which} in {self.storage.uri}; there is {there}"
            )
        try:
            self.verify(name)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {self.storage.locate(name)} cannot be used: {error}"
            ) from error
        return name

    def read_state(self, name: str) -> tuple[dict[str, Any], RowReader | None]:
        """Return what rank 0 wrote, and what reads the rows of all ranks.

        The second is None where no rank wrote rows.

        Raises CheckpointError as `read` does.
        """
        state = self.read(name, "state.pt")
        manifest = self.manifest(name)
        return state, RowReader(
            self.storage, name, manifest, state
        ) if manifest.is_sharded else None

    def read(self, name: str, file: str) -> dict[str, Any]:
        """Return the content of one file, on the CPU.

        Raises CheckpointError when it is more than tensors and plain data.
        """
        where = self.storage.locate(f"{name}/{file}")
        cause: Exception | None = None
        problem = "it holds no mapping"
        data = self.storage.read(
            f"{name}/{file}", self.manifest(name).files[file].bytes
        )
        try:
            with contextlib.closing(io.BytesIO(data)) as stream:
                with zipfile.ZipFile(stream) as archive:
                    if sum(info.file_size for info in archive.infolist()) > len(data):
                        raise CheckpointError("it would grow when it is unpacked")
                stream.seek(0)
                state = torch.load(stream, map_location="cpu", weights_only=True)
            if isinstance(state, dict):
                return state
        except MemoryError:
            raise
        except (
            pickle.UnpicklingError
        ) as error:  # torch's own words advise to unpickle it all the same
            cause = error
            problem = "it holds more than tensors and plain data, or is damaged"
        except Exception as error:  # a stranger's bytes may bring forth any
            cause = error
            problem = first_line(error)
        raise CheckpointError(f"{where} is no checkpoint of ours: {problem}") from cause

    def _first_whole(self, names: list[str]) -> str | None:
        for name in names:
            try:
                self.verify(name)
                return name
            except (CheckpointError, StorageError) as error:
                self.leave_out(name, str(error))
        return None

    def leave_out(self, name: str, problem: str) -> None:
        """Say that a checkpoint is not used, and why."""
        logger.warning(
            "checkpoint %s is left out: %s", self.storage.locate(name), problem
        )

    def _ranked(self, names: list[str]) -> list[str]:
        if self.best is None:
            return []
        manifests = {}
        for name in names:
            with contextlib.suppress(CheckpointError):  # not whole, so not the best
                manifests[name] = self.manifest(name)
        return self.best.ranked(manifests)

    def verify(self, name: str, rank: int = 0, world_size: int = 1) -> None:
        """Raise CheckpointError unless the files are as the manifest says.

        With `world_size`, only a rank's share of the files is read.
        """
        manifest = self.manifest(name)
        # Of as many ranks as have written, each has the files that it wrote.
        for file, entry in sorted(manifest.files.items())[rank::world_size]:
            if self._sha256(f"{name}/{file}", entry.bytes) != entry.sha256:
                raise CheckpointError(f"{file} does not match its checksum")

    @retrying
    def _sha256(self, path: str, most_bytes: int) -> str:
        sha256 = hashlib.sha256()
        with self.storage.reader(path, most_bytes) as stream:
            while chunk := stream.read(
                1 << 20
            ):  # larger than file_digest's: each is a request to an object store
                sha256.update(chunk)
        return sha256.hexdigest()


def _os_error(error: BaseException | None) -> OSError | None:
    """Return the operating system's own error behind another exception."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
