"""Imports without garbage collection.

Importing torch makes millions of objects that all stay, and Python's collector looks through them dozens of times on
the way: a third of the time that the import takes. For the programs' own use, around imports inside functions.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Keep the garbage collector out of a block; afterwards it is as it was before."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
