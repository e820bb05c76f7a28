"""Which lanes start, without Ray: none beside the repeats of the finalists,
which are measured alone.
"""

from types import SimpleNamespace

from tests.waits import HANG_S, when
from trainers.config.sections import ScalingConfig
from trainers.storage import Storage
from tune.forks.zygote import Preload
from tune.lanes import lanes as module
from tune.lanes.controller import LaneEnded
from tune.lanes.lanes import Lanes


def test_a_settled_sweep_starts_no_lane_and_ends_those_that_are_not_up(
    tmp_path, monkeypatch
):
    """One that starts stays where none is up."""
    up = []
    ended = []
    mailbox = SimpleNamespace(
        watch=SimpleNamespace(remote=lambda: {"lanes": up}),
        killed=SimpleNamespace(remote=ended.extend),
    )
    monkeypatch.setattr(module.ray, "get", lambda value: value)
    monkeypatch.setattr(module, "is_alive", lambda: True)
    scaling = ScalingConfig()
    storage = Storage(tmp_path)
    lanes = Lanes(
        mailbox, scaling, False, "", Preload(), storage, 1, is_patient=False
    )
    begun = []

    def fit(lane: int) -> None:
        begun.append(lane)
        lanes._rooms[lane].is_over.wait(HANG_S)
        raise LaneEnded

    monkeypatch.setattr(
        lanes,
        "_wait_for_turn",
        lambda lane: lane < 2 or lanes._settled.wait(HANG_S),
    )
    monkeypatch.setattr(lanes, "_fit", fit)
    lanes.grow(3)
    when(lambda: sorted(begun) == [0, 1], lambda: None).join()
    assert lanes.settle() == [0], "none is up"
    assert (lanes._alive(), ended) == ([0], [1, 2])
    up.append(0)
    assert lanes.settle() == []
    assert lanes._alive() == [0]
    up.clear()
    lanes.end()
    assert (lanes._alive(), sorted(begun)) == ([], [0, 1])
