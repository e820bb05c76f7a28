"""Gather what the figures share: the key of the x axis, that of the colour, and values.

Of the keys that vary, batch size or the first number is the x axis, and precision or
the first key of few values the colour.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tune.config import BATCH_KEYS, SweepConfig
from tune.report.canvas import SERIES
from tune.report.words import in_words, is_number, labels, shown, telling
from tune.trials.record import TrialRecord

SIZE_KEYS = (*BATCH_KEYS, "microbatch_size")


@dataclass(frozen=True)
class Axis:
    """A key of the configuration, and the values of it that were tried."""

    key: str
    label: str
    values: list[Any]
    """Rising where they are numbers, else as they were tried."""

    @functools.cached_property
    def is_numeric(self) -> bool:
        """Whether all of them are numbers."""
        return all(map(is_number, self.values))

    @property
    def is_log(self) -> bool:
        """Whether ratios of them are more telling than differences."""
        if not self.is_numeric or self.values[0] <= 0:
            return False
        return self.key in SIZE_KEYS or bool(self.values[-1] >= 8 * self.values[0])

    @functools.cached_property
    def positions(self) -> list[float]:
        """Their places on the axis."""
        return [
            float(value if self.is_numeric else at)
            for at, value in enumerate(self.values)
        ]

    def index(self, record: TrialRecord) -> int:
        """Return which of the values a trial has."""
        # By their text: a NaN does not equal itself, True equals 1, and lists and
        # mappings have no hash.
        return self._places[repr(record.config.get(self.key))]

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {repr(value): at for at, value in enumerate(self.values)}

    def position(self, record: TrialRecord) -> float:
        """Return a trial's place on the axis."""
        return self.positions[self.index(record)]

    def name(self, value: Any) -> str:
        """Return a value as a legend has it."""
        return cut(("" if self.key == "precision" else f"{self.label} ") + shown(value))


class FigureData:
    """The trials of a sweep, with a place on the x axis and a series each."""

    def __init__(
        self, config: SweepConfig, records: list[TrialRecord], best: TrialRecord | None
    ) -> None:
        self.config = config
        self.records = records
        self.best = best
        self.finished = [record for record in records if record.finished]
        self.out_of_memory = [
            record for record in records if record.status == "out_of_memory"
        ]
        names = telling(config, records)
        self._words = {record.id: in_words(names, record) for record in records}
        axes = {
            key: Axis(key, label, _tried(key, records))
            for key, label in labels(config, records).items()
        }
        self.varied = [
            axis
            for axis in axes.values()
            if len(axis.values) > 1 and axis.key != "seed"
        ]
        """The keys of which more than one value was tried; a seed is a repeat."""
        self.x = _choose_x(list(axes.values()))
        # More values than colours would be a legend larger than its figure, or nothing
        # to compare.
        rest = [axis for axis in self.varied if axis != self.x]
        few = [axis for axis in rest if len(axis.values) <= len(SERIES)]
        few.sort(key=lambda axis: axis.key != "precision")
        self.by = few[0] if few else None
        self.names = [""]
        if self.by is not None:
            self.names = [self.by.name(value) for value in self.by.values]

    def series(self, record: TrialRecord) -> int:
        """Return which series a trial belongs to."""
        return self.by.index(record) if self.by else 0

    def color(self, record: TrialRecord) -> str:
        """Return the colour of a trial's series."""
        return SERIES[self.series(record)]

    def legend(self, records: Iterable[TrialRecord]) -> list[tuple[str, str]]:
        """Return colours and names of the series that these trials belong to."""
        return [
            (SERIES[at], self.names[at])
            for at in sorted({self.series(record) for record in records})
        ]

    def each(self) -> str:
        """Return the series in words."""
        return f", for each {self.by.label}" if self.by else ""

    def is_best(self, record: TrialRecord) -> bool:
        """Whether the trial is the sweep's best."""
        return self.best is not None and record.id == self.best.id

    def tip(self, record: TrialRecord, text: str) -> str:
        """Return what is shown when the mouse is over a trial's mark."""
        return f"{self._words[record.id]}: {text}"


def _tried(key: str, records: list[TrialRecord]) -> list[Any]:
    """Return the values of a key that were tried."""
    tried: dict[str, Any] = {}
    for record in records:
        value = record.config.get(key)
        tried.setdefault(repr(value), value)
    values = list(tried.values())
    return sorted(values) if all(map(is_number, values)) else values


def _choose_x(axes: list[Axis]) -> Axis:
    """Return the key of the x axis: a batch size or the first number, one that varies."""
    numeric = [axis for axis in axes if axis.is_numeric]
    varied = [axis for axis in numeric if len(axis.values) > 1] or numeric
    sizes = [axis for axis in varied if axis.key in SIZE_KEYS]
    sizes.sort(key=lambda axis: SIZE_KEYS.index(axis.key))
    return [*sizes, *varied, *axes][0]


def cut(text: str) -> str:
    """Return text that fits beside an axis."""
    return text if len(text) <= 26 else text[:23] + "..."
