"""What a process shows of our packages' log, without secrets."""

import contextlib
import logging
import sys
from collections.abc import Iterator

from trainers.redaction import redact

_PACKAGES = ("trainers", "cluster", "tune")


class _Redacting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def setup_logging(rank: int, quiet: bool = False) -> None:
    """Send our packages' log to standard output.

    Rank 0's progress as it is (`quiet`: its warnings), other ranks' warnings with their
    rank.
    """
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        _Redacting("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s")
    )
    show_log(handler, logging.INFO if rank == 0 and not quiet else logging.WARNING)


def show_log(handler: logging.Handler, level: int) -> None:
    """Send our packages' log to one handler alone."""
    for name in _PACKAGES:
        package = logging.getLogger(name)
        package.handlers[:] = [handler]
        package.setLevel(level)
        package.propagate = False


@contextlib.contextmanager
def shown_log(rank: int, is_command: bool, quiet: bool = False) -> Iterator[None]:
    """Show our log: for good in a command, else in a block, if nobody shows it."""
    if is_command:
        setup_logging(rank, quiet)
        yield
        return
    packages = [logging.getLogger(name) for name in _PACKAGES]
    if all(
        package.isEnabledFor(logging.INFO) and package.hasHandlers()
        for package in packages
    ):
        yield
        return
    before = [
        (package.handlers[:], package.level, package.propagate) for package in packages
    ]
    setup_logging(rank)
    try:
        yield
    finally:
        for package, (handlers, level, propagate) in zip(packages, before, strict=True):
            package.handlers[:], package.propagate = handlers, propagate
            package.setLevel(level)
