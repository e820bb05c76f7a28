"""What Ray starts for the trials of a lane."""

import pytest

from tests.on_ray.embedded import actors
from tests.on_ray.test_lanes import run, sweep

pytestmark = pytest.mark.ray


@pytest.mark.campaign
def test_trials_shorter_than_a_start_keep_their_actors(tmp_path, driver):
    """Tune drops an actor that still starts where another is free: it would do
    so at the end of every such trial.
    """

    def trial_actors():
        return {
            actor.actor_id
            for actor in actors()
            if actor.class_name.endswith("ResourceTrainable")
        }

    before = trial_actors()
    pids = tmp_path / "pids"
    # However long the second lane takes to start, there are trials left for
    # it.
    train = {
        "max_steps": 5,
        "task_args": {"pids": str(pids), "pause_s": 0.1, "company_from": 6},
    }
    records = run(sweep(tmp_path, {"seed": list(range(20))}, train, lanes=2))
    assert {record.status for record in records} == {"done"}
    assert {record.lane for record in records} == {0, 1}
    workers = {int(line) for line in pids.read_text().split()}
    assert len(workers) == 2, "each lane has one worker for all of its trials"
    assert len(trial_actors() - before) < 8, (
        "where no end is held back it is some 17"
    )
