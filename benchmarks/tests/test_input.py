"""The input benchmark in miniature: it runs, and what it compares is the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks.input import (
    KINDS,
    Kind,
    feed,
    guides_transform,
    make_data,
    measure,
    task_of,
    write_mapped,
)
from trainers.task import Task

SMALL = {name: Kind(kind.shape, 40, 8, 16) for name, kind in KINDS.items()}


@pytest.mark.parametrize("name", KINDS)
def test_every_peer_gives_figures(name):
    found = measure(name, SMALL[name], rounds=1, seconds=0.001, workers=1)
    assert found["share_of_slice"].keys() == {"resident", "memory", "mapped"}
    assert all(row["median"] > 0 for row in found["rows"].values())
    assert ("mapped + transform" in found["rows"]) == (name != "rows")


@pytest.mark.parametrize("name", KINDS)
def test_our_ways_give_the_same_batches(name, tmp_path):
    kind = SMALL[name]
    data = make_data(kind)
    mapped = write_mapped(data, tmp_path)
    ways = [
        feed(data, Task(), kind, True),
        feed(data, Task(), kind, False),
        feed(mapped, Task(), kind, False),
    ]
    for batches in zip(*(way() for way in ways), strict=True):
        for values, labels in batches[1:]:
            assert torch.equal(values, batches[0][0])
            assert torch.equal(labels, batches[0][1])


def test_the_transform_gives_what_the_guides_give():
    from PIL import Image

    images, labels = make_data(SMALL["mnist"]).tensors
    ours, _ = task_of("mnist").transform((images, labels), training=True)
    theirs = torch.stack(
        [
            guides_transform("mnist")(Image.fromarray(image[0].numpy()))
            for image in images
        ]
    )
    assert torch.allclose(ours, theirs, atol=1e-5)
