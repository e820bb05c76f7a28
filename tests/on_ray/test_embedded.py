"""What Ray starts for a lane on a cluster of the command's own."""

import json

import pytest

from tests.conftest import FIRST

pytestmark = pytest.mark.ray


@pytest.mark.full
def test_an_embedded_cluster_has_only_what_trains(tmp_path, command):
    """Every actor is a Python that imports Ray."""
    environment = {
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"
    }  # it is there where nodes may be taken away
    args = ("-m", "tests.on_ray.embedded", str(tmp_path))
    done = command(*args, env=environment, program=FIRST)
    assert done.code == 0, done.err[-3000:]
    found = json.loads(done.out.strip().splitlines()[-1])
    assert list(found["statuses"].values()) == ["done"] * 3
    assert len(set(found["workers"])) == len(found["workers"]) == 3
    assert found["actors"] == {
        "Mailbox": 1,
        "ResourceTrainable": 1,  # Tune's actor of the trials
        "RayTrainWorker": 1,
    }
    # What `ray list actors --detail` and the dashboard show for them, and which trial a
    # worker had.
    assert [name for name in found["shown"] if name] == [
        "sweep, lane 0, worker",
        "sweep, mailbox",
        "sweep, trials",
    ]
    assert sorted(found["said"]) == [
        f"sweep, lane 0: trial {trial}" for trial in sorted(found["statuses"])
    ]
    assert set(found["ports"]) == {"127.0.0.1"}, found["ports"]
    assert {"raylet", "gcs_server", "ray::DashboardAgent"} <= set(
        found["ports"]["127.0.0.1"]
    )
