"""What instance types cost and hold, by region, and how old each figure is: the shipped table, and the user's own.

`python -m cluster prices update` writes tables (cluster/catalog). Rows of the user's table go before the shipped ones.
Environment read: PACELINE_PRICES, the user's table; XDG_CACHE_HOME, in whose `paceline/prices.csv` it lies otherwise.
"""

import contextlib
import csv
import datetime as dt
import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from trainers.errors import MISSING, ConfigError, StorageError

STALE_AFTER_DAYS = 180
PRICES = Path(__file__).with_name("prices.csv")
MOST_USD_PER_HOUR = 10_000.0
"""No machine costs more: what does is no price in dollars an hour."""

_Usd = Annotated[float, Field(gt=0, le=MOST_USD_PER_HOUR, allow_inf_nan=False)]
_Blank = BeforeValidator(lambda text: None if text == "" else text)
Key = tuple[str, str, str]
"""Provider, instance type and region."""


@dataclass(frozen=True)
class Price:
    """One instance type's list prices in a region (Linux, shared tenancy) and what the machine holds."""

    provider: str
    instance_type: str
    region: str
    zones: str
    """Those of the region that have the machine, as the source names them, with spaces between; empty: not known."""
    gpus: int
    gpu_model: str
    vcpus: int
    usd_per_hour: _Usd
    spot_usd_per_hour: Annotated[_Usd | None, _Blank]
    """Of the zones' spot prices the median; None: not known, or no spot machine there."""
    date: dt.date
    """The day on which the source was read."""
    as_of: Annotated[dt.date | None, _Blank]
    """The day of the source's last change; None: the source does not say."""
    source: str

    @property
    def key(self) -> Key:
        """What there is one price of."""
        return self.provider, self.instance_type, self.region

    def age_days(self, today: dt.date) -> int:
        """Return the days since the source last changed, or since it was read where that is not known."""
        return (today - (self.as_of or self.date)).days

    def is_stale(self, today: dt.date) -> bool:
        """Return whether the figure is older than half a year: look it up again."""
        return self.age_days(today) > STALE_AFTER_DAYS

    def age(self, today: dt.date) -> str:
        """Say how old the figure is, and whether that is too old."""
        stale = f", STALE: over {STALE_AFTER_DAYS} days, `python -m cluster prices update`"
        days = f"{self.age_days(today)} days"
        words = f"{days} old" if self.as_of else f"read {days} ago from a source of unknown age"
        return words + stale * self.is_stale(today)


def user_table() -> Path:
    """Return where the user's own price table lies, whether or not there is one."""
    if given := os.environ.get("PACELINE_PRICES"):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '')}/.cache"
    return Path(cache, "paceline", "prices.csv")


def all_prices() -> dict[Key, Price]:
    """Return every known price: the shipped ones, under those of the user's table.

    Raises ConfigError where the user's table is not one, or PACELINE_PRICES names none.
    """
    own = user_table()
    with contextlib.suppress(PermissionError):  # another user's home
        if own.exists():
            return read_table(PRICES) | read_table(own)
    if os.environ.get("PACELINE_PRICES"):
        fix = f"write it with `python -m cluster prices update --to {own}`"
        raise ConfigError("PACELINE_PRICES", str(own), "must name a price table", fix)
    return read_table(PRICES)


def load_prices(provider: str | None = None, region: str | None = None) -> dict[str, Price]:
    """Return the prices by instance type, of one provider or all: those of `region` where known, else of the dearest.

    Raises ConfigError as `all_prices` does.
    """
    known = [price for price in all_prices().values() if provider in (None, price.provider)]
    known.sort(key=lambda price: (price.region == region, price.usd_per_hour))
    return {price.instance_type: price for price in known}


def read_table(path: Path) -> dict[Key, Price]:
    """Read a price table; raises ConfigError naming file, row and field where it is not one."""
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read(path: Path, _changed_ns: int) -> dict[Key, Price]:
    fix = "write it anew with `python -m cluster prices update`, or delete it"
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            rows = TypeAdapter(list[Price]).validate_python(list(csv.DictReader(stream, strict=True)))
    except ValidationError as error:
        first = error.errors()[0]
        row, name = (*first["loc"], "", "")[:2]
        field = f"row {int(row) + 1}{f', {name}' if name else ''}"
        value = first["input"] if isinstance(first["input"], str) else MISSING
        raise ConfigError(field, value, f"is wrong ({first['msg']})", fix, str(path)) from error
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise ConfigError("the file", MISSING, f"is no price table ({error})", fix, str(path)) from error
    return {price.key: price for price in rows}


def write_table(path: Path, prices: Iterable[Price]) -> None:
    """Write a price table, whole or not at all; raises StorageError where that cannot be done."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, [field.name for field in fields(Price)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(_cells(asdict(price)) for price in sorted(prices, key=lambda price: price.key))
        aside.replace(path)
    except OSError as error:
        raise StorageError(f"the price table {path} cannot be written: {error.strerror or error}") from error
    finally:
        aside.unlink(missing_ok=True)


def _cells(row: Mapping[str, object]) -> dict[str, object]:
    """A row as it is written: prices without an exponent."""
    return {
        name: f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
        for name, value in row.items()
    }
