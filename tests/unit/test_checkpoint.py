"""Checkpoints on real files: round trip, retention, damage of every kind,
strangers, and storage that fails.
"""

import contextlib
import hashlib
import io
import itertools
import json
import logging
import os
import pickle
import resource
from pathlib import Path

import pytest
import torch

from tests.specs import read_json
from trainers.checkpoint.manifest import FORMAT, seal
from trainers.checkpoint.store import Checkpoints
from trainers.devices.device import get_rng_state
from trainers.devices.group import Group
from trainers.errors import CheckpointError, StorageError
from trainers.storage import Storage

CPU = torch.device("cpu")
MARKER = "code-ran"


def make(path, keep=2):
    return Checkpoints(Storage(path), Group(0, 1, CPU), keep)


def state(step):
    return {
        "model": {"weight": torch.full((100,), float(step))},
        "position": {"step": step},
    }


def save(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, state(step), get_rng_state(CPU))


def folder(path, step):
    return path / "checkpoints" / f"step-{step:012d}"


def kept(path):
    return sorted(
        int(entry.name.removeprefix("step-"))
        for entry in (path / "checkpoints").iterdir()
    )


def loaded_step(checkpoints):
    found = checkpoints.load()
    return int(found.state["position"]["step"]) if found else None


def test_what_is_saved_comes_back(tmp_path):
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    rank_state = get_rng_state(CPU)
    given = {
        "model": layer.state_dict(),
        "optimizer": optimizer.state_dict(),
        "task": {"words": ["a", None, 1.5]},
    }
    where = make(tmp_path).save(7, given, rank_state)

    assert where == str(folder(tmp_path, 7))
    found = make(tmp_path).load()
    assert found.name == "step-000000000007"
    assert str(found.state) == str(given)
    assert torch.equal(found.rank_state["torch"], rank_state["torch"])
    assert found.rank_state["python"] == rank_state["python"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path, keep):
    save(make(tmp_path, keep), 1, 2, 3, 4)
    left = (
        folder(tmp_path, 5) / "state.pt.01234567.tmp"
    )  # by a writer that was killed
    left.parent.mkdir()
    left.touch()
    save(make(tmp_path, keep), 5)
    assert not left.exists()
    assert kept(tmp_path) == [1, 2, 3, 4, 5][-keep:]
    assert loaded_step(make(tmp_path)) == 5


def test_an_old_one_that_cannot_be_deleted_is_left(tmp_path, monkeypatch):
    def delete(storage, name):
        if name.startswith("step-") and "/" not in name:
            raise StorageError("it is held open")

    monkeypatch.setattr(Storage, "delete", delete)
    save(make(tmp_path, 1), 1, 2)
    assert loaded_step(make(tmp_path)) == 2


@pytest.mark.parametrize("keep", [1, 2])
def test_the_one_just_written_is_never_deleted(tmp_path, keep):
    """A damaged one of a later step may lie there: a run that was killed while
    it wrote it, then resumed earlier.
    """
    save(make(tmp_path, 2), 10, 20)
    (folder(tmp_path, 20) / "manifest.json").unlink()
    assert loaded_step(make(tmp_path, keep)) == 10
    save(make(tmp_path, keep), 15)
    assert loaded_step(make(tmp_path, keep)) == 15
    save(make(tmp_path, keep), 16)
    assert loaded_step(make(tmp_path, keep)) == 16


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "no manifest": lambda where: (where / "manifest.json").unlink(),
    "empty manifest": lambda where: (where / "manifest.json").write_bytes(b""),
    "half a manifest": lambda where: truncate(where / "manifest.json"),
    "manifest of another format": lambda where: edit_manifest(
        where, format=FORMAT + 1
    ),
    "manifest without its seal": lambda where: edit_manifest(
        where, seal=False
    ),
    "manifest of another step": lambda where: edit_manifest(where, step=3),
    "manifest of endlessly deep lists": lambda where: (
        where / "manifest.json"
    ).write_text("[" * 100_000),
    "truncated state": lambda where: truncate(where / "state.pt"),
    "flipped bit in the state": lambda where: flip_a_bit(where / "state.pt"),
    "flipped bit in a rank's state": lambda where: flip_a_bit(
        where / "rank-00000.pt"
    ),
    "no state": lambda where: (where / "state.pt").unlink(),
    "no rank's state": lambda where: (where / "rank-00000.pt").unlink(),
}


def edit_manifest(where, **changes):
    """Change keys of a manifest, None takes one away, and seal it again as
    whoever changed it on purpose would.
    """
    manifest = read_json(where / "manifest.json")
    is_sealed = changes.pop("seal", True)
    manifest = {
        key: value
        for key, value in (manifest | changes).items()
        if value is not None and key != "seal"
    }
    (where / "manifest.json").write_bytes(
        seal(manifest)
        if is_sealed
        else json.dumps(manifest, indent=2).encode()
    )


def replace(where, file, data):
    """Give a file another content, with a manifest that fits."""
    (where / file).write_bytes(data)
    files = read_json(where / "manifest.json")["files"]
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(where, files=files | {file: entry})


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_is_used(
    tmp_path, damage, caplog, monkeypatch
):
    monkeypatch.setattr("time.sleep", lambda _: None)
    save(make(tmp_path), 1, 2)
    DAMAGES[damage](folder(tmp_path, 2))
    with caplog.at_level(logging.WARNING):
        assert loaded_step(make(tmp_path)) == 1
    assert str(folder(tmp_path, 2)) in caplog.text
    assert str(folder(tmp_path, 1)) not in caplog.text


def test_when_all_are_damaged_nothing_begins_anew(tmp_path):
    """The run would delete them."""
    save(make(tmp_path), 1, 2)
    for step in (1, 2):
        flip_a_bit(folder(tmp_path, step) / "state.pt")
    with pytest.raises(CheckpointError):
        make(tmp_path).load()
    assert kept(tmp_path) == [1, 2]


def test_what_was_cut_off_at_the_first_checkpoint_begins_anew(tmp_path):
    save(make(tmp_path), 1)
    (folder(tmp_path, 1) / "manifest.json").unlink()
    assert make(tmp_path).load() is None


def test_a_save_that_is_cut_off_leaves_the_one_before(tmp_path, monkeypatch):
    """Killed at every write in turn, of a step that is new or written again:
    whatever is there then is either whole or not used.
    """
    writes = 3  # state, rank, manifest
    for cut, step in itertools.product(range(writes), (1, 2)):
        run = tmp_path / f"{step}-{cut}"
        save(make(run), 1)
        left = [cut]
        original = Storage.writer

        def writer(self, name, left=left, original=original):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return original(self, name)

        with monkeypatch.context() as patch:
            patch.setattr(Storage, "writer", writer)
            with pytest.raises(KeyboardInterrupt):
                save(make(run), step)
        assert loaded_step(make(run)) == (1 if step == 2 else None)


class Evil:
    """Unpickling it runs code: a directory is made in the working directory."""

    def __reduce__(self):
        return (os.mkdir, (MARKER,))


def evil_pickle():
    data = io.BytesIO()
    torch.save({"model": Evil(), "position": {"step": 1}}, data)
    return data.getvalue()


def legacy_evil_pickle():
    data = io.BytesIO()
    torch.save({"model": Evil()}, data, _use_new_zipfile_serialization=False)
    return data.getvalue()


def plain(value):
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


STRANGERS = {
    "malicious zip": evil_pickle(),
    "malicious legacy file": legacy_evil_pickle(),
    "bare pickle": pickle.dumps(Evil(), protocol=2),
    "a tensor": plain(torch.ones(3)),
}


@pytest.mark.parametrize("file", ["state.pt", "rank-00000.pt"])
@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_strangers_file_with_a_matching_manifest_is_refused(
    tmp_path, monkeypatch, stranger, file
):
    monkeypatch.chdir(tmp_path)
    save(make(tmp_path), 1)
    replace(folder(tmp_path, 1), file, STRANGERS[stranger])
    with pytest.raises(CheckpointError, match=file):
        make(tmp_path).load()
    assert not Path(MARKER).exists()


@contextlib.contextmanager
def small_disk(limit):
    """Files of this process may not grow beyond so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:  # at once: pytest's own report may go to a file that is longer
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_names_the_cause_and_keeps_the_one_before(tmp_path):
    checkpoints = make(tmp_path)
    checkpoints.save(1, {"position": {"step": 1}}, {})
    big = {"model": torch.zeros(400_000), "position": {"step": 2}}
    with pytest.raises(StorageError), small_disk(4096):
        checkpoints.save(2, big, {})
    assert loaded_step(checkpoints) == 1
    assert not [
        name
        for _, _, names in os.walk(tmp_path)
        for name in names
        if name.endswith(".tmp")
    ]


def test_storage_that_workers_do_not_share_is_noticed(tmp_path):
    class TwoRanks(Group):
        def gather(self, value):
            return [
                value,
                ({"rank-00001.pt": {"bytes": 1, "sha256": ""}}, None),
            ]

        def first(self, value):
            return value

    checkpoints = Checkpoints(Storage(tmp_path), TwoRanks(0, 2, CPU), 2)
    with pytest.raises(StorageError):
        save(checkpoints, 1)
    assert not (folder(tmp_path, 1) / "manifest.json").exists()
