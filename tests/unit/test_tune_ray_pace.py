"""When a sweep of training functions starts another lane."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray import tune as ray_tune
from ray.tune.search import BasicVariantGenerator

from tune.ray import tuner
from tune.ray.tuner import _Pace


@pytest.mark.parametrize(
    ("num_samples", "ended", "state", "at_a_time"),
    [
        (24, 0, {"up": 0, "serving_s": 0.0, "last_up_s": 1e9, "start_s": 0.0}, 1),  # none is up yet
        (24, 2, {"up": 1, "serving_s": 4.0, "last_up_s": 9.0, "start_s": 6.0}, 1),  # they say nothing yet
        (24, 16, {"up": 1, "serving_s": 6.5, "last_up_s": 6.5, "start_s": 6.0}, 1),  # 3 s are left
        (24, 3, {"up": 1, "serving_s": 7.0, "last_up_s": 7.0, "start_s": 6.0}, 2),  # 49 s are left
        (8, 0, {"up": 1, "serving_s": 7.0, "last_up_s": 7.0, "start_s": 6.0}, 2),  # each takes 7 s at least
        (-1, 16, {"up": 1, "serving_s": 6.5, "last_up_s": 6.5, "start_s": 6.0}, 2),  # without an end
        (8, 0, {"up": 1, "serving_s": 7.0, "last_up_s": 7.0, "start_s": 6.0, "most": 1}, 1),  # no room
    ],
)
def test_another_lane_starts_where_it_pays(
    num_samples: int, ended: int, state: dict[str, Any], at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "_LOOK_S", 0.0)
    expected: list[int] = []
    pool = SimpleNamespace(
        state=SimpleNamespace(remote=lambda: {"most": 4, **state}), expect=SimpleNamespace(remote=expected.append)
    )
    monkeypatch.setattr(tuner, "ray", SimpleNamespace(get=lambda answer: answer, get_actor=lambda name: pool))
    pace = _Pace("pool")
    search = BasicVariantGenerator()
    pace.limit(ray_tune.TuneConfig(search_alg=search, num_samples=num_samples))
    trials = [SimpleNamespace(is_finished=lambda is_over=number < ended: is_over) for number in range(ended + 1)]
    pace.on_step_begin(1, trials)
    assert search.max_concurrent == at_a_time
    assert expected == ([2] if at_a_time == 2 else [])
    pace.on_trial_start(1, [None] * num_samples, None)
    assert expected[1:] == ([] if at_a_time == 1 else [2] if num_samples == -1 else [0])
