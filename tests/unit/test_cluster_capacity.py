"""What a cluster can grow to, and what it costs: hand-made cases, and the price table."""

import csv
import datetime as dt
import itertools
from dataclasses import replace

import pytest

from cluster.files.capacity import (
    PRICES,
    NodeType,
    cost,
    grow,
    load_prices,
    nodes_of,
    read_prices,
    total,
    worker_slots,
)
from tests.specs import REPOSITORY
from tune.__main__ import main

GPU_NODE = {"CPU": 8, "GPU": 1}
FOUR_GPUS = {"CPU": 48, "GPU": 4}


@pytest.mark.parametrize(
    ("nodes", "cpus", "gpus", "slots"),
    [
        ([], 1, 0, 0),
        ([{"CPU": 8}], 3, 0, 2),
        (
            [{"CPU": 2}, {"CPU": 2}],
            3,
            0,
            0,
        ),  # 4 CPUs in all, but no node holds a whole worker
        ([{"CPU": 8}], 1, 1, 0),  # no GPU
        ([GPU_NODE], 9, 1, 0),
        ([FOUR_GPUS], 13, 1, 3),  # CPUs are what is short
        ([FOUR_GPUS, GPU_NODE], 8, 1, 5),
        ([FOUR_GPUS], 0, 0.5, 8),
        ([{"CPU": 0.3}], 0.1, 0, 3),  # 0.3 / 0.1 is 2.9999999999999996
        ([{"CPU": 0, "GPU": 0}], 1, 0, 0),
    ],
)
def test_worker_slots(nodes, cpus, gpus, slots):
    assert worker_slots(nodes, cpus, gpus) == slots


HEAD = NodeType(
    "head", {"CPU": 0, "GPU": 0}, is_head=True, instance_type="m5.2xlarge"
)
SMALL = NodeType("small", GPU_NODE, 1, 8, instance_type="g5.2xlarge")
LARGE = NodeType("large", FOUR_GPUS, 0, 2, instance_type="g5.12xlarge")
SPOT = NodeType(
    "spot", GPU_NODE, 0, 8, instance_type="g5.2xlarge", spot=True, priority=10
)


def test_grow_prefers_the_higher_priority_and_leaves_useless_types_alone():
    on_demand = NodeType("on_demand", GPU_NODE, 0, 8)
    cpu_only = NodeType("cpu_only", {"CPU": 64}, 0, 8)
    counts = grow([cpu_only, on_demand, SPOT], 10, 1, 1)
    assert counts == {"cpu_only": 0, "on_demand": 2, "spot": 8}


def test_grow_is_exact():
    """Against trying every choice of nodes: the most workers, and the fewest
    nodes for a number of them.
    """
    types = [
        NodeType("a", {"CPU": 7, "GPU": 2}, 1, 3),
        NodeType("b", {"CPU": 20, "GPU": 3}, 0, 2),
        NodeType("c", {"CPU": 4, "GPU": 8}, 0, 4),
    ]
    for limit, cpus, gpus in itertools.product(
        (1, 3, 5), (1, 3, 7), (0, 0.5, 1)
    ):
        choices = [
            dict(zip("abc", numbers, strict=True))
            for numbers in itertools.product(range(1, 4), range(3), range(5))
            if sum(numbers) <= limit
        ]
        slots = [
            worker_slots(nodes_of(types, choice), cpus, gpus)
            for choice in choices
        ]
        most = grow(types, limit, cpus, gpus)
        assert worker_slots(nodes_of(types, most), cpus, gpus) == max(slots)
        for workers in range(1, max(slots) + 1):
            counts = grow(types, limit, cpus, gpus, workers)
            fewest = min(
                sum(c.values())
                for c, s in zip(choices, slots, strict=True)
                if s >= workers
            )
            assert worker_slots(nodes_of(types, counts), cpus, gpus) >= workers
            assert sum(counts.values()) == fewest


def test_cost_counts_the_head_and_names_what_has_no_price():
    row = replace(read_prices()[0], spot_usd_per_hour=None)
    head, small = (
        replace(row, usd_per_hour=0.5),
        replace(row, usd_per_hour=1.25),
    )
    prices = {"m5.2xlarge": head, "g5.2xlarge": small}
    counts = {"small": 2, "large": 0}
    assert cost([HEAD, SMALL, LARGE], counts, prices).usd_per_hour == 3.0
    assert (
        cost([HEAD, SMALL, LARGE], counts, prices).missing == ()
    )  # no node of the type without a price
    on_spot = [HEAD, replace(SMALL, spot=True), LARGE]
    spot = {"g5.2xlarge": replace(small, spot_usd_per_hour=0.25)}
    assert cost(on_spot, counts, prices | spot).spot_usd_per_hour == 1.0
    assert cost(on_spot, counts, prices).spot_usd_per_hour is None  # not known
    with_large = cost([HEAD, SMALL, LARGE], {"small": 1, "large": 1}, prices)
    assert (with_large.usd_per_hour, with_large.missing) == (None, ("large",))
    assert cost([NodeType("bare", GPU_NODE)], {"bare": 1}, prices).missing == (
        "bare",
    )


def test_every_row_has_a_source_that_nobody_changes_and_a_date():
    prices = read_prices()
    assert len(
        {
            (price.provider, price.instance_type, price.region)
            for price in prices
        }
    ) == len(prices)
    with PRICES.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            assert len(row["source"].split("/")[5]) == 40, "a commit"
            date = dt.date.fromisoformat(row["date"])
            assert date <= dt.datetime.now(dt.UTC).date()
    for price in prices:
        assert 0 < price.usd_per_hour < 100
        assert (
            price.spot_usd_per_hour is None
            or 0 < price.spot_usd_per_hour <= price.usd_per_hour
        )


@pytest.mark.parametrize(
    ("region", "usd"),
    [
        ("us-east4", 0.85083),
        ("us-west1", 0.85362),
        ("mars", 0.85362),
        (None, 0.85362),
    ],
)
def test_a_region_has_its_own_prices_and_an_unknown_one_those_of_the_dearest(
    region, usd
):
    price = load_prices("gcp", region)["g2-standard-8"]
    assert (price.usd_per_hour, price.vcpus, price.gpus) == (usd, 8, 1)


@pytest.mark.parametrize(
    ("name", "on_demand", "spot"),
    [
        ("aws", 0.384 + 8 * 1.212, 0.384 + 8 * 0.4992),
        (
            "gcp",
            0.38847 + 8 * (0.29358 + 0.56004),
            0.38847 + 8 * (0.11747 + 0.2231),
        ),
        ("azure", 0.384 + 4 * 3.673, 0.384 + 4 * 0.444433),
    ],
)
def test_a_sweep_on_each_shipped_file_costs_what_a_calculation_by_hand_says(
    name, on_demand, spot, capsys
):
    sweep = REPOSITORY / "examples/digits/sweep.yaml"
    cluster = REPOSITORY / f"cluster/{name}.yaml"
    assert main(["plan", str(sweep), "--cluster", str(cluster)]) == 0
    out = capsys.readouterr().out
    assert f"{on_demand:.2f} USD/hour\n" in out
    assert (
        f"USD/hour     {on_demand:.2f} (on-demand list prices; {spot:.2f} with spot nodes"
        in out
    )
    assert out.count("prices.csv") == 1


def test_a_node_without_a_resource_adds_nothing():
    assert total([{"CPU": 4.0}, {"CPU": 8.0, "GPU": 1.0}], "GPU") == 1.0
