"""Lanes follow the cluster: one more when a node comes, its trial goes
elsewhere when that node leaves. What they reserve is freed.
"""

import pytest

from tests.on_ray.nodes import another_node
from tests.on_ray.test_lanes import rows, run, sweep
from tests.waits import until, when
from tune.lanes.controller import LaneEnded, Room

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
    spec = sweep(
        tmp_path, space, {"scaling": {"cpus_per_worker": 2}}, lanes="auto"
    )

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


@pytest.mark.parametrize("resource", ["CPU", "nowhere"])
def test_what_a_lane_has_reserved_is_freed(driver, resource):
    """Before and after Ray has made it, and where the lane was told to end before."""

    def is_removed(group):
        return driver.util.placement_group_table(group)["state"] == "REMOVED"

    room = Room(None, "sweep", 0)
    group = driver.util.placement_group([{resource: 1}])
    room.hold(group)
    room.give_back()
    until(lambda: is_removed(group), "its end")
    late = driver.util.placement_group([{resource: 1}])
    with pytest.raises(LaneEnded):
        room.hold(late)
    until(lambda: is_removed(late), "its end")
