"""Storage: whole or absent files, retries that help, clear errors, and where runs go."""

import errno
import os
from pathlib import Path

import pytest

from trainers.errors import ConfigError, StorageError
from trainers.storage import Storage, storage_uri


@pytest.fixture
def waits(monkeypatch):
    """The waits between tries, which are not waited."""
    found = []
    monkeypatch.setattr("trainers.storage.time.sleep", found.append)
    return found


def files(path):
    return sorted(
        str(found.relative_to(path))
        for found in path.rglob("*")
        if found.is_file()
    )


def test_what_is_written_is_read(tmp_path):
    storage = Storage(tmp_path / "not" / "there" / "yet")
    storage.write("a/b.txt", b"first")
    storage.write("a/b.txt", b"second")
    assert storage.read("a/b.txt") == b"second"
    with storage.reader("a/b.txt") as stream:
        stream.seek(2)
        assert stream.read(3) == b"con"
    assert storage.exists("a/b.txt")
    assert storage.exists("a")
    assert storage.exists()
    assert not storage.exists("a/c.txt")


def test_delete_takes_files_directories_and_nothing(tmp_path):
    storage = Storage(tmp_path / "run")
    storage.write("a/b/c", b"")
    storage.write("d", b"")
    storage.delete("nowhere")
    storage.delete("d")
    storage.delete("a")
    assert storage.names() == []
    storage.write("e", b"")
    storage.delete("")
    assert not storage.exists()
    assert tmp_path.exists()


@pytest.mark.parametrize("before", [None, b"the old one"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_write_that_breaks_off_leaves_no_trace(tmp_path, error, before):
    storage = Storage(tmp_path)
    if before is not None:
        storage.write("file", before)
    with pytest.raises(error), storage.writer("file") as stream:  # noqa: PT012
        stream.write(b"half")
        raise error
    assert files(tmp_path) == ([] if before is None else ["file"])
    assert before is None or storage.read("file") == before


def failing_replace(monkeypatch, times, number):
    """`Path.replace` fails so many times with an errno, then works."""
    calls = []
    replace = Path.replace

    def flaky(self, target):
        calls.append(str(target))
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", flaky)
    return calls


@pytest.mark.parametrize("times", [1, 3])
def test_a_passing_failure_is_tried_again_with_growing_waits(
    tmp_path, monkeypatch, waits, times
):
    calls = failing_replace(monkeypatch, times, errno.EIO)
    Storage(tmp_path).write("file", b"data")
    assert files(tmp_path) == ["file"]
    assert len(calls) == times + 1
    assert waits == [0.5, 1.0, 2.0][:times]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_what_no_further_try_can_mend_is_said_at_once(
    tmp_path, monkeypatch, waits, number
):
    calls = failing_replace(monkeypatch, 99, number)
    with pytest.raises(StorageError):
        Storage(tmp_path).write("file", b"data")
    assert (len(calls), waits) == (1, [])


def test_a_place_on_a_full_disk_is_not_taken_for_one_of_somebody_else(
    tmp_path, monkeypatch
):
    failing_replace(monkeypatch, 99, errno.ENOSPC)
    with pytest.raises(ConfigError) as raised:
        Storage(tmp_path).prove_writable()
    assert "free space" in raised.value.fix


def test_a_place_below_a_regular_file_cannot_be_written(tmp_path, waits):
    (tmp_path / "file").write_text("in the way")
    storage = Storage(f"{tmp_path}/file/deeper")
    with pytest.raises(ConfigError):
        storage.prove_writable()
    assert waits == []


def test_file_uris_are_local(tmp_path):
    folder = tmp_path / "with space"
    storage = Storage(f"file://{tmp_path}/with%20space")
    storage.write("file", b"x")
    assert (folder / "file").read_bytes() == b"x"
    assert storage.is_local
    assert storage.path == str(folder)
    assert Storage(folder).read("file") == b"x"


@pytest.mark.parametrize(
    "uri",
    ["file://x/y", "file:///a?b", "s3://bucket/a#b", "nosuch://bucket/x"],
)
def test_no_part_of_a_uri_is_dropped(uri):
    storage = Storage(uri)
    for action in (
        storage.exists,
        storage.prove_writable,
        lambda: storage.child("run").delete(""),
    ):
        with pytest.raises(ConfigError):
            action()


@pytest.mark.parametrize(
    "path",
    [
        "${HOME}/x",
        "/a/$USER/runs",
        "$A/" + "x" * 300 + "$B",
        "s3://$BUCKET/runs",
        "s3:/bucket/x",
    ],
)
def test_what_only_a_shell_reads_is_refused(path):
    with pytest.raises(ConfigError):
        storage_uri(path)
    assert storage_uri("/costs/in $/5") == "/costs/in $/5"


def test_what_a_dead_writer_left_aside_is_deleted_and_a_live_ones_is_not(
    tmp_path,
):
    storage = Storage(tmp_path)
    old = tmp_path / "a.json.01234567.tmp"
    new = tmp_path / "b.89abcdef.tmp"
    foreign = tmp_path / "mine.tmp"
    for path in (old, new, foreign):
        path.write_text("")
    for path in (old, foreign):
        os.utime(path, (0, 0))
    storage.clear_aside(idle_s=3600)
    assert files(tmp_path) == ["b.89abcdef.tmp", "mine.tmp"]
    storage.clear_aside()
    assert files(tmp_path) == ["mine.tmp"]
    storage.clear_aside("nowhere")


@pytest.mark.parametrize(
    ("uri", "child", "file"),
    [
        ("/a/b", "/a/b/c/d", "/a/b/f"),
        ("/", "/c/d", "/f"),
        ("s3://bucket/run/", "s3://bucket/run/c/d", "s3://bucket/run/f"),
        ("file:///a", "file:///a/c/d", "file:///a/f"),
        (
            "s3://bucket/run?scheme=http&endpoint_override=minio:9000",
            "s3://bucket/run/c/d?scheme=http&endpoint_override=minio:9000",
            None,
        ),
    ],
)
def test_children_lie_below(uri, child, file):
    assert Storage(uri).child("c", "d").uri == child
    if file is not None:
        assert Storage(uri).locate("f") == file


@pytest.fixture
def no_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("PACELINE_STORAGE", raising=False)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_where_runs_go(no_environment, monkeypatch):
    here = no_environment
    assert storage_uri(None) == f"{here}/results"
    assert storage_uri("runs") == f"{here}/runs"
    assert storage_uri("../runs") == f"{here.parent}/runs"
    (here / "a$b").mkdir()
    assert storage_uri("a$b/runs") == f"{here}/a$b/runs"
    assert storage_uri(f"file://{here}/a$b/x") == f"file://{here}/a$b/x"
    assert storage_uri("/data/runs") == "/data/runs"
    assert storage_uri("~/runs") == str(Path.home() / "runs")
    assert storage_uri("s3://bucket/runs") == "s3://bucket/runs"
    monkeypatch.setenv("PACELINE_STORAGE", "gs://bucket")
    assert storage_uri(None) == "gs://bucket"
    assert storage_uri("/data") == "/data"


@pytest.mark.parametrize("path", [None, "runs"])
def test_a_relative_place_inside_a_ray_job_is_refused(
    no_environment, monkeypatch, path
):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(ConfigError):
        storage_uri(path)
    assert storage_uri("/data") == "/data"
    assert storage_uri("s3://b") == "s3://b"
