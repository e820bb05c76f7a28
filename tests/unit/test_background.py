"""Copies of the state in host memory, which a checkpoint in the background is
written from.
"""

import io

import torch
from torch import nn

from trainers.checkpoint.store import HostCopy


def test_a_copy_is_saved_as_the_original_would_be():
    """Ties, views, layouts, dtypes and the versions of modules: a file from
    the copy is the file of the original.
    """
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(
        memory_format=torch.channels_last
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    tied = torch.arange(5.0)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "task": {
            "tied": [tied, tied],
            "half": torch.ones(2, dtype=torch.bfloat16),
            "words": ("a", None, 1.5, True),
        },
        "empty": torch.empty(0),
    }
    files = [io.BytesIO(), io.BytesIO()]
    for file, content in zip(
        files, (state, HostCopy().take(state)), strict=True
    ):
        torch.save(content, file)
        file.seek(0)
    assert files[0].getbuffer().nbytes == files[1].getbuffer().nbytes
    original, copied = (torch.load(file, weights_only=True) for file in files)
    assert str(original) == str(copied)
    assert copied["model"]._metadata == original["model"]._metadata
    assert (
        copied["model"]["0.weight"].stride()
        == original["model"]["0.weight"].stride()
    )
    ours, theirs = copied["task"]["tied"]
    assert ours.data_ptr() == theirs.data_ptr()


def test_a_copy_is_not_touched_by_what_training_does_next():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    task = {"seen": [1, {"deep": 2}]}
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    copied = HostCopy().take(
        {
            "model": layer.state_dict(),
            "optimizer": optimizer.state_dict(),
            "task": task,
        }
    )
    before = str(copied)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 7.0
    task["seen"].append(3)
    task["seen"][1]["deep"] = 4
    assert str(copied) == before
