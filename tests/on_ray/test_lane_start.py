"""What Ray starts for a lane, and what becomes of the lane when its controller dies."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cluster, Command
from tests.on_ray.embedded import actors
from tests.on_ray.test_lanes import run, sweep

pytestmark = pytest.mark.ray


@pytest.mark.full
def test_an_embedded_cluster_has_only_what_trains(tmp_path: Path, cluster: Cluster, command: Command) -> None:
    """Every actor is a Python that imports Ray. Another cluster runs on this machine."""
    done = command("-m", "tests.on_ray.embedded", str(tmp_path))
    assert done.code == 0, done.err[-3000:]
    found = json.loads(done.out.strip().splitlines()[-1])
    assert list(found["statuses"].values()) == ["done"] * 3
    assert len(set(found["workers"])) == len(found["workers"]) == 3
    assert found["actors"] == {
        "Mailbox": 1,
        "ResourceTrainable": 1,  # Tune's actor of the trials
        "TrainController": 1,
        "SynchronizationActor": 1,
        "RayTrainWorker": 1,
    }
    # What `ray list actors --detail` and the dashboard show for them, and which trial a worker had.
    lane = ["sweep, lane 0, controller", "sweep, lane 0, worker"]
    assert [name for name in found["shown"] if name] == [*lane, "sweep, mailbox", "sweep, trials"]
    assert sorted(found["said"]) == [f"sweep, lane 0: trial {trial}" for trial in sorted(found["statuses"])]
    assert set(found["ports"]) == {"127.0.0.1"}, found["ports"]
    assert {"raylet", "gcs_server", "ray::DashboardAgent"} <= set(found["ports"]["127.0.0.1"])


@pytest.mark.full
def test_trials_shorter_than_a_start_keep_their_actors(tmp_path: Path, driver: Any) -> None:
    """Tune drops an actor that still starts where another is free: it would do so at the end of every such trial."""

    def trial_actors() -> set[str]:
        return {actor.actor_id for actor in actors() if actor.class_name.endswith("ResourceTrainable")}

    before, pids = trial_actors(), tmp_path / "pids"
    # However long the second lane takes to start, there are trials left for it.
    train = {"max_steps": 5, "task_args": {"pids": str(pids), "pause_s": 0.1, "company_from": 6}}
    records = run(sweep(tmp_path, {"seed": list(range(20))}, train, lanes=2))
    assert {record.status for record in records} == {"done"}
    assert {record.lane for record in records} == {0, 1}
    workers = {int(line) for line in pids.read_text().split()}
    assert len(workers) == 2, "each lane has one worker for all of its trials"
    assert len(trial_actors() - before) < 8, "where no end is held back it is some 17"
