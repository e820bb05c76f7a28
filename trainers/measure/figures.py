"""A run's figures: the step time and its confidence interval, and a table of ranks."""

import math
import statistics
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from typing_extensions import TypedDict

_WAIT_SHARE = 0.1
_IDLE_SHARE = 0.1
_EVIDENCE_S = 1.0  # of training; less shows only noise
_HARMFUL = ("hardware", "heat", "heat (hardware)", "power brake")
STRETCHES = 30
"""The most stretches of steps from which a confidence interval is computed."""
_FEWEST = 5  # stretches among which one can be called outlying
_OUTLYING = 2.0  # times the median stretch's time per step and per sample
_DISTURBED = 0.1
_LEAST_S = 0.5
"""Outlying stretches count as a disturbance only if they lose more than this
many seconds and more than the share `_DISTURBED` of the time: any short trial
loses a few milliseconds.
"""


@dataclass(frozen=True)
class Throughput:
    """Training speed, without warm-up, evaluations and checkpoints."""

    samples_per_s: float
    """Global samples over training time."""
    step_time_s: float
    """Mean time of a step."""
    step_time_ci95_s: float
    """Half width of the 95 % confidence interval of `step_time_s`, computed
    from the means of up to 30 stretches of steps, because neighbouring steps
    are slow or fast together.
    """
    data_wait_share: float
    """Share of the time that rank 0 waited for batches."""
    steps: int
    """Steps measured."""
    disturbed_s: float = 0.0
    """Time in outlying steps that these figures leave out, because the process
    was stopped, or had no processor.
    """

    def lines(self) -> Iterator[str]:
        """Yield the figures as lines for the user."""
        yield (
            f"{self.samples_per_s:,.0f} samples/s; a step {self.step_time_s * 1e3:.2f} ms "
            f"(95 % interval +-{self.step_time_ci95_s * 1e3:.2f}, n={self.steps}); "
            f"{self.data_wait_share:.0%} of it waiting for data"
        )
        if self.disturbed_s:
            yield f"disturbed: {self.disturbed_s:,.1f} s in outlying steps are left out of these figures"


class RankFigures(TypedDict):
    """The figures of one rank."""

    rank: int
    host: str
    device: str
    steps: int
    """Number of steps that the row covers."""
    train_time_s: float
    samples_per_s: float
    """Speed in this rank's own samples."""
    step_time_s: float
    data_wait_share: float
    """Share of the training time spent waiting for batches."""
    idle_share: float
    """Share of steps in which the rank had no samples."""
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    total_bytes: int
    gpu: dict[str, float | list[str]] | None
    """NVML's readings (trainers/devices/device.py)."""


def findings(rows: list[RankFigures]) -> list[tuple[str, str]]:
    """Find uneven ranks and slowed GPUs.

    Under DDP every rank's step takes equally long, because fast ranks wait in
    the all-reduce. So ranks are compared by how long they wait for batches.

    Each finding is a key, which names rank and kind, and the sentence to log.
    """
    found: list[tuple[str, str]] = []
    for row in rows:
        rank = row["rank"]
        others = [other for other in rows if other is not row]
        slowed = [reason for reason in _slowed_by(row) if reason in _HARMFUL]
        if slowed:
            words = f"the GPU of rank {rank} ({row['host']}) is slowed by"
            found.append((f"{rank} clocks", f"{words} {', '.join(slowed)}"))
        if not others:
            continue
        if row["idle_share"] > _IDLE_SHARE:
            words = f"rank {rank} has no sample in {row['idle_share']:.0%} of its steps"
            why = "the global batch is too small for all ranks"
            found.append((f"{rank} idle", f"{words}: {why}"))
        if row["train_time_s"] < _EVIDENCE_S:
            continue
        wait = statistics.median(other["data_wait_share"] for other in others)
        if row["data_wait_share"] - wait > _WAIT_SHARE:
            words = f"waits {row['data_wait_share']:.0%} of its time for data, the others wait {wait:.0%}"
            found.append(
                (f"{rank} data", f"rank {rank} ({row['host']}) {words}")
            )
    return found


def _gpu(name: str, form: str) -> Callable[[RankFigures], str]:
    def cell(row: RankFigures) -> str:
        value = (row["gpu"] or {}).get(name)
        return format(value, form) if isinstance(value, int | float) else "-"

    return cell


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
    ("peak MiB", lambda row: f"{row['peak_bytes'] / 2**20:,.0f}"),
    ("GPU", _gpu("utilisation", ".0%")),
    ("W", _gpu("power_w", ".0f")),
    ("C", _gpu("temperature_c", ".0f")),
    ("slowed by", lambda row: ", ".join(_slowed_by(row)) or "-"),
)


def table(rows: list[RankFigures]) -> list[str]:
    """Return the rows as lines of a table for the terminal.

    Columns without any reading are omitted.
    """
    shown = []
    for title, cell in _COLUMNS:
        cells = [cell(row) for row in rows]
        if set(cells) != {"-"}:
            width = max(map(len, [title, *cells]))
            shown.append([text.rjust(width) for text in (title, *cells)])
    return ["  ".join(line) for line in zip(*shown, strict=True)]


@dataclass(frozen=True)
class _Stretch:
    """Consecutive steps."""

    time_s: float
    own_s: float
    """Time without waiting for data."""
    steps: int
    samples: int

    @property
    def step_s(self) -> float:
        return self.own_s / self.steps

    @property
    def sample_s(self) -> float:
        return self.own_s / max(1, self.samples)


class StepTimes:
    """The time and the samples of each step, in order, as running sums."""

    def __init__(self) -> None:
        self._time_s = array("d", [0.0])
        self._own_s = array("d", [0.0])
        self._samples = array("q", [0])
        self._spans = array("q", [0])

    def __len__(self) -> int:
        return len(self._time_s) - 1

    def add(
        self, elapsed_s: float, samples: Sequence[int], wait_s: float = 0.0
    ) -> None:
        """Add one step per entry of `samples`; they shared `elapsed_s` evenly.

        `wait_s` of that time was spent waiting for data.
        """
        each = elapsed_s / len(samples)
        own = max(0.0, elapsed_s - wait_s) / len(samples)
        for index, count in enumerate(samples):
            self._time_s.append(self._time_s[-1] + each)
            self._own_s.append(self._own_s[-1] + own)
            self._samples.append(self._samples[-1] + count)
            self._spans.append(self._spans[-1] + (index == 0))

    def cut(self, length: int) -> None:
        """Forget the steps after the first `length`."""
        for sums in (self._time_s, self._own_s, self._samples, self._spans):
            del sums[length + 1 :]

    def total_s(self, skip: int) -> float:
        """Return the time of all steps after the first `skip`."""
        return self._time_s[-1] - self._time_s[skip]

    def samples(self, skip: int) -> int:
        """Return the number of samples in all steps after the first `skip`."""
        return self._samples[-1] - self._samples[skip]

    def half_width_s(self, skip: int) -> float:
        """Return the half width of the 95 % interval of the mean step time.

        The interval covers the steps after the first `skip`, and is computed
        from the means of up to 30 stretches, as Throughput explains. There are
        no more stretches than spans, because the steps of a span share its
        time. Stretches that `disturbed_s` counts are excluded.
        """
        stretches = self._stretches(skip)
        if self.disturbed_s(skip):
            outlying = _outlying(stretches)
            stretches = [
                stretch for stretch in stretches if stretch not in outlying
            ]
        count = len(stretches)
        if count < 2:
            return 0.0
        means = [stretch.time_s / stretch.steps for stretch in stretches]
        return (
            student_t(count - 1, 0.975)
            * statistics.stdev(means)
            / math.sqrt(count)
        )

    def disturbed_s(self, skip: int) -> float:
        """Return the time lost to standstills after the first `skip` steps.

        This is what outlying stretches took beyond the median stretch's time
        per step, without waiting for data; 0 unless that is more than half
        a second and a large share of the total.
        """
        stretches = self._stretches(skip)
        if len(stretches) < _FEWEST:
            return 0.0
        usual_s = statistics.median(stretch.step_s for stretch in stretches)
        lost_s = sum(
            stretch.own_s - usual_s * stretch.steps
            for stretch in _outlying(stretches)
        )
        if lost_s > max(_LEAST_S, _DISTURBED * self.total_s(skip)):
            return lost_s
        return 0.0

    def _stretches(self, skip: int) -> list[_Stretch]:
        """Divide the steps after the first `skip` into up to 30 even stretches."""
        steps = len(self) - skip
        count = min(STRETCHES, steps, self._spans[-1] - self._spans[skip])
        stretches = []
        first = skip
        for number in range(1, count + 1):
            last = skip + steps * number // count
            stretch = _Stretch(
                self._time_s[last] - self._time_s[first],
                self._own_s[last] - self._own_s[first],
                last - first,
                self._samples[last] - self._samples[first],
            )
            stretches.append(stretch)
            first = last
        return stretches


def _outlying(stretches: Sequence[_Stretch]) -> list[_Stretch]:
    """Return the stretches that took far longer than the median one.

    Both the time per step and the time per sample must be longer: larger
    batches are no disturbance.
    """
    step_s = statistics.median(stretch.step_s for stretch in stretches)
    sample_s = statistics.median(stretch.sample_s for stretch in stretches)
    return [
        stretch
        for stretch in stretches
        if stretch.step_s > _OUTLYING * step_s
        and stretch.sample_s > _OUTLYING * sample_s
    ]


def student_t(freedom: int, level: float) -> float:
    """Return a quantile of Student's t, for levels of at least 50 %.

    Exact for 1 and 2 degrees of freedom; otherwise from the normal quantile
    (Abramowitz and Stegun 26.7.5), within 0.4 % up to the 99 % quantile.
    """
    if freedom == 1:
        return math.tan(math.pi * (level - 0.5))
    if freedom == 2:
        return (2 * level - 1) / math.sqrt(2 * level * (1 - level))
    z = statistics.NormalDist().inv_cdf(level)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    total = z
    for power, term in enumerate(terms, 1):
        total += term / float(freedom) ** power
    return total
