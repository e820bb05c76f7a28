"""Take a worker's random state as plain data that `weights_only=True` reads back."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from trainers.devices.device import seed_device

HOST = torch.device("cpu")


def get_rng_state(device: torch.device) -> dict[str, Any]:
    """Python's, numpy's and torch's generators (CPU and `device`)."""
    generator: Any = np.random.get_state()
    _, key, pos, has_gauss, gauss = generator
    kept = {
        "key": torch.from_numpy(key.astype(np.int64)),
        "pos": pos,
        "has_gauss": has_gauss,
        "gauss": gauss,
    }
    state = {"python": random.getstate(), "numpy": kept, "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["device"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `get_rng_state` gave."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    saved = state["numpy"]
    key = saved["key"].numpy().astype(np.uint32)
    np.random.set_state(
        ("MT19937", key, saved["pos"], saved["has_gauss"], saved["gauss"])
    )
    torch.set_rng_state(state["torch"])
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
    elif "device" in state and device.type == "mps":
        torch.mps.set_rng_state(state["device"])


@contextlib.contextmanager
def drawn_alike(device: torch.device = HOST) -> Iterator[None]:
    """Draw the same inside in every process, call and run, whatever the run's seed.

    Random state is put back.
    """
    before = get_rng_state(device)
    seed_device(0, device)
    try:
        yield
    finally:
        set_rng_state(before, device)
