"""What commands show whose workers are Ray's: the driver draws, and tells,
what rank 0 has sent it.
"""

import pytest

from tests.commands.test_output import (
    DRAWN,
    is_clean,
    on_terminal,
    records_of,
    write,
)

pytestmark = [pytest.mark.ray, pytest.mark.full]
TWO = {"launcher": "ray", "scaling": {"num_workers": 2}, "max_steps": 120}


def test_the_driver_draws_the_line_of_a_run_on_ray(tmp_path, cluster):
    words = "own words at step 20: " + "x" * 150
    hint = tmp_path / "seen"

    def hear(text):
        if DRAWN.search(text) and text.count(words) == 2:
            hint.touch()

    seen = on_terminal(
        "-m",
        "trainers",
        write(tmp_path, **TWO, task_args={"seen": str(hint)}),
        hear=hear,
        RAY_ADDRESS=cluster.address,
        RAY_DEDUP_LOGS="0",
    )
    assert seen.code == 0, seen.text
    is_clean(seen)
    assert sum(line.endswith(words) for line in seen.lines) == 2, seen.text
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
