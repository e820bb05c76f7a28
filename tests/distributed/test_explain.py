"""The profile of a run of two ranks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from unittest import mock

from tests.distributed.processes import run_processes
from tests.specs import make
from trainers.explain.pairs import sent_share
from trainers.explain.profile import ProfileJob
from trainers.explain.stepper import Stepper
from trainers.launch.local import LocalContext, run_spawn
from trainers.launch.spec import RunSpec


def test_a_profile_of_two_ranks_leaves_nothing(tmp_path: Path) -> None:
    spec = make(tmp_path, launcher="spawn", scaling={"num_workers": 2})
    found = run_spawn(ProfileJob(**asdict(spec), seconds=0.01)).readings
    assert found.all_reduce_s is not None
    assert found.sent_share is not None
    assert {"communication", "waiting for ranks"} <= found.shares().keys()
    assert not spec.storage.exists("")


def measured(rank: int, world_size: int, spec: RunSpec) -> tuple[float, bool]:
    """Steps that add up gradients take 2 s, others 1 s, and rank 1's a second more."""
    context = LocalContext(None, "spawn", rank, world_size, rank, world_size)
    with ProfileJob(**asdict(spec), seconds=0.0).replica(spec.config, context) as parts:
        model, stepper = parts.step.forward.model, Stepper(parts)
        with mock.patch.object(stepper, "time_s", side_effect=lambda _: 1.0 + rank + model.require_backward_grad_sync):
            return sent_share(stepper), bool(model.require_backward_grad_sync)


def test_what_adding_up_gradients_costs_is_of_the_slowest_rank(tmp_path: Path) -> None:
    spec = make(tmp_path, launcher="spawn", scaling={"num_workers": 2})
    assert run_processes(2, measured, tmp_path, spec) == [(1 - 2 / 3, True)] * 2
