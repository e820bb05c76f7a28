"""The profile of a run of two ranks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tests.specs import make
from trainers.explain.profile import ProfileJob
from trainers.launch.local import run_spawn


def test_steps_are_taken_without_adding_up_gradients_and_all_else_is_as_in_training(tmp_path: Path) -> None:
    spec = make(tmp_path, launcher="spawn", scaling={"num_workers": 2})
    found = run_spawn(ProfileJob(**asdict(spec), seconds=0.01)).readings
    assert found.all_reduce_s is not None
    assert found.sent_share is not None
    assert 0 <= found.sent_share < 1
    assert found.sending_s >= found.segment("communication")
    assert {"communication", "waiting for ranks"} <= found.shares().keys()
    assert not spec.storage.exists("")
