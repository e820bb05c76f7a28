"""Write checkpoints straight to storage, and resume the newest complete one.

    checkpoints/step-000000000123/
        state.pt                   model, optimizer, scaler, task, position
        rank-00000.pt              random state of each rank
        shard-00000.safetensors    each rank's rows of a sharded or large model, of which
                                   `state.pt` then has no more than the shapes
        manifest.json              names, sizes and SHA-256 of the files above, metrics,
                                   versions, config, and a seal over its own text

A checkpoint without its manifest, or with a file that does not match it, is not used;
nor is another run's, or one that does not fit the model. The next older one is, and
where there are some and none can be used, that is an error.

One is written at once (`save`), or while training goes on (`start`, then `advance`
whenever no rank is busy):

1. The loop copies the state to host memory.
2. Its thread on each rank writes and hashes its files.
3. The loop gathers names, sizes and checksums, or what went wrong.
4. Its thread on rank 0 writes the manifest, then deletes older checkpoints.
5. The loop knows that it is complete, or raises StorageError on every rank.

Threads never call a collective: on the process group of DDP's own it would mix with
them. The loop agrees every ten steps anyway, so nothing polls storage, and an error is
met by all ranks in the same step.
"""

import copy
import logging
import platform
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainers.checkpoint.manifest import (
    Best,
    FileEntry,
    Manifest,
    folder_name,
    rank_file,
    shard_file,
)
from trainers.checkpoint.row_shards import RowReader
from trainers.checkpoint.store import Archive
from trainers.checkpoint.validation import map_tree
from trainers.devices.group import Group
from trainers.errors import CheckpointError, PacelineError, StorageError
from trainers.storage import Storage
from trainers.versions import package_versions

logger = logging.getLogger(__name__)
_Entries = dict[str, FileEntry]
_Buffers = dict[tuple[Any, ...], Tensor]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as one rank reads it."""

    name: str
    state: dict[str, Any]
    rank_state: dict[str, Any] | None
    """None when the checkpoint was written by another number of workers."""
    rows: RowReader | None = None
    """Of a sharded one, in whose state tensors on the meta device stand for others."""


@dataclass(frozen=True)
class _Pending:
    step: int
    metrics: Mapping[str, float]
    job: Future[Any]
    """First `_files`, then, once `gathered`, `_seal`."""
    gathered: bool = False


class Checkpoints:
    """The checkpoints of one run.

    Every rank must call `save`, `start`, `advance`, `finish` and `load` equally often.

    `config` is the resolved TrainConfig; it is kept with each of them.
    """

    def __init__(
        self,
        run: Storage,
        group: Group,
        keep: int,
        best: Best | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        self.archive = Archive(run, best, config)
        self.group = group
        self.keep = keep
        self.best = best
        self._config = config or {}
        self._best_value: float | None = None
        self._host = HostCopy()
        # Kept from one checkpoint to the next: to start a thread takes milliseconds
        # where cores are busy.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None
        self.written_s = 0.0
        """Time that this rank's thread has been at work."""

    def save(
        self,
        step: int,
        state: dict[str, Any],
        rank_state: dict[str, Any],
        metrics: Mapping[str, float] | None = None,
        rows: Mapping[str, Tensor] | None = None,
    ) -> str:
        """Write one checkpoint, then delete older ones, and return where it is.

        `metrics` are the figures of an evaluation at this very step; `rows` this
        rank's, where all ranks have some. Raises StorageError, on every rank, when any
        rank could not write.
        """
        assert self._pending is None
        self._remember(metrics or {})
        files = self._gather(step, *self._files(step, state, rank_state, None, rows))
        self._raise(step, self.group.first(self._seal(step, files, metrics or {})))
        return self.locate(step)

    def start(
        self,
        step: int,
        state: dict[str, Any],
        rank_state: dict[str, Any],
        metrics: Mapping[str, float] | None = None,
        first: Callable[[], None] | None = None,
        rows: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Copy the state to host memory, and write it while training goes on.

        There must be none on its way.

        `rank_state` is not copied. `first` is called, by the thread, before anything is
        written.
        """
        assert self._pending is None
        self._remember(metrics or {})
        copied = self._host.take(
            {"state": state if self.group.rank == 0 else {}, "rows": rows}
        )
        job = self._submit(
            self._files, step, copied["state"], rank_state, first, copied["rows"]
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
        """Whether a checkpoint is on its way: equal on all ranks."""
        return self._pending is not None

    @property
    def busy(self) -> bool:
        """Whether this rank's thread is at work.

        While no rank's is, `advance` waits for nothing.
        """
        return self._pending is not None and not self._pending.job.done()

    def advance(self) -> str | None:
        """Take the checkpoint on its way one phase on; return its place after the last.

        Raises StorageError, on every rank, when any rank could not write.
        """
        pending = self._pending
        self._pending = None
        assert pending is not None
        if pending.gathered:
            self._raise(pending.step, self.group.first(pending.job.result()))
            return self.locate(pending.step)
        files = self._gather(pending.step, *pending.job.result())
        job = self._submit(self._seal, pending.step, files, pending.metrics)
        self._pending = _Pending(pending.step, pending.metrics, job, gathered=True)
        return None

    def finish(self) -> str | None:
        """Wait until the checkpoint on its way is complete; where it is."""
        where = None
        while self._pending is not None:
            where = self.advance()
        return where

    def abandon(self) -> None:
        """Wait for this rank's thread and end it, after an exception.

        The other ranks may not have met it.

        A single rank completes the checkpoint on its way.
        """
        try:
            if self.group.world_size == 1:
                self.finish()
            elif self._pending is not None:
                self._pending.job.result()
        except Exception as error:
            logger.warning("%s", error)
        self._thread.shutdown()

    def improves(self, figures: Mapping[str, float]) -> bool:
        """Return whether an evaluation beats every checkpoint so far.

        Always False without `best`.

        Raises ConfigError when the task does not report that metric.
        """
        return self.best is not None and self.best.improves(figures, self._best_value)

    def load(self, *uses: Callable[[Loaded], None]) -> Loaded | None:
        """Return the newest complete checkpoint that `uses` take on every rank.

        One that any of them refuses with a CheckpointError is not taken.

        Others are named in the log. None when none was ever completed; CheckpointError,
        on every rank, when there are some and none can be used: to begin anew, and then
        to delete them, is not for us to decide. `improves` compares with the best from
        here on.
        """
        archive = self.archive
        is_first = self.group.rank == 0
        found: dict[str, bool] = {}
        problems: dict[str, str] = {}

        def find() -> None:
            found.update(
                (name, archive.is_complete(name)) for name in archive.names()[::-1]
            )

        if problem := self._agreed(find if is_first else _idle):
            raise StorageError(problem)
        for name, is_complete in self.group.first(found).items():
            loaded: list[Loaded] = []
            actions: list[Callable[[], None]] = [
                partial(archive.verify, name, self.group.rank, self.group.world_size)
            ]
            actions += [
                partial(self._read, name, loaded),
                *(partial(_give, use, loaded) for use in uses),
            ]
            problem = next(filter(None, map(self._agreed, actions)), None)
            if problem is None:
                if self.best is not None:
                    self._best_value = self.group.first(
                        archive.best_value() if is_first else None
                    )
                return loaded[0]
            if is_complete:
                problems[name] = problem
            if is_first:
                archive.leave_out(name, problem)
        if problems:
            name, problem = next(iter(problems.items()))
            words = f"none of the {len(problems)} checkpoints in {archive.storage.uri} can be used ({name}: {problem})"
            raise CheckpointError(
                f"{words}; put a good one there, or start anew with --fresh"
            )
        return None

    def _read(self, name: str, into: list[Loaded]) -> None:
        manifest = self.archive.manifest(name)
        same_size = manifest.world_size == self.group.world_size
        own = self.archive.read(name, rank_file(self.group.rank)) if same_size else None
        state, rows = self.archive.read_state(name)
        into.append(Loaded(name, state, own, rows))

    def _agreed(self, action: Callable[[], None]) -> str | None:
        """What the first rank met that could not do it, on every rank."""
        problem = None
        try:
            action()
        except (CheckpointError, StorageError) as error:
            problem = str(error)
        return next(filter(None, self.group.gather(problem)), None)

    def locate(self, step: int) -> str:
        """Where the checkpoint of a step is."""
        return self.archive.storage.locate(folder_name(step))

    def _remember(self, metrics: Mapping[str, float]) -> None:
        if (
            self.best is not None
            and self.best.metric in metrics
            and self.improves(metrics)
        ):
            self._best_value = metrics[self.best.metric]

    def _files(
        self,
        step: int,
        state: dict[str, Any],
        rank_state: dict[str, Any],
        first: Callable[[], None] | None,
        rows: Mapping[str, Tensor] | None,
    ) -> tuple[_Entries, str | None]:
        """Write this rank's files.

        An error is an answer too: the other ranks wait for one.
        """
        name = folder_name(step)
        entries: _Entries = {}
        try:
            if first is not None:
                first()
            if self.group.rank == 0:
                self.archive.begin(name)
                entries["state.pt"] = self.archive.write(name, "state.pt", state)
            own = rank_file(self.group.rank)
            entries[own] = self.archive.write(name, own, rank_state)
            if rows is not None:
                shard = shard_file(self.group.rank)
                entries[shard] = self.archive.write_rows(name, shard, rows)
        except Exception as error:
            return entries, _message(error)
        return entries, None

    def _gather(self, step: int, entries: _Entries, problem: str | None) -> _Entries:
        answers = self.group.gather((entries, problem))
        self._raise(step, next((met for _, met in answers if met), None))
        return {
            file: entry for written, _ in answers for file, entry in written.items()
        }

    def _seal(
        self, step: int, files: _Entries, metrics: Mapping[str, float]
    ) -> str | None:
        """Write the manifest, by rank 0; what went wrong."""
        if self.group.rank != 0:
            return None
        versions = {
            "python": platform.python_version(),
            **package_versions("paceline", "torch", "numpy"),
        }
        manifest = Manifest(
            step, self.group.world_size, files, dict(metrics), versions, self._config
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


def _idle() -> None:
    """What the other ranks do meanwhile."""


def _give(use: Callable[[Loaded], None], loaded: list[Loaded]) -> None:
    use(loaded[0])


def _message(error: Exception) -> str:
    if isinstance(error, PacelineError):
        return str(error)
    logger.error("a checkpoint could not be written", exc_info=error)
    return f"{type(error).__name__}: {error}"


class HostCopy:
    """Copies nested states to host memory, one after another into the same buffers.

    Fresh pages cost far more than the copy itself (200 MB on a CPU: 470 ms against 14).

    Buffers are pinned for what comes from CUDA.

    What `take` returns is overwritten by the next `take`.
    """

    def __init__(self) -> None:
        self._buffers: _Buffers = {}

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the same nesting with copies of its tensors and containers.

        Waits for the device once.

        Tied tensors stay tied.
        """
        used: _Buffers = {}
        seen: _Buffers = {}

        def copied_tensor(tensor: Tensor, path: tuple[Any, ...]) -> Tensor:
            if tensor.is_meta:
                return tensor
            return self._copy_tensor(tensor.detach(), path, used, seen)

        copied: dict[str, Any] = map_tree(copied_tensor, state, leaf=copy.deepcopy)
        for device in {identity[0] for identity in seen if identity[0].type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = used
        return copied

    def _copy_tensor(
        self, tensor: Tensor, path: tuple[Any, ...], used: _Buffers, seen: _Buffers
    ) -> Tensor:
        if tensor.layout != torch.strided or type(tensor) is not Tensor:
            return tensor.to("cpu", copy=True)
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
        identity = (tensor.device, *place, tensor.shape, tensor.stride(), tensor.dtype)
        if identity not in seen:
            buffer = self._buffers.get(path)
            if (
                buffer is None
                or buffer.shape != tensor.shape
                or buffer.dtype != tensor.dtype
            ):
                buffer = torch.empty_like(
                    tensor, device="cpu", pin_memory=tensor.is_cuda
                )
            # Unpinned memory, or MPS, would make a copy that does not block unsafe.
            seen[identity] = used[path] = buffer.copy_(
                tensor, non_blocking=tensor.is_cuda
            )
        return seen[identity]
