"""Which lanes start, without Ray: none beside the repeats of the finalists, which are
measured alone.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

from tests.waits import when
from trainers.config.sections import ScalingConfig
from trainers.storage import Storage
from tune.forks.zygote import Preload
from tune.lanes import lanes as module
from tune.lanes.lanes import Lanes


def test_a_settled_sweep_starts_no_lane_and_awaits_those_that_are_starting(
    tmp_path, monkeypatch
):
    up = []
    mailbox = SimpleNamespace(watch=SimpleNamespace(remote=lambda: {"lanes": up}))
    monkeypatch.setattr(module.ray, "get", lambda value: value)
    lanes = Lanes(
        mailbox,
        ScalingConfig(),
        False,
        "",
        Preload(),
        Storage(str(tmp_path)),
        1,
        is_patient=False,
    )
    turns = {lane: threading.Event() for lane in range(2)}
    over = threading.Event()
    begun = []
    monkeypatch.setattr(lanes, "_wait_for_turn", lambda lane: turns[lane].wait(60))
    monkeypatch.setattr(lanes, "_fit", lambda lane: (begun.append(lane), over.wait(60)))
    lanes.grow(2)
    turns[0].set()
    when(lambda: begun == [0], lambda: None).join()
    room = [True]
    monkeypatch.setattr(lanes, "_may_come_up", lambda num_up: room[0])
    assert lanes.settle() == [0]
    room[0] = False
    assert lanes.settle() == [], "it waits for a node"
    turns[1].set()
    lanes._threads[1].join(60)
    room[0] = True
    up.append(0)
    assert lanes.settle() == []
    over.set()
    lanes._threads[0].join(60)
    assert begun == [0]
    up.clear()
    assert lanes.settle() == [], "a lane that has ended is not starting"
