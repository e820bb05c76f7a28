"""Each kind of failure has a budget of restarts of its own; the run ends with the first failure beyond it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainers.config.sections import FailureConfig
from trainers.errors import RunFailedError, Status
from trainers.on_ray.failures import FailurePolicy
from trainers.storage import Storage


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_kind_restarts_as_often_as_its_budget_says(tmp_path: Path, budget: int) -> None:
    policy = FailurePolicy(FailureConfig(error=budget, out_of_host_memory=5), Storage(str(tmp_path)))
    for _ in range(budget):
        policy.after_exception(None, {0: failure("error")})
    policy.after_exception(None, {0: failure("out_of_host_memory")})  # counts for itself
    with pytest.raises(RunFailedError, match="of rank 0"):
        policy.after_exception(None, {0: failure("error")})


def test_a_lost_node_has_no_limit_and_a_smaller_microbatch_costs_no_restart(tmp_path: Path) -> None:
    policy = FailurePolicy(FailureConfig(), Storage(str(tmp_path)))
    for _ in range(50):
        policy.after_exception(None, {0: failure("node_lost")})
        policy.after_exception(None, {0: failure("out_of_memory", smaller=True)})


def failure(status: Status, smaller: bool = False) -> RunFailedError:
    return RunFailedError(status, "of rank 0", 1.0, smaller=smaller)
