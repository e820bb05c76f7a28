"""The ranks of a run side by side: who waits, who is slow, who has nothing to do.

Pure functions over plain rows.

Under DDP every rank's step takes equally long, because the fast ones wait in the
all-reduce. So ranks are compared by what each does before it waits for anybody: the
time until its batches are there, and the time of its own backward pass.
"""

import statistics
from collections.abc import Callable
from typing import NotRequired  # pydantic reads no other before Python 3.12

from typing_extensions import TypedDict

_WAIT_SHARE = 0.1
_SLOWER = 1.2
_OF_STEP = 0.05
_IDLE_SHARE = 0.1
_EVIDENCE_S = 1.0  # of training, below which a difference in time is noise
_HARMFUL = ("hardware", "heat", "heat (hardware)", "power brake")


class RankFigures(TypedDict):
    """One rank's row."""

    rank: int
    host: str
    device: str
    steps: int
    """Those that the row is about."""
    train_time_s: float
    samples_per_s: float
    """Of this rank's own samples."""
    samples_per_step: float
    step_time_s: float
    data_wait_share: float
    """Of the training time, spent until a batch was there."""
    idle_share: float
    """Of the steps: those in which the rank had no sample."""
    backward_s: float | None
    """Loss and backward pass of one microbatch until its last gradient, without waiting
    for other ranks; DDP only.
    """
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    total_bytes: int
    gpu: dict[str, float | list[str]] | None
    """What NVML says (trainers/devices/nvml.py)."""
    energy_j: NotRequired[float | None]
    """Since training began, of the device (trainers/devices/energy.py)."""
    energy_of: NotRequired[str]
    """What that is of: ranks on one GPU, or on one machine's processors, count the
    same.
    """


def total_energy_j(rows: list[RankFigures]) -> float | None:
    """Return the energy of all that the ranks run on.

    None where that of any is not known.
    """
    known = {row.get("energy_of", ""): row.get("energy_j") for row in rows}
    values = [value for value in known.values() if value is not None]
    if values and len(values) == len(known):
        return sum(values)
    return None


def findings(rows: list[RankFigures]) -> list[tuple[str, str]]:
    """Return what is uneven between ranks, and slowed GPUs.

    Each is a key that names rank and kind, and the sentence to log.
    """
    found: list[tuple[str, str]] = []
    for row in rows:
        rank = row["rank"]
        others = [other for other in rows if other is not row]
        slowed = [reason for reason in _slowed_by(row) if reason in _HARMFUL]
        if slowed:
            found.append(
                (
                    f"{rank} clocks",
                    f"the GPU of rank {rank} ({row['host']}) is slowed by {', '.join(slowed)}",
                )
            )
        if not others:
            continue
        if row["idle_share"] > _IDLE_SHARE:
            words = f"has no sample in {row['idle_share']:.0%} of its steps"
            found.append(
                (
                    f"{rank} idle",
                    f"rank {rank} {words}: the global batch is too small for all ranks",
                )
            )
        if row["train_time_s"] < _EVIDENCE_S:
            continue
        wait = statistics.median(other["data_wait_share"] for other in others)
        if row["data_wait_share"] - wait > _WAIT_SHARE:
            words = f"waits {row['data_wait_share']:.0%} of its time for data, the others {wait:.0%}"
            found.append((f"{rank} data", f"rank {rank} ({row['host']}) {words}"))
        if (slower := _slower(row, others)) is not None:
            found.append((f"{rank} slow", f"rank {rank} ({row['host']}) {slower}"))
    return found


def _slower(row: RankFigures, others: list[RankFigures]) -> str | None:
    own = row["backward_s"]
    known = [other["backward_s"] for other in others if other["backward_s"] is not None]
    if own is None or not known or row["idle_share"] > _IDLE_SHARE:
        return None
    usual = statistics.median(known)
    if own < _SLOWER * usual or own - usual < _OF_STEP * row["step_time_s"]:
        return None
    words = f"takes {own / usual - 1:.0%} longer for a backward pass ({own * 1e3:.2f} ms, the others {usual * 1e3:.2f})"
    samples = statistics.median(other["samples_per_step"] for other in others)
    if row["samples_per_step"] > 1.05 * samples:
        words += f"; it has {row['samples_per_step']:.3g} samples a step, the others {samples:.3g}"
    return words


def _gpu(name: str, form: str) -> Callable[[RankFigures], str]:
    return lambda row: (
        format(value, form)
        if isinstance(value := (row["gpu"] or {}).get(name), (int, float))
        else "-"
    )


def _slowed_by(row: RankFigures) -> list[str]:
    reasons = (row["gpu"] or {}).get("slowed_by")
    if isinstance(reasons, list):
        return reasons
    return []


_COLUMNS: tuple[tuple[str, Callable[[RankFigures], str]], ...] = (
    ("rank", lambda row: str(row["rank"])),
    ("host", lambda row: row["host"]),
    ("samples/s", lambda row: f"{row['samples_per_s']:,.0f}"),
    ("step ms", lambda row: f"{row['step_time_s'] * 1e3:.2f}"),
    ("data", lambda row: f"{row['data_wait_share']:.0%}"),
    (
        "backward ms",
        lambda row: (
            "-" if row["backward_s"] is None else f"{row['backward_s'] * 1e3:.2f}"
        ),
    ),
    ("peak MiB", lambda row: f"{row['peak_bytes'] / 2**20:,.0f}"),
    ("GPU", _gpu("utilisation", ".0%")),
    ("W", _gpu("power_w", ".0f")),
    ("C", _gpu("temperature_c", ".0f")),
    ("slowed by", lambda row: ", ".join(_slowed_by(row)) or "-"),
)


def table(rows: list[RankFigures]) -> list[str]:
    """Return the rows as lines of a table for the terminal.

    Columns without any reading are left out.
    """
    columns = [[title, *map(cell, rows)] for title, cell in _COLUMNS]
    shown = [column for column in columns if set(column[1:]) != {"-"}]
    widths = [max(map(len, column)) for column in shown]
    return [
        "  ".join(map(str.rjust, line, widths)) for line in zip(*shown, strict=True)
    ]
