"""Lanes follow the cluster: one more when a node comes, its trial goes elsewhere when
that node leaves.
"""

import pytest

from tests.on_ray.nodes import another_node
from tests.on_ray.test_lanes import rows, run, sweep
from tests.waits import HANG_S, until, when
from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.storage import Storage
from tune.forks.zygote import Preload
from tune.lanes.lanes import Lanes

pytestmark = pytest.mark.ray


@pytest.mark.full
def test_a_node_comes_and_goes(tmp_path, cluster, driver):
    pids = tmp_path / "pids"
    task_args = {
        "pids": str(pids),
        "pause_s": 0.1,
        "company_from": 6,
    }  # however long the second lane takes to start
    space = {"seed": list(range(12)), "task_args": [task_args]}
    spec = sweep(tmp_path, space, {"scaling": {"cpus_per_worker": 2}}, lanes="auto")

    def lanes():
        return set(pids.read_text().split()) if pids.exists() else set()

    def come_and_go():
        with another_node(cluster, driver, cpus=2) as node:
            until(lambda: len(lanes()) == 2, "its trial")
            node.cut_power()

    thread = when(lambda: bool(lanes()), come_and_go)
    try:
        records = run(spec)
    finally:
        thread.join()
    assert len(records) == 12
    assert {record.status for record in records} == {"done"}, [
        record.message for record in records
    ]
    assert len(lanes()) == 2
    assert {len(rows(record.curve)) for record in records} == {3}
    assert len(pids.read_text().split()) == 13, (
        "the trial that the node took with it ran again, and no other"
    )


def test_what_lanes_had_reserved_is_freed_whatever_was_reserved_before(
    tmp_path, driver
):
    """Ray keeps each group that it has removed, and its state API lists any hundred of
    all.

    What is left is found by the fixture that looks at the cluster after every test.
    """
    for _ in range(
        200
    ):  # of a resource that nobody has: Ray loses what a group gets while it is being removed
        driver.util.remove_placement_group(
            driver.util.placement_group([{"nowhere": 1}])
        )
    foreign = driver.util.placement_group([{"memory": 1}])
    for _ in range(2):
        driver.get(driver.util.placement_group([{"CPU": 1}]).ready(), timeout=HANG_S)
    until(
        lambda: not driver.available_resources().get("CPU", 0),
        "what Ray hears a little later",
    )
    config = build(TrainConfig, sweep(tmp_path, {"seed": [1]}).train, "test")
    Lanes(
        None,
        config.scaling,
        False,
        "",
        Preload(),
        Storage(str(tmp_path)),
        1,
        is_patient=False,
    ).end()
    assert driver.util.placement_group_table(foreign)["state"] == "CREATED"
    driver.util.remove_placement_group(foreign)
