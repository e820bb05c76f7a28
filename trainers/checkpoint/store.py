"""The checkpoints of a run on storage, which all ranks write and choose together.

checkpoints/step-000000000123/
    state.pt                   model, optimizer, scaler, task, position
    rank-00000.pt              random state of each rank
    shard-00000.safetensors    each rank's rows of a sharded model; `state.pt`
                               then has only the shapes of its tensors
    manifest.json              names, sizes and SHA-256 of the files above,
                               metrics, versions, config, and a seal over its
                               own text

A checkpoint is not used if it has no manifest, if a file does not match its
manifest, if it belongs to another run, or if it does not fit the model. The
next older one is used instead; it is an error if there are complete
checkpoints and none can be used.
"""

import contextlib
import copy
import hashlib
import io
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

from trainers.checkpoint._row_shards import RowReader, write_tensors
from trainers.checkpoint.manifest import (
    Best,
    Figures,
    FileEntry,
    Manifest,
    folder_name,
    rank_file,
    shard_file,
    surplus,
)
from trainers.checkpoint.validation import Place, State, map_tree
from trainers.devices.group import Group
from trainers.errors import (
    FIX,
    CheckpointError,
    LeaseError,
    PacelineError,
    StorageError,
    chain,
)
from trainers.storage import Storage, retrying
from trainers.versions import package_versions

logger = logging.getLogger(__name__)
T = TypeVar("T")
_Entries = dict[str, FileEntry]
_Buffers = dict[Place, Tensor]


class _Hashing(io.RawIOBase):
    """A stream that counts and hashes the bytes written through it to storage."""

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
    """The directory `checkpoints` of a run, as one process sees it.

    No method unpickles code or is a collective. Methods raise StorageError if
    storage keeps failing.

    With this run's `config`, reading a checkpoint of another run raises
    CheckpointError, which names the key that differs.
    """

    def __init__(
        self,
        run: Storage,
        best: Best | None = None,
        config: State | None = None,
    ) -> None:
        self.storage = run.child("checkpoints")
        self.best = best
        self._config = config

    def names(self) -> list[str]:
        """Return the names of all checkpoints, complete or not, oldest first."""
        return [
            name
            for name in self.storage.names()
            if re.fullmatch("step-[0-9]{12}", name)
        ]

    def is_complete(self, name: str) -> bool:
        """Whether a checkpoint was completed; it may have been damaged since."""
        return self.storage.exists(f"{name}/manifest.json")

    def begin(self, name: str) -> None:
        """Delete the manifest, so that a changing checkpoint never looks complete."""
        self.storage.delete(f"{name}/manifest.json")

    @retrying
    def write(
        self,
        name: str,
        file: str,
        state: Mapping[str, Any],
        save: Callable[[Any, Any], None] = torch.save,
    ) -> FileEntry:
        """Write one file of a checkpoint; return its entry for the manifest.

        `save(state, stream)` writes: torch.save, or for rows `write_tensors`.
        """
        path = f"{name}/{file}"
        try:
            with self.storage.writer(path) as stream:
                hashing = _Hashing(stream)
                # Given a path, torch would hold the GIL during the whole write.
                save(state, hashing)
        except RuntimeError as error:  # torch's zip writer hides the stream's own error in one of these
            hidden = (
                link for link in chain(error) if isinstance(link, OSError)
            )
            cause = next(hidden, error)
            raise StorageError(
                f"could not write {self.storage.locate(path)}: {cause}"
            ) from cause
        return FileEntry(hashing.size, hashing.sha256.hexdigest())

    def seal(self, manifest: Manifest, keep: int) -> None:
        """Write the manifest, which completes the checkpoint; then delete surplus ones."""
        name = folder_name(manifest.step)
        for file in manifest.files:
            if not self.storage.exists(f"{name}/{file}"):
                words = f"{file} was written by another worker, and rank 0 does not see it"
                fix = "storage_path must be shared by all nodes"
                raise StorageError(f"{words}: {fix}")
        # Every rank has written, so a temporary file is a killed process's.
        self.storage.clear_aside(name)
        self.storage.write(f"{name}/manifest.json", manifest.to_json())
        names = self.names()
        complete = [other for other in names if self.is_complete(other)]
        ranked = self._ranked([other for other in complete if other <= name])
        best = ranked[0] if ranked else None
        for other in surplus(names, complete, name, keep, best):
            try:
                self.storage.delete(other)
            except LeaseError:
                raise
            except StorageError as error:
                logger.warning("an old checkpoint is kept: %s", error)

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises CheckpointError if the checkpoint is incomplete, damaged or
        another run's.
        """
        if not self.is_complete(name):
            raise CheckpointError("it has no manifest, which is written last")
        found = Manifest.from_json(self.storage.read(f"{name}/manifest.json"))
        if folder_name(found.step) != name:
            raise CheckpointError(f"its manifest is that of step {found.step}")
        if self._config:
            found.require_run(self._config)
        return found

    def newest(self) -> str | None:
        """Return the newest complete checkpoint; damaged ones are skipped and logged."""
        return self._first_whole(self.names()[::-1])

    def best_name(self) -> str | None:
        """Return the complete checkpoint with the best evaluation.

        Damaged checkpoints are skipped and logged.
        """
        return self._first_whole(self._ranked(self.names()))

    def best_value(self) -> float | None:
        """Return the best metric's value in the checkpoint `best_name`."""
        name = self.best_name()
        if self.best and name:
            return self.manifest(name).metrics[self.best.metric]
        return None

    def choose(self, which: str) -> str:
        """Return the checkpoint that `newest`, `best` or `step-123` stands for.

        Raises CheckpointError if there is none.
        """
        if which in ("newest", "best"):
            found = self.newest() if which == "newest" else self.best_name()
            if found is None:
                words = (
                    f"there is no complete checkpoint in {self.storage.uri}"
                )
                if which == "best":
                    words += " that was evaluated for `checkpoint.best`"
                raise CheckpointError(words)
            return found
        step = which.removeprefix("step-")
        name = folder_name(int(step)) if step.isdecimal() else which
        names = self.names()
        if name not in names:
            there = ", ".join(names) or "none"
            raise CheckpointError(
                f"there is no checkpoint {which} in {self.storage.uri}, which has {there}"
            )
        try:
            self.verify(name)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {self.storage.locate(name)} cannot be used: {error}"
            ) from error
        return name

    def read_state(self, name: str) -> tuple[State, RowReader | None]:
        """Return what rank 0 wrote, and a reader for the rows of all ranks.

        The reader is None if no rank wrote rows.

        Raises CheckpointError as `read` does.
        """
        state = self.read(name, "state.pt")
        manifest = self.manifest(name)
        rows = None
        if manifest.is_sharded:
            rows = RowReader(self.storage, name, manifest.world_size, state)
        return state, rows

    def read(self, name: str, file: str) -> State:
        """Return the content of one file, on the CPU.

        Raises CheckpointError if it contains more than tensors and plain data.
        """
        where = self.storage.locate(f"{name}/{file}")
        data = self.storage.read(f"{name}/{file}")
        try:
            state = torch.load(
                io.BytesIO(data), map_location="cpu", weights_only=True
            )
        except MemoryError:
            raise
        except Exception as error:  # foreign bytes may cause any exception
            problem = (
                "it holds more than tensors and plain data, or is damaged"
            )
            raise CheckpointError(
                f"{where} is not a Paceline checkpoint: {problem}"
            ) from error
        if not isinstance(state, dict):
            raise CheckpointError(
                f"{where} is not a Paceline checkpoint: it is not a mapping"
            )
        return state

    def _first_whole(self, names: list[str]) -> str | None:
        for name in names:
            try:
                self.verify(name)
                return name
            except (CheckpointError, StorageError) as error:
                self.leave_out(name, str(error))
        return None

    def leave_out(self, name: str, problem: str) -> None:
        """Log that a checkpoint is not used, and why."""
        logger.warning(
            "checkpoint %s is left out: %s", self.storage.locate(name), problem
        )

    def _ranked(self, names: list[str]) -> list[str]:
        if self.best is None:
            return []
        manifests = {}
        for name in names:
            # A damaged checkpoint is not the best.
            with contextlib.suppress(CheckpointError):
                manifests[name] = self.manifest(name)
        return self.best.ranked(manifests)

    def verify(self, name: str, rank: int = 0, world_size: int = 1) -> None:
        """Raise CheckpointError unless the files match the manifest.

        With `world_size`, only this rank's share of the files is read.
        """
        manifest = self.manifest(name)
        for file, entry in sorted(manifest.files.items())[rank::world_size]:
            if self._sha256(f"{name}/{file}") != entry.sha256:
                raise CheckpointError(f"{file} does not match its checksum")

    @retrying
    def _sha256(self, path: str) -> str:
        sha256 = hashlib.sha256()
        with self.storage.reader(path) as stream:
            # Larger chunks than file_digest's: each is a request to an object
            # store.
            while chunk := stream.read(1 << 20):
                sha256.update(chunk)
        return sha256.hexdigest()


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as one rank reads it."""

    name: str
    state: State
    rank_state: State | None
    """None if the checkpoint was written by a different number of workers."""
    rows: RowReader | None = None
    """Reads a sharded checkpoint's rows; in `state`, tensors on the meta device
    stand for them.
    """


@dataclass(frozen=True)
class _Pending:
    step: int
    metrics: Figures
    job: Future[Any]
    """The call of `_files`, or, once `gathered`, of `_seal`."""
    gathered: bool = False


class Checkpoints:
    """The checkpoints of one run, on which all ranks agree.

    Every rank must call `save`, `start`, `advance`, `finish` and `load`
    equally often.

    A checkpoint is written immediately (`save`), or while training continues
    (`start`, then `advance` whenever no rank is busy):

    1. The loop copies the state to host memory.
    2. A thread on each rank writes and hashes that rank's files.
    3. The loop gathers names, sizes and checksums, or an error.
    4. The thread on rank 0 writes the manifest, then deletes older
       checkpoints.
    5. The loop learns that the checkpoint is complete, or raises StorageError
       on every rank.

    The threads never call a collective, which would mix with DDP's collectives
    on the same process group. The ranks' loops communicate every ten steps
    anyway, so nothing polls storage, and all ranks get an error in the same
    step.

    `config` is the resolved TrainConfig; it is stored with each checkpoint.
    """

    def __init__(
        self,
        run: Storage,
        group: Group,
        keep: int,
        best: Best | None = None,
        config: State | None = None,
    ) -> None:
        self.archive = Archive(run, best, config)
        self.group = group
        self.keep = keep
        self.best = best
        self._config = config or {}
        self._best_value: float | None = None
        self._host = HostCopy()
        # Kept for all checkpoints: starting a thread takes milliseconds if
        # cores are busy.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None
        self.written_s = 0.0
        """Time that this rank's thread has spent writing."""

    def save(
        self,
        step: int,
        state: State,
        rank_state: State,
        metrics: Figures | None = None,
        rows: Mapping[str, Tensor] | None = None,
    ) -> str:
        """Write a checkpoint, then delete older ones; return its location.

        `metrics` are the figures of an evaluation at this very step; `rows`
        are this rank's, if all ranks write rows. Raises StorageError, on every
        rank, if any rank could not write.
        """
        assert self._pending is None
        self._remember(metrics or {})
        files = self._gather(
            step, *self._files(step, state, rank_state, None, rows)
        )
        self._raise(
            step, self.group.first(self._seal(step, files, metrics or {}))
        )
        return self.locate(step)

    def start(
        self,
        step: int,
        state: State,
        rank_state: State,
        metrics: Figures | None = None,
        first: Callable[[], None] | None = None,
        rows: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Copy the state to host memory, and write it while training continues.

        No other checkpoint may be pending.

        `rank_state` is not copied. The thread calls `first` before it writes
        anything.
        """
        assert self._pending is None
        self._remember(metrics or {})
        copied = self._host.take(
            {"state": state if self.group.rank == 0 else {}, "rows": rows}
        )
        job = self._submit(
            self._files,
            step,
            copied["state"],
            rank_state,
            first,
            copied["rows"],
        )
        self._pending = _Pending(step, dict(metrics or {}), job)

    def _submit(self, write: Callable[..., Any], *args: Any) -> Future[Any]:
        def timed() -> Any:
            began = time.perf_counter()
            try:
                return write(*args)
            finally:
                self.written_s += time.perf_counter() - began

        return self._thread.submit(timed)

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is being written; equal on all ranks."""
        return self._pending is not None

    @property
    def busy(self) -> bool:
        """Whether this rank's thread is working.

        If no rank is busy, `advance` does not have to wait.
        """
        return self._pending is not None and not self._pending.job.done()

    def advance(self) -> str | None:
        """Advance the pending checkpoint by one phase.

        Returns its location after the last phase, else None. Raises
        StorageError, on every rank, if any rank could not write.
        """
        pending = self._pending
        self._pending = None
        assert pending is not None
        if pending.gathered:
            self._raise(pending.step, self.group.first(pending.job.result()))
            return self.locate(pending.step)
        files = self._gather(pending.step, *pending.job.result())
        job = self._submit(self._seal, pending.step, files, pending.metrics)
        self._pending = _Pending(
            pending.step, pending.metrics, job, gathered=True
        )
        return None

    def finish(self) -> str | None:
        """Wait until the pending checkpoint is complete; return its location."""
        where = None
        while self._pending is not None:
            where = self.advance()
        return where

    def abandon(self) -> None:
        """After an exception, wait for this rank's thread and end it.

        The other ranks may not have met the exception, so this is no
        collective.
        With a single rank, the pending checkpoint is completed.
        """
        try:
            if self.group.world_size == 1:
                self.finish()
            elif self._pending is not None:
                self._pending.job.result()
        except Exception as error:
            logger.warning("%s", error)
        self._thread.shutdown()

    def improves(self, figures: Figures) -> bool:
        """Return whether an evaluation beats every checkpoint so far.

        Always False without `best`.

        Raises ConfigError if the task does not report that metric.
        """
        return self.best is not None and self.best.improves(
            figures, self._best_value
        )

    def load(self, *uses: Callable[[Loaded], None]) -> Loaded | None:
        """Return the newest complete checkpoint that all `uses` accept on every rank.

        A use rejects a checkpoint by raising CheckpointError; rejected
        checkpoints are logged.

        Returns None if no checkpoint was ever completed. Raises
        CheckpointError, on every rank, if there are complete checkpoints but
        none can be used: starting over would delete them, which is the user's
        decision. After this call, `improves` compares with the best
        checkpoint.
        """
        archive = self.archive
        is_first = self.group.rank == 0
        problems: list[str] = []
        for name, is_complete in self.group.first(
            self._agreed(self._found)
        ).items():
            try:
                loaded = self._load(name, uses)
            except StorageError as error:
                if is_complete:
                    problems.append(f"{name}: {error}")
                if is_first:
                    archive.leave_out(name, str(error))
                continue
            if self.best is not None:
                best_value = archive.best_value() if is_first else None
                self._best_value = self.group.first(best_value)
            return loaded
        if problems:
            words = f"no checkpoint in {archive.storage.uri} can be used ({problems[0]})"
            fix = "that, restore a good one, or start over with --fresh"
            raise CheckpointError(f"{words}{FIX}{fix}")
        return None

    def _found(self) -> dict[str, bool]:
        """Return, on rank 0, all names, newest first, and whether each is complete."""
        if self.group.rank > 0:
            return {}
        archive = self.archive
        return {
            name: archive.is_complete(name) for name in archive.names()[::-1]
        }

    def _load(
        self, name: str, uses: Iterable[Callable[[Loaded], None]]
    ) -> Loaded:
        group = self.group
        self._agreed(self.archive.verify, name, group.rank, group.world_size)
        loaded = self._agreed(self._read, name)
        for use in uses:
            self._agreed(use, loaded)
        return loaded

    def _read(self, name: str) -> Loaded:
        manifest = self.archive.manifest(name)
        own = None
        if manifest.world_size == self.group.world_size:
            own = self.archive.read(name, rank_file(self.group.rank))
        state, rows = self.archive.read_state(name)
        return Loaded(name, state, own, rows)

    def _agreed(self, action: Callable[..., T], *args: Any) -> T:
        """Run an action on all ranks; StorageError on all of them if any fails."""
        problem = None
        try:
            done = action(*args)
        except (CheckpointError, StorageError) as error:
            problem = str(error)
        problem = next(filter(None, self.group.gather(problem)), None)
        if problem is not None:
            raise StorageError(problem)
        return done

    def locate(self, step: int) -> str:
        """Return the location of the checkpoint of a step."""
        return self.archive.storage.locate(folder_name(step))

    def _remember(self, metrics: Figures) -> None:
        if self.best is None or self.best.metric not in metrics:
            return
        if self.improves(metrics):
            self._best_value = metrics[self.best.metric]

    def _files(
        self,
        step: int,
        state: State,
        rank_state: State,
        first: Callable[[], None] | None,
        rows: Mapping[str, Tensor] | None,
    ) -> tuple[_Entries, str | None]:
        """Write this rank's files.

        Returns an error's message instead of raising it: the other ranks wait
        for an answer.
        """
        name = folder_name(step)
        entries: _Entries = {}
        try:
            if first is not None:
                first()
            if self.group.rank == 0:
                self.archive.begin(name)
                entries["state.pt"] = self.archive.write(
                    name, "state.pt", state
                )
            own = rank_file(self.group.rank)
            entries[own] = self.archive.write(name, own, rank_state)
            if rows is not None:
                shard = shard_file(self.group.rank)
                entries[shard] = self.archive.write(
                    name, shard, rows, write_tensors
                )
        except Exception as error:
            return entries, _message(error)
        return entries, None

    def _gather(
        self, step: int, entries: _Entries, problem: str | None
    ) -> _Entries:
        files: _Entries = {}
        for written, met in self.group.gather((entries, problem)):
            self._raise(step, met)
            files |= written
        return files

    def _seal(
        self, step: int, files: _Entries, metrics: Figures
    ) -> str | None:
        """Write the manifest on rank 0; return what went wrong, if anything."""
        if self.group.rank != 0:
            return None
        versions = package_versions("paceline", "torch", "numpy")
        manifest = Manifest(
            step,
            self.group.world_size,
            files,
            dict(metrics),
            versions,
            self._config,
        )
        try:
            self.archive.seal(manifest, self.keep)
        except Exception as error:
            return _message(error)
        return None

    def _raise(self, step: int, problem: str | None) -> None:
        if problem is not None:
            raise StorageError(
                f"checkpoint {self.locate(step)} could not be written: {problem}"
            )


def _message(error: Exception) -> str:
    if isinstance(error, PacelineError):
        return str(error)
    logger.error("a checkpoint could not be written", exc_info=error)
    return f"{type(error).__name__}: {error}"


class HostCopy:
    """Copies nested states to host memory, reusing the same buffers each time.

    A copy to fresh pages takes far longer (200 MB on a CPU: 470 ms instead of
    14 ms).

    Buffers for tensors on CUDA are pinned.

    The next `take` overwrites what `take` returned.
    """

    def __init__(self) -> None:
        self._buffers: _Buffers = {}

    def take(self, state: State) -> State:
        """Return the same nesting with copies of its tensors and containers.

        Waits for the device once.

        Tensors that share memory share it in the copy, too.
        """
        used: _Buffers = {}
        seen: _Buffers = {}

        def copied_tensor(tensor: Tensor, path: Place) -> Tensor:
            if tensor.is_meta:
                return tensor
            return self._copy_tensor(tensor.detach(), path, used, seen)

        copied: State = map_tree(
            copied_tensor, state, leaf=lambda value, _: copy.deepcopy(value)
        )
        for device in {
            identity[0] for identity in seen if identity[0].type == "cuda"
        }:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = used
        return copied

    def _copy_tensor(
        self, tensor: Tensor, path: Place, used: _Buffers, seen: _Buffers
    ) -> Tensor:
        if tensor.layout != torch.strided or type(tensor) is not Tensor:
            return tensor.to("cpu", copy=True)
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
        identity = (
            tensor.device,
            *place,
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if identity not in seen:
            buffer = self._buffers.get(path)
            pins = tensor.is_cuda
            if buffer is None or not _alike(buffer, tensor):
                buffer = torch.empty_like(
                    tensor, device="cpu", pin_memory=pins
                )
            # With unpinned memory, or on MPS, a non-blocking copy is unsafe.
            seen[identity] = used[path] = buffer.copy_(
                tensor, non_blocking=pins
            )
        return seen[identity]


def _alike(buffer: Tensor, tensor: Tensor) -> bool:
    return buffer.shape == tensor.shape and buffer.dtype == tensor.dtype
