"""A sweep whose directory is deleted while it runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.on_ray.test_lanes import sweep
from tests.waits import when
from trainers import lease
from trainers.errors import LeaseError
from trainers.lease import held
from tune.sweeps.spec import SAVED, prepare

pytestmark = [pytest.mark.ray, pytest.mark.full]


def test_a_sweep_whose_directory_is_deleted_says_so(
    tmp_path: Path, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tune.sweeps.run import run_sweep

    monkeypatch.setattr(lease, "BEAT_S", 0.2)
    spec = sweep(tmp_path, {"seed": [1, 2, 3, 4]}, {"task_args": {"pause_s": 0.02}})
    thread = when(
        lambda: len(spec.storage.names("trials")) == 2, lambda: shutil.rmtree(spec.storage.path, ignore_errors=True)
    )
    with pytest.raises(LeaseError, match=r"is gone: the directory was deleted"), held(spec.storage, SAVED) as token:  # noqa: PT012
        prepare(spec, fresh=False)
        run_sweep(replace(spec, token=token))
    thread.join()
