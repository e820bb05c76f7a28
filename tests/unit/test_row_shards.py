"""Tensors that each rank writes its rows of: cut, written and read back by any
number of ranks; strangers' files.
"""

import json
import resource
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from tests.unit.test_checkpoint import flip_a_bit, replace
from trainers.checkpoint import _row_shards
from trainers.checkpoint._row_shards import FORMATS, write_tensors
from trainers.checkpoint.manifest import (
    Manifest,
    folder_name,
    rank_file,
    shard_file,
)
from trainers.checkpoint.store import Archive
from trainers.devices.group import Group
from trainers.errors import CheckpointError
from trainers.storage import Storage

CPU = torch.device("cpu")
NAME = folder_name(1)


class Tied(nn.Module):
    """Large and small parameters, two that are one, one with fewer rows than
    there are ranks, and a large buffer.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1003, 300)
        self.head = nn.Linear(300, 1003, bias=False)
        self.head.weight = self.embed.weight
        self.wide = nn.Linear(300_000, 2, bias=False).to(torch.bfloat16)
        self.norm = nn.LayerNorm(300)
        self.register_buffer("seen", torch.rand(300_000))


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    own = {
        name: value.detach() + 1 for name, value in model.named_parameters()
    }
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "ema": {"own": own, "averages": {}},
        "scaler": {},
        "task": {"kept": [torch.rand(400_000), (1, "word")]},
        "position": {"step": 1},
    }


def cut_large(state, rank=0, world_size=1):
    """Cut the large tensors of a state, as FSDP's ranks cut their shards."""

    def own_rows(tensor, group):
        if tensor.nbytes < 1 << 20:
            return None
        own = _row_shards._share(len(tensor), rank, world_size)
        return tensor.detach()[own.start : own.stop]

    with patch.object(_row_shards, "_own_rows", own_rows):
        return _row_shards.cut_rows(state, Group(rank, world_size, CPU))


def write(path, state, world_size):
    """Write the state as so many ranks would, one after another."""
    archive = Archive(Storage(path))
    cuts = [cut_large(state, rank, world_size) for rank in range(world_size)]
    files = {"state.pt": archive.write(NAME, "state.pt", cuts[0].rest)}
    for rank, cut in enumerate(cuts):
        files[rank_file(rank)] = archive.write(NAME, rank_file(rank), {})
        files[shard_file(rank)] = archive.write(
            NAME, shard_file(rank), cut.rows, write_tensors
        )
    archive.seal(Manifest(1, world_size, files), 1)
    return cuts


def same(ours, theirs):
    if isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            same(ours[key], value)
    elif isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs)
        for mine, value in zip(ours, theirs, strict=True):
            same(mine, value)
    else:
        assert ours == theirs


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_any_number_of_ranks_wrote_any_number_reads(
    world_size, state, tmp_path
):
    cuts = write(tmp_path, state, world_size)
    moments = {
        f"optimizer/state/{number}/{name}"
        for number in (0, 1)
        for name in ("exp_avg", "exp_avg_sq")
    }
    weights = {
        f"{section}/{name}.weight"
        for section in ("model", "ema/own")
        for name in ("embed", "wide")
    }
    others = {"model/seen", "task/kept/0"}
    assert set(cuts[0].rows) == weights | moments | others
    sizes = [sum(rows.nbytes for rows in cut.rows.values()) for cut in cuts]
    assert max(sizes) * world_size < sum(sizes) * 1.5 or world_size > 2
    archive = Archive(Storage(tmp_path))
    archive.verify(NAME)
    found, rows = archive.read_state(NAME)
    assert (
        tmp_path / "checkpoints" / NAME / "state.pt"
    ).stat().st_size < 5 << 20
    filled = rows.fill(found)
    same(filled, state)
    assert filled["model"]["embed.weight"] is filled["model"]["head.weight"]
    for readers in (1, 2, 4):
        parts = [
            rows.fill(found["model"], rank, readers) for rank in range(readers)
        ]
        for name in ("embed.weight", "wide.weight"):
            chunks = state["model"][name].chunk(readers)
            for part, chunk in zip(parts, chunks, strict=False):
                assert torch.equal(part[name], chunk)
            assert all(len(part[name]) == 0 for part in parts[len(chunks) :])


def test_the_files_are_those_of_the_safetensors_library(tmp_path):
    tensors = {
        str(dtype): (torch.rand(3, 5) * 9).to(dtype) for dtype in FORMATS
    }
    tensors |= {
        "none": torch.empty(0, 4),
        "turned": torch.rand(4, 6).t(),
        "one": torch.rand(1),
    }
    with (tmp_path / "ours.safetensors").open("wb") as stream:
        write_tensors(tensors, stream)
    found = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    same({name: found[name] for name in tensors}, tensors)
    assert found.keys() == tensors.keys()


def test_writing_takes_no_memory_of_the_size_of_the_state(tmp_path):
    rows = {
        str(number): torch.rand(5_000_000) for number in range(10)
    }  # 200 MB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Archive(Storage(tmp_path)).write(NAME, shard_file(0), rows, write_tensors)
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 << 10
    )


def test_a_flipped_byte_is_found_by_the_rank_whose_file_it_is(state, tmp_path):
    rank = 1
    write(tmp_path, state, 3)
    archive = Archive(Storage(tmp_path))
    flip_a_bit(tmp_path / "checkpoints" / NAME / shard_file(rank))
    for other in {0, 1, 2} - {rank}:
        archive.verify(NAME, other, 3)
    with pytest.raises(CheckpointError):
        archive.verify(NAME, rank, 3)


def header(change):
    """A change of a file's header, whose length stays that of the file's."""

    def made(data):
        size = int.from_bytes(data[:8], "little")
        tree = json.loads(data[8 : 8 + size])
        change(tree)
        text = json.dumps(tree).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return made


def entry(**values):
    return lambda tree: tree["model/embed.weight"].update(values)


STRANGE = {
    "empty": lambda data: b"",
    "no header": lambda data: (1 << 62).to_bytes(8, "little") + data[8:],
    "a place beyond the end": header(
        entry(data_offsets=[1 << 40, (1 << 40) + 502 * 1200])
    ),
    "no such tensor": header(lambda tree: tree.pop("model/embed.weight")),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strangers_rows_are_refused_in_a_sentence(name, state, tmp_path):
    write(tmp_path, state, 2)
    where = tmp_path / "checkpoints" / NAME
    replace(
        where,
        shard_file(0),
        STRANGE[name]((where / shard_file(0)).read_bytes()),
    )
    archive = Archive(Storage(tmp_path))
    archive.verify(NAME)
    with pytest.raises(CheckpointError):
        read_model(archive)


def read_model(archive):
    found, rows = archive.read_state(NAME)
    return rows.fill(found["model"])
