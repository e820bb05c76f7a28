"""A sweep whose directory is deleted while it runs, or a part of it; an embedded cluster whose driver is killed."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.commands.endless import Command
from tests.on_ray.test_lanes import sweep
from tests.waits import when
from trainers import lease
from trainers.errors import LeaseError
from trainers.lease import held
from tune.sweep.spec import SAVED, prepare
from tune.trials.journal import Journal

pytestmark = [pytest.mark.ray, pytest.mark.full]


@pytest.mark.parametrize("deleted", ["trials", ""])
def test_no_finished_trial_is_lost_without_a_word(
    tmp_path: Path, driver: Any, monkeypatch: pytest.MonkeyPatch, deleted: str
) -> None:
    from tune.sweep.run import run_sweep

    monkeypatch.setattr(lease, "BEAT_S", 0.2)
    spec = sweep(tmp_path, {"seed": [1, 2, 3, 4]}, {"task_args": {"pause_s": 0.02}})
    journal = Journal(spec.storage)
    thread = when(
        lambda: len(spec.storage.names("trials")) == 2,
        lambda: shutil.rmtree(spec.storage.child(deleted).path, ignore_errors=True),
    )

    def run() -> list[Any]:
        with held(spec.storage, SAVED) as token:
            prepare(spec, fresh=False)
            return run_sweep(replace(spec, token=token))

    if deleted:
        records = run()
        assert [record.config["seed"] for record in records] == [1, 2, 3, 4]
        assert {record.id for record in journal.records()} == {record.id for record in records}
    else:
        with pytest.raises(LeaseError, match=r"lease\.json is gone: the directory was deleted"):
            run()
    thread.join()


def test_nothing_of_an_embedded_cluster_outlives_its_driver_for_long(tmp_path: Path) -> None:
    command = Command(tmp_path, "ray")
    try:
        command.trains()
        command.tell(signal.SIGKILL)
        assert command.ends() == -signal.SIGKILL
    finally:
        command.kill()
