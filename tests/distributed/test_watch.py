"""Hangs and deaths in groups of real processes: every phase is watched, and a
run ends with the first cause.
"""

import pytest

from tests.conftest import SCRATCH
from tests.distributed.processes import run_module
from tests.specs import REPOSITORY, make
from tests.waits import HANG_S
from trainers.config.yaml import dump_yaml
from trainers.errors import RunFailedError
from trainers.launch.local import run_spawn
from trainers.loop.watchdog import HUNG_EXIT_CODE


def stuck(tmp_path, place, workers=1, **changes):
    args = {
        "place": place,
        "failure": "sleep",
        "short_phases": True,
        **changes.pop("args", {}),
    }
    budgets = {"failure__hang_timeout_s": 8.0, "scaling__num_workers": workers}
    return make(
        tmp_path,
        task="tests.tasks:Stuck",
        task_args=args,
        **{**budgets, **changes},
    )


def test_the_phase_of_each_rank_is_said_and_the_culprit_first(tmp_path):
    """Rank 1 waits in a collective for rank 0, which downloads for ever."""
    with pytest.raises(RunFailedError) as met:
        run_spawn(stuck(tmp_path, "setup", 2, launcher="spawn"))
    assert met.value.status == "hung", met.value.message
    culprit, waits = met.value.message.split("; rank 1")
    assert culprit.startswith("rank 0 made no step for ")
    assert " s in setup (at tasks.py:" in culprit
    assert (
        " s in the barrier after setup, waiting for other ranks (at " in waits
    )


def failed(tmp_path, failure, **changes):
    """The end of a run of two ranks, of which rank 1 fails in training."""
    args = {
        "failure": failure,
        "on_rank": 1,
        "marker": str(tmp_path / "failed"),
    }
    before = set(SCRATCH.iterdir())
    with pytest.raises(RunFailedError) as met:
        run_spawn(
            stuck(
                tmp_path,
                "training 20",
                2,
                args=args,
                launcher="spawn",
                **changes,
            )
        )
    assert (tmp_path / "failed").exists()
    assert set(SCRATCH.iterdir()) <= before
    return met.value


@pytest.mark.parametrize(
    ("failure", "status", "words"),
    [
        ("kill", "node_lost", "rank 1 died by SIGKILL (pid "),
        (
            "raise",
            "error",
            "rank 1: ValueError: injected: the task fails here (tasks.py:",
        ),
    ],
)
def test_the_first_cause_is_what_the_run_ends_with(
    tmp_path, failure, status, words
):
    """The other rank's broken collective follows from it."""
    found = failed(tmp_path, failure, failure__hang_timeout_s=60.0)
    assert found.status == status
    assert found.message.startswith(words)


def hung(tmp_path, spec):
    """What `python -m trainers` says that ends as hung."""
    config = tmp_path / "train.yaml"
    out = tmp_path / "out"
    config.write_text(dump_yaml(spec.tree))
    out.mkdir()
    code = run_module(
        "trainers",
        [str(config)],
        REPOSITORY,
        {"PYTHONPATH": str(REPOSITORY)},
        out,
        HANG_S,
    )
    said = (out / "err").read_text()
    assert code == HUNG_EXIT_CODE, said
    return said


def test_a_hang_without_a_launcher_ends_in_a_sentence(tmp_path):
    """Exit code 74 alone would say nothing; and what is said fits this launcher."""
    spec = stuck(tmp_path, "checkpoint")
    said = hung(tmp_path, spec)
    assert "error: the run ended as `hung`: rank 0 made no step for " in said
    assert " s in checkpoint (at tasks.py:" in said
    [name] = spec.storage.names("hangs")
    assert "_fail" in spec.storage.read(f"hangs/{name}").decode(), (
        "the line that hangs"
    )
    assert "cluster" not in said


def test_a_task_that_hangs_as_it_is_imported_ends_in_a_sentence(tmp_path):
    """Before any worker is there."""
    short = (
        "from trainers.config import sections; sections.LEAST_PHASE_S = 1.0"
    )
    (tmp_path / "endless.py").write_text(
        f"import time; {short}\n\ntime.sleep(3600)\n"
    )
    changes = {
        "task": "endless:Task",
        "task_dir": str(tmp_path),
        "failure__hang_timeout_s": 0.25,
    }
    said = hung(tmp_path, make(tmp_path, **changes))
    assert (
        " s in the import of the task (at endless.py:3; failure.hang_timeout_s 0.25 allows a phase 1 s)"
        in said
    )
