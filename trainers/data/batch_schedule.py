"""The batch size of each step: turns samples into steps, and steps into samples.

A size holds until the run has trained a given number of samples, over all
epochs and ranks. The first sample of a step determines its size. A step is cut
short at the end of an epoch and where the size changes, so the size changes
exactly at the given number of samples. With `drop_last` no step is short: the
leftover samples of an epoch are skipped (and not counted), and the size
changes with the first step that begins at or after the given number.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Sizes = Sequence[tuple[int | None, int]]
"""Batch sizes in order, each with the number of trained samples at which it
ends; the last size holds to the end of the run (None).
"""
ENDLESS = 2**62
"""Length of an epoch that is longer than any run."""


class Place(NamedTuple):
    """Where a step of the run is."""

    epoch: int
    number: int
    """The step's number in its epoch, from 0."""


@dataclass(frozen=True)
class _Stretch:
    """Steps of one size within an epoch; only the last of them may be short."""

    index: int
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class _Epochs:
    """Consecutive epochs that are divided into steps in the same way."""

    epoch: int
    step: int
    """Number of steps of the run before these epochs."""
    sample: int
    """Number of samples that the run has trained before these epochs."""
    stretches: tuple[_Stretch, ...]

    @property
    def steps(self) -> int:
        """Steps in each of these epochs."""
        if not self.stretches:
            return 0
        last = self.stretches[-1]
        return last.index - (last.start - last.stop) // last.size

    @property
    def samples(self) -> int:
        """Samples trained in each of these epochs."""
        if self.stretches:
            return self.stretches[-1].stop
        return 0


class BatchSchedule:
    """Steps and samples of a run whose batch size may change at given samples."""

    def __init__(
        self, sizes: int | Sizes, length: int, drop_last: bool = False
    ) -> None:
        """`length` is the number of samples in an epoch."""
        if isinstance(sizes, int):
            sizes = [(None, sizes)]
        self.sizes: Sizes = list(sizes)
        self.length = length
        self.drop_last = drop_last
        self._ends = [
            until for until, _ in self.sizes[:-1] if until is not None
        ]
        self._runs = list(self._lay_out())

    @property
    def changes(self) -> bool:
        """Whether there is more than one size."""
        return len(self.sizes) > 1

    def size_at(self, sample: int) -> int:
        """Return the batch size of a step whose first sample has this number.

        Samples are counted from 0 over the whole run.
        """
        return self.sizes[bisect_right(self._ends, sample)][1]

    def size(self, step: int) -> int:
        """Return the nominal batch size of a step; the step itself may be shorter."""
        return self.size_at(self.samples(step))

    def place(self, step: int) -> Place:
        """Return the epoch of a step of the run, and its number in that epoch."""
        run = _last(self._runs, "step", step)
        epochs, index = divmod(step - run.step, run.steps)
        return Place(run.epoch + epochs, index)

    def samples(self, step: int) -> int:
        """Return how many samples the run has trained before a step."""
        epoch, index = self.place(step)
        run = self._run_of(epoch)
        start, _ = self.bounds(epoch, index)
        return run.sample + (epoch - run.epoch) * run.samples + start

    def step_at(self, sample: int) -> int:
        """Return the first step before which the run trained at least `sample` samples."""
        run = _last(self._runs, "sample", sample)
        epochs, within = divmod(sample - run.sample, run.samples)
        before = run.step + epochs * run.steps
        if within == 0:
            return before
        stretch = _last(run.stretches, "start", within)
        return (
            before + stretch.index - (stretch.start - within) // stretch.size
        )

    def epochs(self, step: int) -> float:
        """Return how many epochs are done before a step, including the fraction."""
        run = _last(self._runs, "step", step)
        return run.epoch + (step - run.step) / run.steps

    def first_step(self, epoch: int) -> int:
        """Return the number of an epoch's first step in the run."""
        run = self._run_of(epoch)
        return run.step + (epoch - run.epoch) * run.steps

    def steps_in(self, epoch: int) -> int:
        """Return the number of steps in an epoch."""
        return self._run_of(epoch).steps

    def bounds(self, epoch: int, index: int) -> tuple[int, int]:
        """Return where a step's samples start and end within the epoch."""
        stretch = _last(self._run_of(epoch).stretches, "index", index)
        start = stretch.start + (index - stretch.index) * stretch.size
        return start, min(start + stretch.size, stretch.stop)

    def words(self, last_step: int) -> str:
        """Describe which size holds until when, in a run of `last_step` steps."""
        told = []
        for until, size in self.sizes:
            step = None if until is None else self.step_at(until)
            if step is None or step >= last_step:
                told.append(f"{size} to the end")
                break
            told.append(
                f"{size} until {until:,} samples (step {step:,}, epoch {self.epochs(step):.4g})"
            )
        return ", then ".join(told)

    def _run_of(self, epoch: int) -> _Epochs:
        return _last(self._runs, "epoch", epoch)

    def _lay_out(self) -> Iterator[_Epochs]:
        epoch = step = sample = 0
        while True:
            run = _Epochs(epoch, step, sample, tuple(self._cut(sample)))
            yield run
            number = bisect_right(self._ends, sample)
            if number == len(self._ends) or not run.steps:
                return
            # The epochs that lie wholly before the size changes, or the one in
            # which it changes.
            left = self._ends[number] - sample - self.length
            count = max(1, left // run.samples + 1)
            epoch += count
            step += count * run.steps
            sample += count * run.samples

    def _cut(self, sample: int) -> Iterator[_Stretch]:
        """Divide an epoch into stretches; the run trained `sample` samples before it."""
        index = start = 0
        while start < self.length:
            number = bisect_right(self._ends, sample + start)
            size = self.sizes[number][1]
            room = self.length - start
            left = room
            if number < len(self._ends):
                left = min(room, self._ends[number] - sample - start)
            steps = -(-left // size)
            if self.drop_last:
                steps = min(steps, room // size)
                left = steps * size
            if not steps:
                return
            yield _Stretch(index, start, start + left, size)
            index += steps
            start += left


def _last(parts: Sequence[T], name: str, value: int) -> T:
    """Return the last part whose attribute of this name is at most `value`."""
    return parts[bisect_right(parts, value, key=attrgetter(name)) - 1]
