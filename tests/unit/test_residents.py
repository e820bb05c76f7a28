"""The cluster of this machine that outlives a command, and how it is found (trainers/residents.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainers import residents


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another temporary directory."""
    with tempfile.TemporaryDirectory(prefix="r-") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        yield Path(place)


def test_the_directory_is_the_user_s_own(temporary: Path) -> None:
    place = residents.directory()
    assert place == temporary / f"paceline-{os.getuid()}"
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o770)
    assert residents.directory() is None
    place.rmdir()
    (temporary / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(temporary / "elsewhere")
    assert residents.directory() is None


def test_a_cluster_that_has_died_is_none(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert residents.cluster() is None
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    residents.note_cluster({"pid": process.pid, "address": "127.0.0.1:1"})
    found = residents.cluster()
    assert found is not None
    assert found["address"] == "127.0.0.1:1"
    monkeypatch.setenv("RAY_ADDRESS", "there:6379")
    residents.join_cluster()
    assert os.environ["RAY_ADDRESS"] == "there:6379", "the user's own wins"
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.delenv("RAY_AUTH_MODE")
    residents.join_cluster()
    assert os.environ.pop("RAY_AUTH_MODE") == "token", "Ray would not let it in"
    assert os.environ.pop("RAY_ADDRESS") == "127.0.0.1:1"

    place = temporary / f"paceline-{os.getuid()}" / "cluster.json"
    place.write_text(json.dumps({**found, "begun": "1"}))
    assert residents.cluster() is None, "another process has the number by now"
    place.write_text("{")
    assert residents.cluster() is None
    place.write_text(json.dumps(found))
    process.communicate(b"\n")
    assert residents.cluster() is None
    residents.note_cluster(None)
    assert not place.parent.exists()
