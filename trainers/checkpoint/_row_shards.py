"""Write and read sharded tensors by rows: each rank writes the rows that it holds.

The rows are cut out of a state before a checkpoint is written, and put back
after it has been read.

A rank's rows are those that torch.chunk would give it (FSDP2 shards parameters
in this way), so rank and number of ranks determine which rows are in a file.
In the state, a placeholder on the meta device replaces each tensor that was
cut: it has the tensor's shape and dtype, and its path in the state is the
tensor's name in the files.

The files are in the safetensors format: a header in JSON, then the bytes. The
safetensors library would copy whole files through its own memory; here tensors
of any size are written straight from their memory, and any range of a file is
read straight into a tensor.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainers.checkpoint.manifest import shard_file
from trainers.checkpoint.validation import Place, State, map_tree, tensors_in
from trainers.data.batch import as_bytes
from trainers.devices.group import Group
from trainers.errors import CheckpointError, StorageError, first_line
from trainers.model.sharding import is_shard, local
from trainers.storage import Storage, retrying

FORMATS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that can be written, with their names in the file format."""


@dataclass(frozen=True)
class Cut:
    """A state split into this rank's rows and the rest."""

    rest: State
    """Everything else, which rank 0 writes."""
    rows: dict[str, Tensor]
    """This rank's rows by name; they share the tensors' memory."""


def cut_rows(state: State, group: Group) -> Cut:
    """Split a run's state into this rank's rows of sharded tensors and the rest.

    Does not change the state. Every rank must have a state of the same
    structure.
    """
    cut: dict[str, Tensor] = {}
    stand_ins: dict[Place, Tensor] = {}  # tied tensors share a stand-in

    def stand_in(tensor: Tensor, path: Place) -> Tensor:
        rows = _own_rows(tensor, group)
        name = _name(path)
        if rows is None or name in cut:
            return tensor
        begin = rows.untyped_storage().data_ptr()
        place = (begin, rows.storage_offset(), tensor.shape, tensor.stride())
        if not rows.numel() or place not in stand_ins:
            cut[name] = rows
            shape = tensor.shape
            stand_ins[place] = torch.empty(
                shape, dtype=tensor.dtype, device="meta"
            )
        return stand_ins[place]

    return Cut(map_tree(stand_in, state), cut)


def write_tensors(
    tensors: Mapping[str, Tensor], stream: BinaryIO | Any
) -> None:
    """Write tensors from any device, copying only one at a time to host memory."""
    header: State = {}
    end = 0
    for name, tensor in tensors.items():
        begin = end
        end = end + tensor.nbytes
        header[name] = {
            "dtype": FORMATS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        if tensor.numel():
            stream.write(_memory(tensor.cpu()))


class TensorFile:
    """Reads parts of the tensors in a file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        size = int.from_bytes(stream.read(8), "little")
        self._header = json.loads(stream.read(size))
        self._base = 8 + size

    def read_rows(self, name: str, first: int, into: Tensor) -> None:
        """Fill `into` with rows of the tensor `name`, beginning at its row `first`."""
        begin, _ = self._header[name]["data_offsets"]
        self._stream.seek(self._base + begin + first * into[:1].nbytes)
        left = _memory(into) if into.numel() else memoryview(b"")
        while left:
            count = self._stream.readinto(left)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(f"the file ends within {name}")
            left = left[count:]


def _memory(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor in host memory as bytes, without a copy."""
    return memoryview(as_bytes(tensor).numpy())  # type: ignore[arg-type]


class RowReader:
    """Reads back a checkpoint's rows; each rank reads the rows it needs from any file."""

    def __init__(
        self, storage: Storage, name: str, writers: int, state: Any
    ) -> None:
        """`writers` ranks wrote rows; `state` is the rest of the checkpoint."""
        self._storage = storage
        self._name = name
        self._writers = writers
        self._names: dict[int, str] = {}
        self._state = (
            state  # keeps the tensors alive whose ids are keys of _names
        )
        for path, tensor in tensors_in(state):
            if tensor.is_meta:
                self._names.setdefault(id(tensor), _name(path))

    def fill(
        self,
        tree: Any,
        rank: int = 0,
        world_size: int = 1,
        place: Callable[[Tensor, Tensor], Tensor] | None = None,
        into: Any = None,
    ) -> Any:
        """Replace the placeholders in a part of the state by tensors in host memory.

        Each tensor gets the rows that belong to rank `rank` of `world_size`.

        `place` makes the final tensor from these rows and the placeholder on
        the meta device. If `into` has, in the same position, a tensor of the
        rows' shape and dtype, the rows are copied into that tensor instead. So
        at most one tensor is in memory twice.
        """
        taken: dict[int, Any] = {}
        targets = dict(tensors_in(into))
        files: dict[int, TensorFile] = {}
        with contextlib.ExitStack() as streams:
            for path, stand_in in tensors_in(tree):
                if not stand_in.is_meta or id(stand_in) in taken:
                    continue
                share = _share(stand_in.shape[0], rank, world_size)
                rows = self._read(stand_in, share, files, streams)
                target = targets.get(path)
                put: Any = rows
                if target is not None and _takes(local(target), rows):
                    put = target
                elif place is not None:
                    put = place(rows, stand_in)
                taken[id(stand_in)] = put
        return map_tree(lambda tensor, _: taken.get(id(tensor), tensor), tree)

    @retrying
    def _read(
        self,
        stand_in: Tensor,
        ours: range,
        files: dict[int, TensorFile],
        streams: contextlib.ExitStack,
    ) -> Tensor:
        """Read a tensor's rows from the files that contain them; open each file once."""
        count = stand_in.shape[0]
        name = self._names[id(stand_in)]
        rows = torch.empty(
            (len(ours), *stand_in.shape[1:]), dtype=stand_in.dtype
        )
        step = len(_share(count, 0, self._writers))
        writers = range(ours.start // step, -(-ours.stop // step))
        for writer in writers if ours else ():
            theirs = _share(count, writer, self._writers)
            begin = max(ours.start, theirs.start)
            end = min(ours.stop, theirs.stop)
            part = rows[begin - ours.start : end - ours.start]
            file = shard_file(writer)
            path = f"{self._name}/{file}"
            try:
                if writer not in files:
                    opened = self._storage.reader(path)
                    files[writer] = TensorFile(streams.enter_context(opened))
                first = begin - theirs.start
                files[writer].read_rows(name, first, part)
            except (OSError, StorageError) as error:
                files.clear()
                with contextlib.suppress(OSError, StorageError):
                    streams.close()
                raise StorageError(
                    f"could not read {self._storage.locate(path)}: {first_line(error)}"
                ) from error
            except Exception as error:
                words = f"{type(error).__name__}: {first_line(error)}"
                raise CheckpointError(
                    f"{file} cannot be read: {words}"
                ) from error
        return rows


def _takes(target: Tensor, rows: Tensor) -> bool:
    """Copy rows into a tensor if shape and dtype match; return whether they do."""
    is_like = target.shape == rows.shape and target.dtype == rows.dtype
    if is_like:
        target.copy_(rows)
    return is_like


def _share(count: int, rank: int, world_size: int) -> range:
    step = -(-count // world_size)
    begin = rank * step
    return range(min(begin, count), min(begin + step, count))


def _own_rows(tensor: Tensor, group: Group) -> Tensor | None:
    """Return the rows of a tensor that this rank writes; None if rank 0 writes it all."""
    if (
        tensor.dim() == 0
        or tensor.shape[0] == 0
        or tensor.dtype not in FORMATS
    ):
        return None
    if not is_shard(tensor):
        return None
    sharded: Any = tensor
    part = local(tensor)
    placements = sharded.placements
    by_rows = len(placements) == 1 and placements[0].is_shard(0)
    by_all = sharded.device_mesh.size() == group.world_size
    own = _share(tensor.shape[0], group.rank, group.world_size)
    return part if by_rows and by_all and len(part) == len(own) else None


def _name(path: Place) -> str:
    return "/".join(map(str, path))
