"""Ray's Tuner and TorchTrainer from `tune.ray`, in a user's script: what Ray
gives, from forks.
"""

import json

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.full]


@pytest.fixture(scope="module")
def ours(command, cluster, tmp_path_factory):
    """What the script's sweeps gave."""
    done = command(
        "-m tests.on_ray.drop_in",
        str(tmp_path_factory.mktemp("ours")),
        ray_address=cluster.address,
        forked=True,
    )
    lines = [
        line.split(" ", 2)[1:]
        for line in done.out.split("\n")
        if line.startswith("JSON ")
    ]
    assert done.code == 0, done.err[-3000:]
    return {name: json.loads(text) for name, text in lines}


def case(ours, name):
    [trial] = [
        trial
        for trial in ours["cases"]["trials"]
        if trial["config"]["case"] == name
    ]
    return trial


def column(trial, key):
    return [row[key] for row in trial["rows"] if row.get(key) is not None]


def test_checkpoints_callbacks_and_return_values_are_rays(ours):
    for trial in ours["train"]["trials"]:
        assert trial["error"] == ""
        assert column(trial, "epoch") == [0, 1, 2, 2]
        assert column(trial, "heard") == [
            0
        ]  # the callbacks are copies, as Ray's
        assert column(trial, "returned") == ["rank 0"]
        assert column(trial, "kept") == [2]
        assert column(trial, "validated") == [1]
        assert column(trial, "driven") == [1], (
            "no driver finds what another has left in its process"
        )
    assert ours["train"]["restarts"] == []


def test_a_trial_that_fails_is_retried_as_configured_and_harms_no_other(ours):
    retried, failed, whole = (
        case(ours, name) for name in ("retried", "failed", "whole")
    )
    assert "asked to fail" in failed["error"]
    assert column(failed, "loss") == column(whole, "loss")[:2]
    assert [retried["error"], whole["error"]] == ["", ""]
    # It goes on from the checkpoint of its first epoch, with the shuffling of
    # a fresh process.
    assert column(retried, "epoch") == column(whole, "epoch") == [0, 1, 2, 2]
    assert column(retried, "loss")[0] == column(whole, "loss")[0]


def test_what_a_function_leaves_behind_reaches_no_other_trial(ours):
    trials = [case(ours, name) for name in ("leaks", "clean")]
    assert [column(trial, "found") for trial in trials] == [[0.0]] * 2
    assert len({column(trial, "process")[0] for trial in trials}) == 2
    assert ours["cases"]["restarts"] == []


def test_a_driver_has_its_parameters_from_rays_object_store(ours):
    trial = case(ours, "clean")
    assert trial["error"] == ""
    assert column(trial, "rows") == [1000]


def test_a_stopped_trial_ends_at_its_report_and_its_lane_goes_on(ours):
    best, *others = ours["stops"]["trials"]
    assert len(column(best, "score")) == 40
    assert all(4 <= len(column(trial, "score")) < 40 for trial in others)
    assert ours["stops"]["restarts"] == []


def test_ray_shows_who_trains_what(ours):
    """In `ray list actors --detail`, `ray list tasks` and the dashboard."""
    assert {"train, lane 0, worker", "train, pool"} <= set(
        ours["train"]["shown"]
    )
    said = {name.partition(": trial ")[2] for name in ours["train"]["said"]}
    assert len(said) == len(ours["train"]["trials"]), (
        "each by the tasks of its ranks"
    )
