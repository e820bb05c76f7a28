"""Imports without garbage collection.

Importing torch makes a million objects that all stay, and Python's collector looks
through them dozens of times on the
way: a third of the time that the import takes.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection(own_process: bool = False) -> Iterator[None]:
    """Keep the garbage collector out of a block of imports.

    `own_process`: whatever there is by then stays until the process ends, and no later
    collection looks at it again. Only for the start of a process that is ours: it would
    keep a caller's cycles for ever.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if own_process:
            gc.freeze()
        if enabled:
            gc.enable()
