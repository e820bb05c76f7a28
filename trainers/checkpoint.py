"""Checkpoints: written straight to storage, a manifest with checksums last; the newest complete one is resumed.

    checkpoints/step-000000000123/state.pt        model, optimizer, scaler, task, position
                                  rank-00000.pt   random state of each rank
                                  manifest.json   names, sizes and SHA-256 of the files above

A checkpoint without its manifest, or with a file that does not match it, is not used. Nothing here unpickles code.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import pickle
import time
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from trainers.errors import CheckpointError, StorageError
from trainers.parallel import Group
from trainers.storage import Storage, retrying

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as one rank reads it."""

    name: str
    state: dict[str, Any]
    rank_state: dict[str, Any] | None
    """None when the checkpoint was written by another number of workers."""


class _Hashing(io.RawIOBase):
    """A stream that counts and hashes what passes through it on its way to storage."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._sha256, self.size = stream, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self._sha256.update(view)
        self.size += len(view)
        return len(view)

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


class Checkpoints:
    """The checkpoints of one run. Every rank must call `save` and `load` equally often."""

    def __init__(self, run: Storage, group: Group, keep: int) -> None:
        self.storage, self.group, self.keep = run.child("checkpoints"), group, keep

    def save(self, step: int, state: dict[str, Any], rank_state: dict[str, Any]) -> str:
        """Write one checkpoint and return where it is; only then are older ones deleted.

        Raises StorageError, on every rank, when any rank could not write.
        """
        name = f"step-{step:012d}"
        entries: dict[str, dict[str, Any]] = {}
        problem = None
        try:
            if self.group.rank == 0:
                self.storage.delete(f"{name}/manifest.json")  # while files change, it must not look complete
                entries["state.pt"] = self._write(f"{name}/state.pt", state)
            own = _rank_file(self.group.rank)
            entries[own] = self._write(f"{name}/{own}", rank_state)
        except StorageError as error:
            problem = str(error)
        answers = self.group.gather((entries, problem))
        problem = next((met for _, met in answers if met), None)
        if problem is None:
            files = {file: entry for written, _ in answers for file, entry in written.items()}
            problem = self.group.first(self._finish(name, step, files) if self.group.rank == 0 else None)
        if problem is not None:
            raise StorageError(f"checkpoint {self.storage.locate(name)} could not be written: {problem}")
        return self.storage.locate(name)

    def _write(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        def once() -> dict[str, Any]:
            try:
                with self.storage.writer(name) as stream:
                    hashing = _Hashing(stream)
                    torch.save(state, hashing)  # type: ignore[arg-type]
            except RuntimeError as error:  # torch's zip writer hides the stream's own error in one of these
                cause = _os_error(error) or error
                raise StorageError(f"could not write {self.storage.locate(name)}: {cause}") from cause
            return {"bytes": hashing.size, "sha256": hashing.hexdigest()}

        return retrying(once)

    def _finish(self, name: str, step: int, files: dict[str, dict[str, Any]]) -> str | None:
        manifest = {
            "format": FORMAT,
            "step": step,
            "world_size": self.group.world_size,
            "files": files,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        try:
            missing = [file for file in files if not self.storage.exists(f"{name}/{file}")]
            if missing:
                return (
                    f"{missing[0]} was written by another worker and is not seen by rank 0: "
                    "storage_path must be shared by all nodes"
                )
            self.storage.write(f"{name}/manifest.json", json.dumps(manifest, indent=2).encode())
            # Later steps can only be damaged ones of the part of the run that is being done again.
            names = self._named()
            for other in {*names} - {*[known for known in names if known <= name][-self.keep :]}:
                self.storage.delete(other)
        except StorageError as error:
            return str(error)
        return None

    def _named(self) -> list[str]:
        return [name for name in self.storage.names() if name.startswith("step-")]

    def load(self) -> Loaded | None:
        """The newest complete checkpoint, or None when there is none; damaged ones are named in the log."""
        name = self.group.first(self._newest() if self.group.rank == 0 else None)
        if name is None:
            return None
        manifest = self._manifest(name)
        same_size = manifest["world_size"] == self.group.world_size
        own = self._read(f"{name}/{_rank_file(self.group.rank)}") if same_size else None
        return Loaded(name, self._read(f"{name}/state.pt"), own)

    def newest(self) -> str | None:
        """Where the newest complete checkpoint is; for one process."""
        name = self._newest()
        return self.storage.locate(name) if name else None

    def _newest(self) -> str | None:
        for name in reversed(self._named()):
            try:
                self._verify(name)
            except (CheckpointError, StorageError) as error:
                logger.warning("checkpoint %s is left out: %s", self.storage.locate(name), error)
            else:
                return name
        return None

    def _manifest(self, name: str) -> dict[str, Any]:
        try:
            manifest = json.loads(self.storage.read(f"{name}/manifest.json"))
            if manifest["format"] != FORMAT:
                raise CheckpointError(f"its format is {manifest['format']}, this version reads {FORMAT}")
            files = {str(file): str(entry["sha256"]) for file, entry in manifest["files"].items()}
            world_size = int(manifest["world_size"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"its manifest is damaged ({error!r})") from error
        wanted = {"state.pt", *(_rank_file(rank) for rank in range(world_size))}
        if missing := sorted(wanted - set(files)):
            raise CheckpointError(f"its manifest is damaged ({missing[0]} does not stand in it)")
        return {"world_size": world_size, "files": files}

    def _verify(self, name: str) -> None:
        if not self.storage.exists(f"{name}/manifest.json"):
            raise CheckpointError("it has no manifest: writing it was cut off")
        for file, expected in self._manifest(name)["files"].items():
            sha256 = hashlib.sha256()
            with self.storage.reader(f"{name}/{file}") as stream:
                while chunk := stream.read(1 << 20):
                    sha256.update(chunk)
            if sha256.hexdigest() != expected:
                raise CheckpointError(f"{file} does not match its checksum")

    def _read(self, name: str) -> dict[str, Any]:
        try:
            with self.storage.reader(name) as stream, contextlib.closing(io.BytesIO(stream.read())) as data:
                state = torch.load(data, map_location="cpu", weights_only=True)
        except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.storage.locate(name)} is no checkpoint of ours: {error}") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{self.storage.locate(name)} is no checkpoint of ours: it holds no mapping")
        return state


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _os_error(error: BaseException | None) -> OSError | None:
    """The operating system's own error, or our explanation of it, behind another exception."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
