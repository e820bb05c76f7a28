"""Keep an exponential moving average of a model, to evaluate and export in its place."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainers.errors import CheckpointError
from trainers.model.sharding import local, shard_like
from trainers.model.state import parameters_of, shapes_of


class MovingAverage:
    """Averages the optimizer's parameters and the floating buffers of a state_dict.

    Buffers are averaged as in torchvision's reference. Integer buffers
    (BatchNorm's count) are not averaged, nor those that begin with infinite
    values (masks), whose average would be NaN. The average of a buffer begins
    anew if a forward pass assigns a tensor of another shape.

    Averages begin with the model's values: A_0 = W_0, then A_t = decay A_(t-1)
    + (1 - decay) W_t after the optimizer's step t. Averages are float32 or
    wider, since small steps vanish in narrower formats. For a sharded model,
    each rank averages its own part.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        decay: float,
        without: Collection[str] = (),
    ) -> None:
        """`decay` is the share of the old average that an update keeps.

        `without` names parameters that checkpoints leave out, because they do
        not change.
        """
        self.set_decay(decay)
        trained = set(parameters_of(optimizer))
        self._values: dict[str, Tensor] = {}
        self._frozen: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if parameter in trained and name not in without:
                taken = (
                    self._values if parameter.requires_grad else self._frozen
                )
                taken[name] = parameter
        self._holders: dict[str, dict[str, Tensor | None]] = {}
        kept = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            is_averaged = (
                buffer.is_floating_point() and buffer.isfinite().all()
            )
            if name in kept and is_averaged:
                self._values[name] = buffer
                owner, _, _ = name.rpartition(".")
                self._holders[name] = model.get_submodule(owner)._buffers
        self._averages = {
            name: _widened(value) for name, value in self._values.items()
        }
        # The model's values, while the averages are in the model.
        self._own: dict[str, Tensor] = {}
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []

    def set_decay(self, decay: float) -> None:
        """Set the share of the old average that updates keep from here on."""
        self._average = get_ema_multi_avg_fn(decay)

    def take_unfrozen(self) -> None:
        """Start averaging newly unfrozen parameters from their present values."""
        frozen = self._frozen.items()
        self._add(
            [name for name, parameter in frozen if parameter.requires_grad]
        )

    def _add(self, names: Iterable[str]) -> None:
        for name in names:
            self._values[name] = self._frozen.pop(name)
            self._averages[name] = _widened(self._values[name])
            self._groups = []

    def _find_buffers(self) -> None:
        """Find the model's present buffers, which a forward pass may have assigned."""
        for name, holder in self._holders.items():
            before = self._values[name]
            buffer = holder.get(name.rpartition(".")[2])
            if buffer is None or buffer is before:
                continue
            self._values[name] = buffer
            if buffer.shape != before.shape:
                self._averages[name] = _widened(buffer)
            self._groups = []

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after a step of the optimizer.

        Does not wait for the device.
        """
        self._find_buffers()
        for averages, values in self._grouped():
            taken = [value.to(averages[0].dtype) for value in values]
            self._average(averages, taken, 0)

    def _grouped(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return this rank's averages and values, grouped by format and device."""
        if not self._groups:
            by_kind: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
            for name, value in self._values.items():
                kind = (value.dtype, value.device)
                averages, values = by_kind.setdefault(kind, ([], []))
                averages.append(local(self._averages[name]))
                values.append(local(value))
            self._groups = list(by_kind.values())
        return self._groups

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the averages into the model within the block, then restore it."""
        self._find_buffers()
        for name, value in self._values.items():
            self._own[name] = value.detach().clone()
        self._copy(self._averages)
        try:
            yield
        finally:
            self._copy(self._own)
            self._own = {}

    @torch.no_grad()
    def _copy(self, source: Mapping[str, Tensor]) -> None:
        for name, value in self._values.items():
            local(value).copy_(local(source[name]))

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return what the model's state_dict lacks within `in_place`.

        These are the model's own values, and averages in a wider format than
        the model's. Call this method only within `in_place`.
        """
        assert self._own
        return {"own": self._own, "averages": self._wider()}

    def _wider(self) -> dict[str, Tensor]:
        return {
            name: average
            for name, average in self._averages.items()
            if average.dtype != self._values[name].dtype
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless `state` is a `state_dict` for this model.

        Also starts averaging the parameters that were already unfrozen in
        `state`.
        """
        own = shapes_of(state.get("own"))
        self._add([name for name in self._frozen if name in own])
        ours = {"own": self._values, "averages": self._wider()}
        for part, tensors in ours.items():
            saved = shapes_of(state.get(part))
            unlike = dict(saved.items() ^ shapes_of(tensors).items())
            if unlike.keys() - self._holders.keys():
                raise CheckpointError(
                    "it does not fit this model: the tensors of its moving average differ in name or shape"
                )

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Load what `state_dict` returned, after the model was loaded."""
        self._find_buffers()
        averages = {
            **self._values,
            **shard_like(state["averages"], self._wider()),
        }
        for name, average in self._averages.items():
            local(average).copy_(local(averages[name]))
        self._copy(shard_like(state["own"], self._values))


def _widened(value: Tensor) -> Tensor:
    return value.detach().to(
        torch.promote_types(value.dtype, torch.float32), copy=True
    )
