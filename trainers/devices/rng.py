"""Random state of a worker as tensors and plain data, which `torch.load(weights_only=True)` reads back."""

import random
from typing import Any

import numpy as np
import torch


def get_rng_state(device: torch.device) -> dict[str, Any]:
    """Python's, numpy's and torch's generators (CPU and `device`)."""
    generator: Any = np.random.get_state()
    _, key, pos, has_gauss, gauss = generator
    kept = {"key": torch.from_numpy(key.astype(np.int64)), "pos": pos, "has_gauss": has_gauss, "gauss": gauss}
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
    np.random.set_state(("MT19937", key, saved["pos"], saved["has_gauss"], saved["gauss"]))
    torch.set_rng_state(state["torch"])
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
    elif "device" in state and device.type == "mps":
        torch.mps.set_rng_state(state["device"])
