"""The machines for a sweep by a deadline: what is chosen, when nothing is, and the cluster file that is written."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest

from cluster.files.prices import load_prices
from cluster.files.ray_up import load_cluster
from cluster.rules.ray_up import findings
from cluster.spot.availability import SpotRates
from tests.specs import REPOSITORY
from trainers.config.yaml import dump_yaml
from trainers.errors import ConfigError
from tune.__main__ import main
from tune.sweeps.chosen import cluster_yaml
from tune.sweeps.deadline import DeadlinePlan, Terms, plan_by_deadline
from tune.sweeps.plan import make_plan
from tune.sweeps.spec import read_sweep

CLUSTER = str(REPOSITORY / "cluster/aws.yaml")
SWEEP = str(REPOSITORY / "examples/digits/sweep.yaml")  # eight trials
NOW = dt.datetime(2026, 11, 25, tzinfo=dt.UTC)


def chosen(
    tmp_path: Path, hours: float, minutes: float | None = 120, cluster: str = CLUSTER, **terms: Any
) -> DeadlinePlan:
    spec = read_sweep(SWEEP, {"storage_path": str(tmp_path)}, own_workers=False)
    forecast = make_plan(spec, load_cluster(cluster), minutes)
    return plan_by_deadline(forecast, Terms(NOW + dt.timedelta(hours=hours), NOW, **terms))


def test_on_demand_machines_cost_what_a_calculation_by_hand_says(tmp_path: Path) -> None:
    found = chosen(tmp_path, hours=8, rates=SpotRates(600, 36_000))  # spot is seldom to be had
    best = found.best
    assert found.is_sure
    assert not best.is_spot
    # Eight trials of two hours on 4 lanes, then two hours on one machine, and 5 minutes to start.
    head, node = (
        load_prices("aws", "us-east-1")[name].usd_per_hour for name in ("m5.2xlarge", best.offer.price.instance_type)
    )
    four = next(one for one in found.choices if one.lanes == 4 and one.offer == best.offer)
    assert four.job.work_s == 6 * 3600
    hours = 6 + 5 / 60
    assert four.least_usd == pytest.approx(hours * (head + node * (4 * 4 + 2 * 1) / 6))
    assert {one.offer.price.gpu_model for one in found.choices} == {"A10G"}  # of no other GPU the speed is known


def test_spot_is_chosen_where_it_is_cheap_and_left_where_the_deadline_is_near(tmp_path: Path) -> None:
    cheap: dict[str, Any] = {"spot_share": 0.3, "rates": SpotRates(3 * 3600, 1800)}
    assert chosen(tmp_path, hours=48, **cheap).best.is_spot
    near = chosen(tmp_path, hours=2 * 2 + 1, **cheap)  # eight lanes, two hours each, then the winner
    assert near.is_sure
    assert near.best.lanes == 8
    late = chosen(tmp_path, hours=3)
    assert not late.is_sure
    assert late.best.probability() < 0.05
    assert "none is sure" in "\n".join(late.lines())


def test_a_faster_gpu_is_considered_where_its_speed_is_given(tmp_path: Path) -> None:
    fast = chosen(tmp_path, hours=24, speeds={"L4": 10.0}).best
    assert fast.offer.price.gpu_model == "L4"
    dear = chosen(tmp_path, hours=24, speeds={"L4": 10.0}, budget_usd=0.01)
    assert not dear.is_sure


OFTEN_THERE = SpotRates(3 * 3600, 1800)


def test_spot_prices_and_regions_are_those_of_the_table(tmp_path: Path) -> None:
    found = chosen(tmp_path, hours=48, rates=OFTEN_THERE)
    best = found.best
    assert (best.offer.price.instance_type, best.is_spot) == ("g5.2xlarge", True)
    assert best.offer.price.region == "us-east-2"  # 0.4075 there, 0.4992 at home
    eight = next(one for one in found.choices if one.lanes == 8 and one.offer == best.offer and one.is_spot)
    # Eight machines for two hours, then one for two; 5 minutes to start.
    assert eight.least_usd == pytest.approx((4 + 5 / 60) * (0.384 + 0.4075 * (8 * 2 + 1 * 2) / 4))
    shown = "\n".join(found.lines())
    assert "price        1.212 USD/hour, on spot 0.4075; " in shown
    assert "traffic to the bucket in us-east-1 is not priced" in shown
    assert "(aws, us-east-1)" in shown  # what it costs at home is said as well
    at_home = chosen(tmp_path, hours=48, rates=OFTEN_THERE, regions=("us-east-1",))
    assert {one.offer.price.region for one in at_home.choices} == {"us-east-1"}
    assert at_home.best.offer.spot_usd_per_hour == 0.4886  # g5.xlarge: its median
    assert "traffic" not in "\n".join(at_home.lines())
    with pytest.raises(ConfigError, match="fits no machine of aws in eu-north-9"):
        chosen(tmp_path, hours=48, regions=("eu-north-9",))


@pytest.mark.parametrize(
    ("name", "region", "says"),
    [
        ("aws", "us-east-2", {"type": "aws", "region": "us-east-2"}),
        ("gcp", "us-west1", {"region": "us-west1", "availability_zone": "us-west1-a"}),
        ("azure", "westus3", {"location": "westus3"}),
    ],
)
def test_the_cluster_file_of_another_region_is_in_order(
    name: str, region: str, says: dict[str, str], tmp_path: Path
) -> None:
    shipped = str(REPOSITORY / f"cluster/{name}.yaml")
    best = chosen(tmp_path, hours=48, cluster=shipped, regions=(region,)).best
    file = tmp_path / "chosen.yaml"
    file.write_text(dump_yaml(cluster_yaml(load_cluster(shipped), best)))
    moved, old = load_cluster(str(file)), load_cluster(shipped).region
    assert findings(moved) == []
    assert moved.region == region
    assert says.items() <= moved.written["provider"].items()
    assert str(old) not in file.read_text()


def test_what_another_region_does_not_have_stays_where_it_is(tmp_path: Path) -> None:
    pinned = tmp_path / "pinned.yaml"
    pinned.write_text(Path(CLUSTER).read_text().replace("&image resolve:ssm", "&image ami-0123 #"))
    best = chosen(tmp_path, hours=48, cluster=str(pinned), regions=("us-east-2",)).best
    with pytest.raises(ConfigError, match=r"ImageId` is \"ami-0123\", but belongs to us-east-1"):
        cluster_yaml(load_cluster(str(pinned)), best)


def test_what_cannot_be_planned_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has passed"):
        chosen(tmp_path, hours=-1)
    with pytest.raises(ConfigError, match=r"no trial of .* has ended"):
        chosen(tmp_path, hours=10, minutes=None)


def test_the_cluster_file_holds_the_choice_and_is_in_order(tmp_path: Path) -> None:
    best = chosen(tmp_path, hours=48, spot_share=0.3, rates=SpotRates(3 * 3600, 1800)).best
    file = tmp_path / "chosen.yaml"
    file.write_text(dump_yaml(cluster_yaml(load_cluster(CLUSTER), best)))
    cluster = load_cluster(str(file))
    assert findings(cluster) == []
    workers = [one for one in cluster.node_types if not one.is_head]
    assert [(one.spot, one.max_workers) for one in workers] == [(True, best.num_nodes), (False, best.num_nodes)]
    assert {one.instance_type for one in workers} == {best.offer.price.instance_type}
    assert cluster.max_workers == best.num_nodes


def test_the_command_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", SWEEP, "--cluster", CLUSTER, "--minutes-per-trial", "60", "--storage_path", str(tmp_path)]
    by = (dt.datetime.now() + dt.timedelta(days=3)).isoformat(timespec="minutes")
    assert main([*given, "--deadline", by, "--budget", "100", "--write", str(tmp_path / "out.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "100% of 100 simulated runs" in shown
    assert (tmp_path / "out.yaml").exists()
    assert main([*given, "--deadline", "Friday"]) == 2
    assert "2026-12-01T18:00" in capsys.readouterr().err
