"""The price list `prices.csv`: what instance types cost and hold, and how old each figure is."""

import csv
import datetime as dt
import functools
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

STALE_AFTER_DAYS = 180
PRICES = Path(__file__).with_name("prices.csv")


@dataclass(frozen=True)
class Price:
    """One instance type's on-demand list price (Linux, shared tenancy) and what the machine holds."""

    instance_type: str
    provider: str
    region: str
    gpus: int
    gpu_model: str
    vcpus: int
    usd_per_hour: float
    date: dt.date
    """The day on which the source gave this figure."""
    source: str

    def age_days(self, today: dt.date) -> int:
        """Return the days since the figure was looked up."""
        return (today - self.date).days

    def is_stale(self, today: dt.date) -> bool:
        """Return whether the figure is older than half a year: look it up again."""
        return self.age_days(today) > STALE_AFTER_DAYS


@functools.cache
def load_prices(path: Path = PRICES) -> dict[str, Price]:
    """Read the price list, by instance type."""
    with path.open(newline="", encoding="utf-8") as stream:
        rows = TypeAdapter(list[Price]).validate_python(list(csv.DictReader(stream)))
    return {price.instance_type: price for price in rows}
