"""Throw-away passes: whatever they change is put back, so that training begins as if there had been none."""

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from trainers.devices.rng import get_rng_state, set_rng_state
from trainers.model.sharding import local
from trainers.step.forward import ForwardPass


@contextlib.contextmanager
def throwaway(forward: ForwardPass, optimizer: Optimizer | None = None) -> Iterator[None]:
    """Restore buffers, the task's state and random state at the end, to the bit, and drop all gradients.

    With `optimizer`, whose steps may be taken inside, its state and all parameters too. Copies are kept in host memory.
    """
    model, task, device = forward.model, forward.task, forward.device
    changed = [*model.buffers()] if optimizer is None else [*model.parameters(), *model.buffers()]
    tensors = [local(tensor) for tensor in changed]
    before = [tensor.to("cpu", copy=True) for tensor in tensors]
    optimizer_state = copy.deepcopy(optimizer.state_dict()) if optimizer is not None else {}
    task_state, random_state = copy.deepcopy(task.state_dict()), get_rng_state(device)
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.load_state_dict(optimizer_state)
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        task.load_state_dict(task_state)
        set_rng_state(random_state, device)
