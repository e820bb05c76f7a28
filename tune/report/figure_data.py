"""What the figures share, gathered from the records: which key is the x axis, the colour, the panel; their values.

Of the keys that vary, batch size or the first number is the x axis; precision or the first key of few values the
colour, or else the first of many numbers, as a scale; the next of few values parts the figures into panels. The figure
of all keys has whatever is left.
"""

import copy
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from tune.config import BATCH_KEYS, SweepConfig
from tune.report.canvas import SCALE, SERIES
from tune.report.words import in_short, is_number, labels, shown, telling
from tune.trials.record import TrialRecord

SIZE_KEYS = (*BATCH_KEYS, "microbatch_size")


@dataclass(frozen=True)
class Axis:
    """A key of the configuration, and the values of it that were tried."""

    key: str
    label: str
    values: list[Any]
    """Rising where they are numbers, else in the order of the list."""

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
        return [float(value if self.is_numeric else at) for at, value in enumerate(self.values)]

    def index(self, trial: Mapping[str, Any]) -> int:
        """Return which of the values a configuration has; -1: one that no trial has."""
        # By their text: a NaN does not equal itself, True equals 1, and lists and mappings have no hash.
        return self._places.get(repr(trial.get(self.key)), -1)

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {repr(value): at for at, value in enumerate(self.values)}

    def position(self, record: TrialRecord) -> float:
        """Return a trial's place on the axis."""
        return self.positions[self.index(record.config)]

    def color(self, record: TrialRecord) -> str:
        """Return the colour of a trial's value on the scale from the lowest to the highest."""
        scale = math.log if self.is_log else float
        low, value, high = (scale(one) for one in (self.values[0], record.config[self.key], self.values[-1]))
        return SCALE[round((value - low) / (high - low) * (len(SCALE) - 1))]

    def name(self, value: Any) -> str:
        """Return a value as a legend has it."""
        return cut(("" if self.key == "precision" else f"{self.label} ") + shown(value))


class FigureData:
    """The trials of a sweep, with a place on the x axis, a series and a panel each."""

    def __init__(self, config: SweepConfig, records: list[TrialRecord], best: TrialRecord | None) -> None:
        self.config, self.best = config, best
        self.labels = labels(config, records)
        names = telling(config, records)
        self.words = {record.id: in_short(names, record) for record in records}
        self.axes = {key: Axis(key, label, self._tried(key, records)) for key, label in self.labels.items()}
        numeric = [key for key, axis in self.axes.items() if axis.is_numeric]
        varied = [key for key in numeric if len(self.axes[key].values) > 1] or numeric
        self.x = self.axes[next((key for key in (*SIZE_KEYS, *varied) if key in varied), next(iter(self.axes)))]
        self.varied = [axis for axis in self.axes.values() if len(axis.values) > 1]
        """The keys of which more than one value was tried."""
        # More values than colours would be a legend larger than its figure, or nothing to compare.
        rest = [axis for axis in self.varied if axis != self.x]
        few = [axis for axis in rest if len(axis.values) <= len(SERIES)]
        self.by = next((axis for axis in few if axis.key == "precision"), few[0] if few else None)
        self.facet = next((axis for axis in few if axis != self.by), None)
        self.scale = next((axis for axis in rest if axis.is_numeric and axis not in few and self.by is None), None)
        self.names = [self.by.name(value) for value in self.by.values] if self.by else [""]
        self._panel = 0
        self._take(records)

    def _take(self, records: list[TrialRecord]) -> None:
        self.records = records
        self.finished = [record for record in records if record.finished]
        self.out_of_memory = [record for record in records if record.status == "out_of_memory"]

    def _tried(self, key: str, records: list[TrialRecord]) -> list[Any]:
        """Return the values of a key that were tried."""
        tried = list({repr(record.config.get(key)): record.config.get(key) for record in records}.values())
        if all(map(is_number, tried)):
            return sorted(tried)
        space = self.config.space.get(key)
        listed = {repr(value): at for at, value in enumerate(space)} if isinstance(space, list) else {}
        return sorted(tried, key=lambda value: (listed.get(repr(value), math.inf), str(value)))

    @property
    def hidden(self) -> list[Axis]:
        """The keys that vary and are neither the x axis nor the colours of a legend."""
        return [axis for axis in self.varied if axis not in (self.x, self.by)]

    def parts(self) -> Iterator[tuple[str, Self]]:
        """Give the trials of each panel, with its title; all of them, without one, where there are no panels."""
        for at, value in enumerate(self.facet.values if self.facet else [None]):
            part = copy.copy(self)
            part._panel = at
            if self.facet:
                part._take([record for record in self.records if part.has(record.config)])
            yield self.facet.name(value) if self.facet else "", part

    def has(self, trial: Mapping[str, Any]) -> bool:
        """Whether a configuration belongs to this panel."""
        return self.facet is None or self.facet.index(trial) == self._panel

    def series(self, trial: Mapping[str, Any]) -> int:
        """Return which series a configuration belongs to; -1: one that no trial has."""
        return self.by.index(trial) if self.by else 0

    def color(self, record: TrialRecord) -> str:
        """Return the colour of a trial: of its series, or on the scale."""
        return self.scale.color(record) if self.scale else SERIES[self.series(record.config)]

    def legend(self, records: Iterable[TrialRecord]) -> list[tuple[str, str]]:
        """Return colours and names: of the series that these trials belong to, or of the ends of the scale."""
        if self.scale:
            ends = [(SCALE[0], self.scale.values[0]), (SCALE[-1], self.scale.values[-1])]
            return [(color, self.scale.name(value)) for color, value in ends]
        return [(SERIES[at], self.names[at]) for at in sorted({self.series(record.config) for record in records})]

    def each(self) -> str:
        """Return the series and the panels in words."""
        keys = [axis.label for axis in (self.by or self.scale, self.facet) if axis]
        return f", for each {' and '.join(keys)}" if keys else ""

    def position(self, record: TrialRecord) -> float:
        """Return a trial's place on the x axis."""
        return self.x.position(record)

    def is_best(self, record: TrialRecord) -> bool:
        """Whether the trial is the sweep's best."""
        return self.best is not None and record.id == self.best.id

    def tip(self, record: TrialRecord, text: str) -> str:
        """Return what is shown when the mouse is over a trial's mark."""
        return f"{self.words[record.id]}: {text}"


def cut(text: str) -> str:
    """Return text that fits beside an axis."""
    return text if len(text) <= 26 else text[:23] + "..."
