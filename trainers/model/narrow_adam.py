"""Adam and AdamW whose moments are kept in two bytes a value, or in one, and computed with in float32."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Adam

from trainers.model.sharding import local

_MOMENTS = ("exp_avg", "exp_avg_sq")
_BLOCK, _LEAST = 256, 4096
"""Values that share a scale, and the fewest of a parameter that are kept in 8 bits: as in bitsandbytes and torchao."""
_SLICE = 1 << 22  # values in float32 at once
_GOLDEN = 40503  # 2**16 by the golden ratio
_Grid = tuple[Tensor, Tensor]


def _grid(signed: bool) -> list[float]:
    """The values of a byte: in each of seven decades up to 1 twice as many as in the one below; 0 and 1 themselves.

    Dettmers 2016 (arXiv:1511.04561), as torchao's `create_dynamic_map` has them.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        values += (10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
    return sorted(values + [-value for value in values[2:]] if signed else values)


_GRIDS = {"exp_avg": _grid(signed=True), "exp_avg_sq": _grid(signed=False)}


class NarrowAdam(Adam):
    """Adam, or AdamW with `decoupled_weight_decay`, with narrow moments; a slice after the other is in float32.

    bf16: both moments in bfloat16. 8bit: a byte a value and a scale for every 256 (Dettmers et al. 2022,
    arXiv:2110.02861), but float32 for a parameter of less than 4096 values, or of no whole number of blocks.

    It reads `found_inf` on the device as fused steps do, and keeps plain tensors, equal on all ranks.
    """

    def __init__(self, parameters: Any, state: str, compiled: bool, **options: Any) -> None:
        super().__init__(parameters, **options)
        self._in_bytes, self._compiled = state == "8bit", compiled
        self._step: Any = torch.compile(_step, fullgraph=True, dynamic=False) if compiled else _step
        self._grids: dict[torch.device, dict[str, _Grid]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; none of them, nor their moments, where `found_inf` is set."""
        with _any_number_of_shapes() if self._compiled else contextlib.nullcontext():
            for group in self.param_groups:
                device = group["params"][0].device
                grids, found = self._grids_on(device), getattr(self, "found_inf", None)
                found = torch.zeros((), device=device) if found is None else found
                lr, (beta1, beta2) = group["lr"], group["betas"]
                # Tensors, since a graph would be compiled anew for each value of a number.
                rates = [
                    rate if isinstance(rate, Tensor) else torch.full((), rate, device=device)
                    for rate in (lr, beta1, beta2, 1 - beta1, 1 - beta2)
                ]
                fixed = (group["weight_decay"], group["eps"], group["decoupled_weight_decay"])
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    if not self.state[parameter]:
                        self.state[parameter] = self._fresh(parameter)
                    state = {name: local(value) for name, value in self.state[parameter].items()}
                    step = state.pop("step").add_(1)
                    tensors = {"": local(parameter), "gradient": local(parameter.grad), **state}
                    fake = isinstance(tensors[""], FakeTensor)  # the first slice shows what all of them take
                    parts = [tensors] if self._compiled and not fake else _slices(tensors)
                    for part in itertools.islice(parts, 1 if fake else None):
                        (_step if fake else self._step)(part, step, rates, found, grids, *fixed)
                    step.sub_(found)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; ValueError where it is of other formats.

        torch's own would first give every moment the format of its parameter.
        """
        super().load_state_dict({**state_dict, "state": {}})
        numbers = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            if not (saved := state_dict["state"].get(number)):
                continue
            self.state[parameter] = self._fresh(parameter)
            for name, mine in self.state[parameter].items():
                value = torch.as_tensor(saved.get(name, ()))
                if value.shape != mine.shape or value.dtype.is_floating_point != mine.dtype.is_floating_point:
                    raise ValueError(f"{name} of parameter {number} is {value.dtype} {list(value.shape)}")
                mine.copy_(value)

    def _fresh(self, parameter: Tensor) -> dict[str, Tensor]:
        blocks, rest = divmod(parameter.numel(), _BLOCK)
        in_bytes = self._in_bytes and rest == 0 and parameter.numel() >= _LEAST
        dtype = torch.uint8 if in_bytes else torch.float32 if self._in_bytes else torch.bfloat16
        state = {"step": torch.zeros((), device=parameter.device)}
        for name in _MOMENTS:
            state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            if in_bytes:
                state[f"{name}_scale"] = torch.zeros(blocks, device=parameter.device)
        return state

    def _grids_on(self, device: torch.device) -> dict[str, _Grid]:
        if self._in_bytes and device not in self._grids:
            values = {name: torch.tensor(grid, device=device) for name, grid in _GRIDS.items()}
            self._grids[device] = {name: (one, (one[:-1] + one[1:]) / 2) for name, one in values.items()}
        return self._grids.get(device, {})


def _slices(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Rows of a parameter and of all that belongs to them, in whole blocks: views."""
    tensors = {name: torch.atleast_1d(tensor) for name, tensor in tensors.items()}
    count, row = len(tensors[""]), max(1, tensors[""][:1].numel())
    align = _BLOCK // math.gcd(row, _BLOCK)
    rows = -(-max(1, _SLICE // row) // align) * align
    for start in range(0, count, rows):
        for_blocks = slice(start * row // _BLOCK, (start + rows) * row // _BLOCK)
        of = {True: for_blocks, False: slice(start, start + rows)}
        yield {name: tensor[of[name.endswith("_scale")]] for name, tensor in tensors.items()}


def _any_number_of_shapes() -> contextlib.AbstractContextManager[None]:
    from torch._dynamo.utils import disable_cache_limit  # each has a graph of its own

    return disable_cache_limit()


def _step(
    tensors: Mapping[str, Tensor],
    number: Tensor,
    rates: list[Tensor],
    found: Tensor,
    grids: Mapping[str, _Grid],
    weight_decay: float,
    eps: float,
    decoupled: bool,
) -> None:
    """Kingma and Ba 2015 (arXiv:1412.6980), and Loshchilov and Hutter 2019 (arXiv:1711.05101) where decoupled."""
    lr, beta1, beta2, rest1, rest2 = rates
    value, gradient = tensors[""].float(), tensors["gradient"].float()
    if decoupled:
        value = value - lr * weight_decay * value
    else:
        gradient = gradient + weight_decay * value
    first = _widened("exp_avg", tensors, grids).lerp(gradient, rest1)
    second = _widened("exp_avg_sq", tensors, grids).lerp(gradient.square(), rest2)
    spread = second.sqrt() / (1 - beta2**number).sqrt() + eps
    value = value - lr * (first / (1 - beta1**number)) / spread
    after = {"": value, **_narrowed("exp_avg", first, number, tensors, grids)}
    after |= _narrowed("exp_avg_sq", second, number, tensors, grids)
    for name, new in after.items():
        kept = tensors[name]
        kept.copy_(torch.where(found.bool(), kept, new.to(kept.dtype)))


def _widened(name: str, tensors: Mapping[str, Tensor], grids: Mapping[str, _Grid]) -> Tensor:
    kept = tensors[name]
    if kept.dtype is not torch.uint8:
        return kept.float()
    values = grids[name][0][kept.int()].reshape(-1, _BLOCK) * tensors[f"{name}_scale"][:, None]
    return values.reshape(kept.shape)


def _narrowed(
    name: str, value: Tensor, number: Tensor, tensors: Mapping[str, Tensor], grids: Mapping[str, _Grid]
) -> dict[str, Tensor]:
    kept = tensors[name]
    if kept.dtype is torch.uint8:
        blocks = value.reshape(-1, _BLOCK)
        scale = blocks.abs().amax(1).clip(min=1e-12)
        codes = torch.bucketize(blocks / scale[:, None], grids[name][1], out_int32=True, right=True)
        return {name: codes.to(torch.uint8).reshape(kept.shape), f"{name}_scale": scale}
    if kept.dtype is torch.bfloat16:
        # A step moves a second moment of beta2 = 0.999 by less than half of bfloat16's spacing: rounded to the nearest
        # it would never fall. So the bits below are rounded up from a threshold on that moves with the step, in every
        # 2**16 steps once over all values, and evenly in between: right on average, as by chance, but without random
        # numbers, which ranks would have to draw alike.
        threshold = (number.long() * _GOLDEN & 0xFFFF).int()
        return {name: (value.view(torch.int32) + threshold & -0x10000).view(torch.float32)}
    return {name: value}
