"""What commands show whose workers are Ray's: the driver draws, and tells, what rank 0
has sent it.
"""

import pytest

from tests.commands.test_output import DRAWN, is_clean, on_terminal, records_of, write
from tests.conftest import REPOSITORY
from trainers.config.yaml import dump_yaml

pytestmark = [pytest.mark.ray, pytest.mark.full]
TWO = {"launcher": "ray", "scaling": {"num_workers": 2}, "max_steps": 120}


def test_the_driver_draws_the_line_of_a_run_on_ray(tmp_path, cluster):
    seen = on_terminal(
        "-m", "trainers", write(tmp_path, **TWO), ray_address=cluster.address
    )
    assert seen.code == 0, seen.text
    assert DRAWN.search(seen.text)
    is_clean(seen)
    assert (
        sum(line.endswith("own words at step 20: " + "x" * 150) for line in seen.lines)
        == 1
    )
    assert not [line for line in seen.lines if "step 60/120" in line]


@pytest.mark.campaign
def test_a_run_on_ray_tells_in_json(tmp_path, command, cluster):
    file = write(tmp_path, **TWO)
    done = command(
        "-m trainers", file, "--json", ray_address=cluster.address, forked=True
    )
    assert done.code == 0, done.err
    found = records_of(done)
    assert [one["step"] for one in found if one["record"] == "train"] == list(
        range(1, 121)
    )
    assert [found[0]["record"], found[-1]["record"], found[-1]["status"]] == [
        "start",
        "result",
        "done",
    ]


def test_a_sweep_tells_in_json(tmp_path, command, cluster):
    train = {
        "task": "tests.commands.test_output:Talking",
        "task_dir": str(REPOSITORY),
        "max_steps": 10,
        "optimizer": {"lr": 0.1},
    }
    tree = {
        "name": "sweep",
        "storage_path": str(tmp_path),
        "train": train,
        "space": {"global_batch_size": [12, 24]},
    }
    (tmp_path / "sweep.yaml").write_text(dump_yaml(tree))
    swept = command(
        "-m tune",
        str(tmp_path / "sweep.yaml"),
        "--json",
        ray_address=cluster.address,
        forked=True,
    )
    assert swept.code == 0, swept.err
    *trials, result = records_of(swept)
    assert [one["record"] for one in trials] == ["trial"] * 2
    assert {one["config"]["global_batch_size"] for one in trials} == {12, 24}
    assert (result["status"], result["trials"]) == ("done", {"done": 2})
    quiet = command(
        "-m tune report",
        str(tmp_path / "sweep"),
        "--quiet",
        ray_address=cluster.address,
        forked=True,
    )
    assert quiet.code == 0, quiet.err
    (line,) = quiet.out.splitlines()
    assert line == result["answer"]
