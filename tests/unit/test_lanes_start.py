"""Which lanes start, without Ray: none beside the repeats of the finalists, which are measured alone."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waits import when
from trainers.config.sections import ScalingConfig
from trainers.storage import Storage
from tune.lanes import lanes as module
from tune.lanes.lanes import Lanes


def test_a_settled_sweep_starts_no_lane_and_awaits_those_that_are_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up: list[int] = []
    mailbox: Any = SimpleNamespace(watch=SimpleNamespace(remote=lambda: {"lanes": up}))
    monkeypatch.setattr(module.ray, "get", lambda value: value)
    lanes = Lanes(mailbox, ScalingConfig(), False, False, Storage(str(tmp_path)), 1, is_patient=False)
    turns, over, begun = {lane: threading.Event() for lane in range(2)}, threading.Event(), list[int]()
    monkeypatch.setattr(lanes, "_wait_for_turn", lambda lane: turns[lane].wait(60))
    monkeypatch.setattr(lanes, "_fit", lambda lane: (begun.append(lane), over.wait(60)))
    lanes.grow(2)
    turns[0].set()
    when(lambda: begun == [0], lambda: None).join()
    assert not lanes.settle(), "lane 0 is starting"
    turns[1].set()
    lanes._threads[1].join(60)
    up.append(0)
    assert lanes.settle()
    over.set()
    lanes._threads[0].join(60)
    assert begun == [0]
    up.clear()
    assert lanes.settle(), "a lane that has ended is not starting"


def test_a_reservation_in_the_making_is_freed_once_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed before, its processors would be lost to the cluster: ray issue 64693."""
    made, waits, gone, foreign = ("11" * 14, "22" * 14, "33" * 14, "44" * 14)  # ids end in the job's
    states, looks, removed = {made: "PENDING", waits: "PENDING", gone: "REMOVED"}, list[str](), list[str]()

    def table() -> dict[str, Any]:
        looks.append(states[made])
        states[made] = {"PENDING": "PREPARED"}.get(states[made], "CREATED")
        bundles = {name: {0: {"CPU": 1.0}} for name in states} | {foreign: {0: {"memory": 1.0}}}
        return {name: {"state": states.get(name, "CREATED"), "bundles": bundles[name]} for name in bundles}

    monkeypatch.setattr(module, "_MAKE_S", 0.05)
    monkeypatch.setattr(module, "_LOOK_S", 0.001)
    monkeypatch.setattr(module, "placement_group_table", table)
    monkeypatch.setattr(module, "remove_placement_group", lambda group: removed.append(f"{group.id.hex()} {looks[-1]}"))
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: ""))
    monkeypatch.setattr(module.ray, "PlacementGroupID", lambda data: SimpleNamespace(hex=data.hex))
    monkeypatch.setattr(module, "PlacementGroup", lambda group_id: SimpleNamespace(id=group_id))
    Lanes(None, ScalingConfig(), False, False, Storage(str(tmp_path)), 1, is_patient=False)._free()
    assert removed == [f"{made} CREATED", f"{waits} CREATED"], "one that waits for a node is not waited for"
