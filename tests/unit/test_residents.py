"""What outlives a command on this machine, and how it is found (trainers/residents.py, tune/sweeps/client.py)."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR as JOB

from trainers import residents
from trainers.errors import PacelineError
from tune.lanes.kept import Kept
from tune.sweeps import client
from tune.sweeps.resident import Server


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another temporary directory, of a short name: sockets lie in it."""
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
    assert residents.sockets() == []


def test_a_driver_that_ends_leaves_the_next_one_to_be_found(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found no more before it gives back its lanes, which takes seconds: the next one may have come by then."""
    monkeypatch.setenv("RAY_ADDRESS", "there:6379")
    place = residents._place() / "driver.sock"
    ending = Server(place, Kept())
    assert ending.close()
    assert residents.sockets() == []
    Server(place, Kept())
    ending.vanish()
    assert list(residents.drivers()) == [place]


@pytest.mark.parametrize(
    ("address", "wish", "is_wanted"),
    [("", None, False), ("local", None, False), ("there:6379", None, True), ("there:6379", "0", False)],
)
def test_only_on_a_cluster_that_outlives_the_sweep(
    address: str, wish: str | None, is_wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.delenv("PACELINE_RESIDENT")
    if wish is not None:
        monkeypatch.setenv("PACELINE_RESIDENT", wish)
    assert (residents.place() is not None) is is_wanted


@pytest.mark.parametrize(
    ("says", "code"),
    [({"exit": 3}, 3), ({"busy": True}, None), (None, 1)],
    ids=["it ran", "it is busy", "it died"],
)
def test_what_the_driver_answers_is_the_command_s_exit_code(
    says: dict[str, Any] | None,
    code: int | None,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "there:6379")
    monkeypatch.delenv("PACELINE_RESIDENT")
    assert residents.directory() is not None
    asked: dict[str, Any] = {}
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(residents.place()))
    listening.listen()

    def serve() -> None:
        connection, _ = listening.accept()
        size, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
        with connection.makefile("rb") as file:
            asked.update(json.loads(file.read(int.from_bytes(size, "big"))), terminal=len(descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        if says is not None:
            connection.sendall(json.dumps(says).encode() + b"\n")
        connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    if says is None:
        with pytest.raises(PacelineError, match="has died, and the sweep with it"):
            client.run_by_resident(["sweep.yaml", "--fresh"])
    else:
        assert client.run_by_resident(["sweep.yaml", "--fresh"]) == code
    thread.join()
    listening.close()
    assert (asked["run"], asked["directory"], asked["terminal"]) == (["sweep.yaml", "--fresh"], str(Path.cwd()), 3)
    assert asked["environment"]["RAY_ADDRESS"] == "there:6379"


def test_other_code_is_another_driver_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "there:6379")
    before = residents._identity()
    assert residents._identity() == before
    # A job's metadata are its own; in another environment the workers would not find its files.
    monkeypatch.setenv(JOB, json.dumps({"metadata": {"job_submission_id": "a"}}))
    assert residents._identity() == before
    monkeypatch.setenv(JOB, json.dumps({"metadata": {}, "runtime_env": {"working_dir": "gcs://a.zip"}}))
    assert residents._identity() != before
    monkeypatch.delenv(JOB)
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    assert residents._identity() != before
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "a.py").write_text("")
    monkeypatch.setattr(residents, "CODE", tmp_path)
    first = residents._identity()
    os.utime(tmp_path / "tune" / "a.py", (0, 0))
    assert residents._identity() != first
