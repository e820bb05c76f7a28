"""The price table, and what the shipped cluster files cost by it."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest

from cluster.files.prices import STALE_AFTER_DAYS, load_prices, read_prices
from tests.specs import REPOSITORY
from tune.__main__ import main


def test_every_row_has_a_source_that_nobody_changes_and_a_date() -> None:
    prices = read_prices()
    assert len({(price.provider, price.instance_type, price.region) for price in prices}) == len(prices)
    for price in prices:
        assert len(price.source.split("/")[5]) == 40, "a commit"
        assert price.date <= dt.datetime.now(dt.UTC).date()
        assert 0 < price.usd_per_hour < 100
        assert price.spot_usd_per_hour is None or 0 < price.spot_usd_per_hour <= price.usd_per_hour


@pytest.mark.parametrize(
    ("region", "usd"),
    [("us-east4", 0.85083), ("us-west1", 0.85362), ("mars", 0.85362), (None, 0.85362)],
)
def test_a_region_has_its_own_prices_and_an_unknown_one_those_of_the_dearest(region: str | None, usd: float) -> None:
    price = load_prices("gcp", region)["g2-standard-8"]
    assert (price.usd_per_hour, price.vcpus, price.gpus) == (usd, 8, 1)


def test_a_price_that_is_half_a_year_old_is_stale() -> None:
    price = replace(read_prices()[0], date=dt.date(2026, 1, 1))
    last = price.date + dt.timedelta(days=STALE_AFTER_DAYS)
    assert price.age(last) == "read 180 days ago"
    assert "STALE" in price.age(last + dt.timedelta(days=1))


@pytest.mark.parametrize(
    ("name", "on_demand", "spot"),
    [
        ("aws", 0.384 + 8 * 1.212, 0.384 + 8 * 0.4992),
        ("gcp", 0.38847 + 8 * (0.29358 + 0.56004), 0.38847 + 8 * (0.11747 + 0.2231)),
        ("azure", 0.384 + 4 * 3.673, 0.384 + 4 * 0.444433),
    ],
)
def test_a_sweep_on_each_shipped_file_costs_what_a_calculation_by_hand_says(
    name: str, on_demand: float, spot: float, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, cluster = REPOSITORY / "examples/digits/sweep.yaml", REPOSITORY / f"cluster/{name}.yaml"
    assert main(["plan", str(sweep), "--cluster", str(cluster)]) == 0
    out = capsys.readouterr().out
    assert f"{on_demand:.2f} USD/hour\n" in out
    assert f"USD/hour     {on_demand:.2f} (on-demand list prices; {spot:.2f} with spot nodes" in out
    assert out.count("price of ") == 2
