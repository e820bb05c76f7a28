"""What tells one sample from another, whatever it is made of."""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor


def digest(value: Any) -> str:
    """Return a digest of nested tensors, arrays and plain data, and of objects by what pickle would keep of them.

    It is the same in every process. What cannot be pickled counts by its repr, without addresses.
    """
    found = hashlib.blake2b(digest_size=8)
    _absorb(value, found.update)
    return found.hexdigest()


def _absorb(value: Any, update: Callable[[Any], None]) -> None:
    shown = ""
    data: Any = b""
    parts: list[Any] = []
    if isinstance(value, Tensor):
        plain = value.detach().cpu().to_dense().resolve_conj().resolve_neg().reshape(-1)
        shown, data = f"{value.dtype}{[*value.shape]}", plain.view(torch.uint8).numpy()
    elif isinstance(value, np.ndarray):
        shown = f"{value.dtype.str}{value.shape}"
        parts, data = (value.tolist(), b"") if value.dtype.hasobject else ([], value.tobytes())
    elif isinstance(value, (bytes, bytearray)):
        data = value
    elif isinstance(value, (str, int, float, complex, type(None))):
        shown = repr(value)
    elif isinstance(value, Mapping):
        parts = [part for item in value.items() for part in item]
    elif isinstance(value, (list, tuple)):
        parts = [*value]
    elif isinstance(value, Set):
        parts = sorted(map(digest, value))
    else:
        with contextlib.suppress(Exception):  # what cannot be pickled
            reduced = () if hasattr(value, "__qualname__") else value.__reduce_ex__(4)  # but for classes and functions
            parts = [[*part] if isinstance(part, Iterator) else part for part in reduced]
        shown = "" if parts else re.sub(" at 0x[0-9a-f]+", "", repr(value))
    update(f"{type(value).__name__} {shown} {len(data)} {len(parts)};".encode())
    update(data)
    for part in parts:
        _absorb(part, update)
