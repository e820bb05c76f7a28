"""Prove that a captured step does what the plain one does, by throw-away steps."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainers.data.stream_reader import digest
from trainers.devices.device import synchronize
from trainers.devices.rng import get_rng_state
from trainers.step.forward import ForwardPass
from trainers.step.throwaway import throwaway

STEPS = 3
"""Of a pass: what counts steps, or draws outside torch, shows in the second."""
_SPREADS = 3.0


@dataclass(frozen=True)
class Pass:
    """What a few steps have left, which are forgotten."""

    state: dict[str, Tensor]
    """By name, in host memory."""
    changed: str | None
    """An attribute of the task, the model or the optimizer that the steps have changed.
    """
    step_s: float


def take_pass(
    step: Callable[[], None],
    forward: ForwardPass,
    optimizer: Optimizer,
    own: Mapping[str, Tensor],
) -> Pass:
    """Take a step a few times, note what it leaves, and put everything back.

    `own` are tensors that it writes to besides those of model and optimizer.
    """
    device = forward.device
    with throwaway(forward, optimizer) as snapshot:
        for tensor in own.values():
            snapshot.keep(tensor)
        synchronize(device)
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        synchronize(device)
        step_s = (time.perf_counter() - began) / STEPS
        named = {
            **dict(forward.model.named_parameters()),
            **dict(forward.model.named_buffers()),
            **own,
        }
        names = {id(tensor): name for name, tensor in named.items()}
        for number, (parameter, moments) in enumerate(optimizer.state.items()):
            of_parameter = names.get(id(parameter), f"parameter {number}")
            named |= {
                f"{of_parameter}, {key}": value
                for key, value in moments.items()
                if isinstance(value, Tensor)
            }
        state = {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()
        }
        random_state = digest(get_rng_state(device)).encode()
        state["random state"] = torch.frombuffer(
            bytearray(random_state), dtype=torch.uint8
        )
        return Pass(state, snapshot.changed(), step_s)


def difference(captured: Pass, eager: Pass, repeats: Sequence[Pass] = ()) -> str | None:
    """Name what two passes from one state have left otherwise, to the last bit.

    With `repeats` of the eager one: by more than these differ from it.
    """
    for name, theirs in eager.state.items():
        ours = captured.state[name]
        if torch.equal(_bytes(ours), _bytes(theirs)):
            continue
        spread = max(
            (_distance(one.state[name], theirs) for one in repeats), default=0.0
        )
        if not _distance(ours, theirs) <= _SPREADS * spread:
            return name
    return None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())
