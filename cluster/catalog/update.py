"""Bring a price table up to date from a kept catalog."""

import datetime as dt
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cluster.catalog.download import Answer, download
from cluster.catalog.skypilot import parse_catalog
from cluster.files.prices import Price, read_table, write_table
from trainers.errors import ConfigError, StorageError

CATALOG = "https://raw.githubusercontent.com/skypilot-org/skypilot-catalog/master/catalogs/v8"
"""SkyPilot's catalog, refreshed every seven hours for AWS and Google Cloud; `PROVIDER/vms.csv` lies below."""
PROVIDERS = ("aws", "gcp", "azure")
"""Those for which there are cluster files."""


def update(
    to: Path,
    providers: Sequence[str] = PROVIDERS,
    regions: Sequence[str] = (),
    instance_types: Sequence[str] = (),
    catalog: str = CATALOG,
    today: dt.date | None = None,
    read: Callable[[str], Answer] = download,
) -> Iterator[str]:
    """Put the prices of providers into a table in place of those it has, and say what was found.

    `regions`: only of these; none: of all. `instance_types`: only those that match one of these names or patterns.
    Other providers' rows stay. Nothing is written unless every provider's catalog was read and has a price.
    Raises StorageError or ConfigError.
    """
    today = dt.datetime.now(dt.UTC).date() if today is None else today
    kept = [] if not to.exists() else [price for price in read_table(to).values() if price.provider not in providers]
    found: list[Price] = []
    for provider in providers:
        try:
            answer = read(f"{catalog.rstrip('/')}/{provider}/vms.csv")
        except StorageError as error:
            raise StorageError(f"{error}; the price table stays as it was") from error
        machines = parse_catalog(answer.text, provider, answer.url)
        prices = [
            Price(
                provider=provider,
                instance_type=row.instance_type,
                region=row.region,
                zones=row.zone,
                gpus=int(row.gpus),
                gpu_model=row.gpu_model,
                vcpus=int(row.vcpus),
                usd_per_hour=row.usd_per_hour,
                spot_usd_per_hour=row.spot_usd_per_hour,
                date=today,
                as_of=answer.as_of,
                source=answer.url,
            )
            for row in machines.rows
            if (not regions or row.region in regions)
            and (not instance_types or any(fnmatch.fnmatchcase(row.instance_type, one) for one in instance_types))
        ]
        if not prices:
            rule = "matches no machine of the catalog: nothing is written"
            given = ", ".join((*regions, *instance_types))
            raise ConfigError("--region or --instance-type", given, rule, "name others, or leave them out", answer.url)
        spot = sum(price.spot_usd_per_hour is not None for price in prices)
        of = f"of {answer.as_of}" if answer.as_of else "of unknown age: its server does not say"
        num_regions = len({price.region for price in prices})
        yield f"{provider}: {len(prices)} prices in {num_regions} regions, {spot} with a spot price; a catalog {of}"
        if machines.left_out:
            reasons = ", ".join(f"{count} {reason}" for reason, count in machines.left_out.items())
            yield f"{provider}: rows left out: {reasons}"
        found += prices
    write_table(to, [*kept, *found])
    yield f"written: {to}"
