"""What a plain PyTorch loop trains is trained as there, in microbatches and
after resumes, and evaluated as trained.
"""

import json

import pytest
import torch

from tests.plain_loop import (
    KINDS,
    STEPS,
    configured,
    in_a_plain_loop,
    in_the_loop,
)
from trainers.inference import Inference, infer
from trainers.launch.local import LocalContext
from trainers.measure.run_log import read_log
from trainers.storage import Storage


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_trained_as_by_a_plain_loop(kind, tmp_path):
    make = KINDS[kind]
    for end in (2, 6, STEPS):
        found = in_the_loop(
            make(), configured(max_steps=end, microbatch_size=3), tmp_path
        )
    torch.testing.assert_close(
        found, in_a_plain_loop(make(), configured()), rtol=1e-9, atol=1e-11
    )

    storage = Storage(tmp_path)
    config = configured()
    storage.write("config.yaml", json.dumps(config.tree()).encode())
    job = Inference(
        config.tree(),
        (),
        "test",
        storage.uri,
        split="val",
        which="newest",
        out=None,
    )
    evaluated = infer(make(), LocalContext(storage, "local"), job).metrics
    assert evaluated == {"val_loss": read_log(storage)[-1]["val_loss"]}


@pytest.mark.parametrize(
    "kind", ["thawed once", "thawed again", "lazy buffer", "words complex"]
)
def test_a_moving_average_follows_what_is_unfrozen(kind, tmp_path):
    """As of a model of which nothing was frozen: what does not move is its own average."""
    means = {}
    for name, ends in (("whole", [STEPS]), ("resumed", [3, 6, STEPS])):
        for end in ends:
            config = configured(max_steps=end, ema={"decay": 0.5})
            means[name] = in_the_loop(KINDS[kind](), config, tmp_path / name)
    torch.testing.assert_close(
        means["resumed"], means["whole"], rtol=0, atol=0
    )
    weights = [
        in_a_plain_loop(KINDS[kind](), configured(max_steps=steps))
        for steps in range(1, STEPS + 1)
    ]
    torch.manual_seed(0)
    begun = KINDS[kind]().model().state_dict()
    for key, first in begun.items():
        mean = first
        for one in weights:
            mean = 0.5 * mean + 0.5 * one[key]
        torch.testing.assert_close(means["whole"][key], mean)
