"""What the figures share, gathered from the records: the key of the x axis, the key of the colour, their values."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tune.config import BATCH_KEYS, SweepConfig
from tune.report.canvas import SERIES
from tune.report.words import in_short, is_number, labels, shown
from tune.trials.record import TrialRecord

SIZE_KEYS = (*BATCH_KEYS, "microbatch_size")


class FigureData:
    """The trials of a sweep, with a place on the x axis and a series each."""

    def __init__(self, config: SweepConfig, records: list[TrialRecord], best: TrialRecord | None) -> None:
        self.config, self.records, self.best = config, records, best
        self.finished = [record for record in records if record.finished]
        self.out_of_memory = [record for record in records if record.status == "out_of_memory"]
        self.labels = labels(config, records)
        self.words = {record.id: in_short(self.labels, record) for record in records}
        tried = {key: self._tried(key) for key in self.labels}
        numeric = [key for key, values in tried.items() if all(map(is_number, values))]
        varied = [key for key in numeric if len(tried[key]) > 1] or numeric
        self.x = next((key for key in (*SIZE_KEYS, *varied) if key in varied), next(iter(tried)))
        self.is_numeric = self.x in numeric
        self.values = tried[self.x]
        self.places = {repr(value): float(value if self.is_numeric else at) for at, value in enumerate(self.values)}
        # More values than colours would be a legend larger than its figure, or nothing to compare.
        others = [key for key, values in tried.items() if key != self.x and 2 <= len(values) <= len(SERIES)]
        self.by = "precision" if "precision" in others else next(iter(others), None)
        prefix = f"{self.labels[self.by]} " if self.by and self.by != "precision" else ""
        self.names = [cut(prefix + shown(value)) for value in tried[self.by]] if self.by else [""]
        self._series = {repr(value): at for at, value in enumerate(tried[self.by])} if self.by else {}

    def _tried(self, key: str) -> list[Any]:
        """Return the values of a key that were tried: rising where they are numbers, else in the order of the list."""
        # By their text: a NaN does not equal itself, True equals 1, and lists and mappings have no hash.
        tried = list({repr(record.config.get(key)): record.config.get(key) for record in self.records}.values())
        if all(map(is_number, tried)):
            return sorted(tried)
        space = self.config.space.get(key)
        listed = {repr(value): at for at, value in enumerate(space)} if isinstance(space, list) else {}
        return sorted(tried, key=lambda value: (listed.get(repr(value), math.inf), str(value)))

    def series(self, trial: Mapping[str, Any]) -> int:
        """Return which series a configuration belongs to; -1: one that no trial has."""
        return self._series.get(repr(trial.get(self.by)), -1) if self.by else 0

    def color(self, record: TrialRecord) -> str:
        """Return the colour of a trial's series."""
        return SERIES[self.series(record.config)]

    def legend(self, records: Iterable[TrialRecord]) -> list[tuple[str, str]]:
        """Return colour and name of the series that these trials belong to."""
        return [(SERIES[at], self.names[at]) for at in sorted({self.series(record.config) for record in records})]

    def each(self) -> str:
        """Return the series in words."""
        return f", for each {self.labels[self.by]}" if self.by else ""

    def position(self, record: TrialRecord) -> float:
        """Return a trial's place on the x axis."""
        return self.places[repr(record.config.get(self.x))]

    def is_best(self, record: TrialRecord) -> bool:
        """Whether the trial is the sweep's best."""
        return self.best is not None and record.id == self.best.id

    def tip(self, record: TrialRecord, text: str) -> str:
        """Return what is shown when the mouse is over a trial's mark."""
        return f"{self.words[record.id]}: {text}"


def cut(text: str) -> str:
    """Return text that fits beside an axis."""
    return text if len(text) <= 26 else text[:23] + "..."
