"""The directory in which spawned workers meet: nothing is left of a group that was killed, driver and all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from trainers.launch import local


def test_those_of_killed_groups_are_deleted_and_those_in_use_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = [tmp_path / f"{local._PREFIX}{name}" for name in ("killed", "new")]
    for directory in made:
        directory.mkdir()
        (directory / "result.json").touch()
    os.utime(made[0], (0, 0))
    with local._directory() as in_use:
        os.utime(in_use, (0, 0))
        with local._directory() as other:
            assert {*tmp_path.iterdir()} == {made[1], Path(in_use), Path(other)}
    assert [*tmp_path.iterdir()] == [made[1]], "it may be about to be locked"
