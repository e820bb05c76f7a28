"""Tensors in a stream, in the safetensors format: a header in JSON, then their bytes; nothing in it can be code.

The library of that name writes from and reads into memory of its own, whole files at a time. Here tensors of any size
go straight from their memory to storage, and any range of a file straight into a tensor's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO

import torch
from pydantic import Field
from torch import Tensor

from trainers.errors import CheckpointError
from trainers.json_data import parse_json

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
"""The format's names of what can be written."""
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: list[_Count]
    data_offsets: tuple[_Count, _Count]


def write_tensors(stream: BinaryIO | Any, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, of any device, one after another: no more than one is copied at a time."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": FORMATS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        if tensor.numel():
            stream.write(_bytes(tensor.detach().cpu().contiguous()))


class TensorFile:
    """A file of tensors whose parts are read. Raises CheckpointError where it is none."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        size = int.from_bytes(stream.read(8), "little")
        text = stream.read(size) if size <= _MOST_HEADER_BYTES else b""
        self._entries = parse_json(text, dict[str, _Entry])
        self._base = 8 + size

    def read_rows(self, name: str, rows: range, of: int, into: Tensor) -> None:
        """Fill `into` with rows of the tensor `name`, which has `of` rows like them, in the same format."""
        entry, wanted = self._entries.get(name), [of, *into.shape[1:]]
        if entry is None or (entry.dtype, entry.shape) != (FORMATS[into.dtype], wanted):
            found = "nothing" if entry is None else f"{entry.dtype[:10]} {entry.shape[:10]}"
            raise CheckpointError(f"it has {found} as {name}, not {FORMATS[into.dtype]} {wanted}")
        row_bytes = into[:1].nbytes
        begin, end = entry.data_offsets
        if end - begin != of * row_bytes:
            raise CheckpointError(f"its place of {name} has {end - begin} bytes, not {of * row_bytes}")
        self._stream.seek(self._base + begin + rows.start * row_bytes)
        left = _bytes(into) if into.numel() else memoryview(b"")
        while left:
            count = self._stream.readinto(left)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(f"it ends within {name}")
            left = left[count:]


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
