"""List prices of machines: prices.csv, whose rows have a source and its date."""

import csv
import datetime as dt
import functools
from dataclasses import dataclass
from pathlib import Path

PRICES = Path(__file__).with_name("prices.csv")
STALE_AFTER_DAYS = 180


@dataclass(frozen=True)
class Price:
    """One instance type's list prices in a region (Linux, shared tenancy)."""

    provider: str
    instance_type: str
    region: str
    gpus: int
    vcpus: int
    usd_per_hour: float
    spot_usd_per_hour: float | None
    """The median of the region's zones; None: not known, or no spot machine there."""
    date: dt.date
    """The day on which the source was read."""
    source: str

    def age(self, today: dt.date) -> str:
        """Say how old the figure is, and whether that is too old."""
        days = (today - self.date).days
        if days > STALE_AFTER_DAYS:
            return (
                f"read {days} days ago, STALE: over {STALE_AFTER_DAYS} days, look it up"
            )
        return f"read {days} days ago"


def load_prices(provider: str, region: str | None = None) -> dict[str, Price]:
    """Return a provider's prices by instance type.

    They are those of `region` where known, else of the dearest region.
    """
    known = [price for price in read_prices() if price.provider == provider]
    known.sort(key=lambda price: (price.region == region, price.usd_per_hour))
    return {price.instance_type: price for price in known}


@functools.cache
def read_prices() -> tuple[Price, ...]:
    """Return all rows of the table."""
    with PRICES.open(newline="", encoding="utf-8") as stream:
        return tuple(
            Price(
                provider=row["provider"],
                instance_type=row["instance_type"],
                region=row["region"],
                gpus=int(row["gpus"]),
                vcpus=int(row["vcpus"]),
                usd_per_hour=float(row["usd_per_hour"]),
                spot_usd_per_hour=float(row["spot_usd_per_hour"])
                if row["spot_usd_per_hour"]
                else None,
                date=dt.date.fromisoformat(row["date"]),
                source=row["source"],
            )
            for row in csv.DictReader(stream)
        )
