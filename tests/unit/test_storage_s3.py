"""Storage over HTTP, against an S3 server whose answers are late, wrong or
lost: what is asked twice is done once.
"""

from collections import Counter

import pytest

from tests.faults import s3
from trainers.errors import StorageError
from trainers.storage import Storage

pytestmark = pytest.mark.skipif(
    not s3.installed(),
    reason="there is no S3 server: pip install 'moto[server]'",
)
_OF_CLIENT = 3
"""Requests that pyarrow's own client makes of one, before it gives up."""
MIB = 1 << 20


class Spoils:
    """Spoils the next requests of a kind."""

    def __init__(self):
        self.method = ""
        self.word = ""
        self.kind = ""
        self.times = 0

    def next(self, method, kind, times, word=""):
        """Requests with this word in their target."""
        self.method = method
        self.kind = kind
        self.times = times
        self.word = word

    def __call__(self, method, target):
        if not self.times or method != self.method or self.word not in target:
            return ""
        self.times -= 1
        return self.kind


@pytest.fixture(scope="module")
def server():
    spoils = Spoils()
    with s3.bucket(spoils) as (proxy, uri, direct):
        yield spoils, proxy, uri, direct


@pytest.fixture
def spoils(server):
    yield server[0]
    assert server[0].times == 0, "what was to be injected was not"


@pytest.fixture
def storage(server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setattr("trainers.storage._WAITS_S", (0.0, 0.0, 0.0))
    return Storage(server[2])


@pytest.mark.parametrize("kind", ["503", "500", "cut request", "cut", "lost"])
def test_whatever_befalls_a_write_the_object_is_the_new_one(
    kind, storage, spoils
):
    name = f"record-{kind.replace(' ', '-')}"
    storage.write(name, b"old")
    spoils.next("PUT", kind, _OF_CLIENT + 1, name)
    storage.write(name, b"new")
    assert storage.read(name) == b"new"
    assert name in storage.names()


@pytest.mark.full
def test_a_write_that_fails_for_good_leaves_what_was_there(
    storage, spoils, monkeypatch
):
    """A lease that vanished because it could not be renewed would end the run."""
    monkeypatch.setattr("trainers.storage._WAITS_S", (0.0,))
    storage.write("lease", b"old")
    spoils.next("PUT", "503", 10**6, "lease")
    with pytest.raises(StorageError):
        storage.write("lease", b"new")
    assert storage.read("lease") == b"old"
    spoils.times = 0


@pytest.mark.parametrize("kind", ["cut request", "lost"])
def test_an_object_in_parts_is_whole_though_its_completion_is_repeated(
    kind, storage, spoils
):
    """The server does not know an upload any more that it has completed: all
    of it is sent again.
    """
    content = bytes(range(256)) * (11 * MIB // 256)
    spoils.next("POST", kind, 1, "uploadId=")
    storage.write(f"large-{kind.split()[0]}", content)
    assert storage.read(f"large-{kind.split()[0]}") == content


def test_a_block_that_breaks_off_leaves_no_half_object(storage):
    with pytest.raises(ValueError), storage.writer("half") as stream:  # noqa: PT012
        stream.write(b"half")
        raise ValueError
    assert not storage.exists("half")


@pytest.mark.parametrize("kind", ["503", "lost"])
def test_a_deletion_may_be_repeated(kind, storage, spoils):
    storage.write("gone/a", b"1")
    storage.write("gone/b", b"1")
    spoils.next("DELETE", kind, _OF_CLIENT + 1, "gone")
    storage.delete("gone/a")
    assert storage.names("gone") == ["b"]
    spoils.next("POST", kind, _OF_CLIENT + 1, "delete")
    storage.delete("gone")
    assert not storage.exists("gone")
    storage.delete("gone")


def test_looking_is_tried_again_too(storage, spoils):
    storage.write("seen/a", b"1")
    spoils.next("HEAD", "503", _OF_CLIENT + 1, "seen/a")
    assert storage.exists("seen/a")
    spoils.next("GET", "cut", _OF_CLIENT + 1, "seen")
    assert storage.names("seen") == ["a"]
    spoils.next("GET", "cut", _OF_CLIENT + 1, "seen/a")
    assert storage.read("seen/a") == b"1"


def test_a_small_object_is_one_request(storage, server, monkeypatch):
    seen = Counter()
    monkeypatch.setattr(
        server[1], "fault", lambda method, target: seen.update([method]) or ""
    )
    storage.write("small", b"1")
    assert seen == {"PUT": 1}
