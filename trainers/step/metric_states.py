"""torchmetrics in evaluation, without importing torchmetrics.

A metric's states are taken after every batch and reduced once, at the end, as torchmetrics reduces over ranks: as if
every batch had been a rank. The order is that of the batches, so the figure is the same for any number of workers.
"""

from collections.abc import Callable, Mapping
from operator import itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from trainers.data.batch import map_tensors
from trainers.devices.group import Group
from trainers.errors import ConfigError

_Place = tuple[int, int]
"""The number of a batch, and where in it a part of it starts."""
_ORDERLESS = ("dim_zero_sum", "dim_zero_max", "dim_zero_min")  # torchmetrics' names; exact for whole numbers


class MetricStates:
    """The states of one evaluation's metrics, batch by batch."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}  # torchmetrics.Metric by name
        self._states: dict[str, dict[str, dict[_Place, Any]]] = {}  # tensors or lists of them, by metric and state

    def take(self, values: Mapping[str, Any], place: _Place, samples: int, task: str) -> dict[str, Tensor]:
        """Keep and reset the metrics among `values`, which a part of a batch has updated; return the tensors.

        Raises ConfigError, which names the class `task`, for what is neither a tensor [samples] nor a metric.
        """
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.shape[:1] != (samples,) or value.numel() != samples:
                    rule = f"must be one value a sample, a tensor of shape [{samples}]"
                    fix = f"return them unreduced from {task}.metrics()"
                    raise ConfigError(f"metric {name}", list(value.shape), rule, fix)
                continue
            if not getattr(value, "_reductions", None):
                rule = "must be a tensor of one value a sample, or a torchmetrics.Metric with states of its own"
                fix = "return the metrics of a collection or a wrapper one by one, each under its name"
                raise ConfigError(f"metric {name}", type(value).__name__, rule, fix)
            self._metrics[name] = value
            states = self._states.setdefault(name, {attribute: {} for attribute in value._reductions})
            for attribute, state in value.metric_state.items():
                _keep(states[attribute], place, state, value._reductions[attribute])
            value.reset()
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def figures(self, group: Group) -> dict[str, float]:
        """Compute each metric's figure over all batches of all ranks; a vector's as `<name>_<index>`.

        Every rank must call it. Raises ConfigError for a figure of more dimensions.
        """
        ranks = group.gather(map_tensors(Tensor.cpu, self._states))
        if not any(ranks):
            return {}
        # The first batch is rank 0's: it has every metric.
        return group.first(self._computed(ranks) if group.rank == 0 else {})

    def _computed(self, ranks: list[Any]) -> dict[str, float]:
        figures: dict[str, float] = {}
        for name, metric in self._metrics.items():
            before = metric.metric_state
            for attribute, reduction in metric._reductions.items():
                kept = [item for rank in ranks if name in rank for item in rank[name][attribute].items()]
                states = [state for _, state in sorted(kept, key=itemgetter(0))]
                reduced = map_tensors(methodcaller("to", metric.device), _reduced(states, reduction))
                setattr(metric, attribute, reduced)
            with torch.no_grad():
                figure = type(metric).compute(metric)  # the class's own: the instance's would gather once more
            for attribute, state in before.items():
                setattr(metric, attribute, state)
            if isinstance(figure, Tensor) and figure.numel() == 1:
                figure = figure.reshape(())  # as the instance's would
            if not isinstance(figure, Tensor) or figure.ndim > 1:
                shown = list(figure.shape) if isinstance(figure, Tensor) else type(figure).__name__
                rule = "must be one number, or a vector of them"
                raise ConfigError(f"metric {name}", shown, rule, "choose a metric that averages")
            if figure.ndim == 0:
                figures[name] = float(figure)
            else:
                figures |= {f"{name}_{index}": value for index, value in enumerate(figure.double().tolist())}
        return figures


def _keep(kept: dict[_Place, Any], place: _Place, state: Any, reduction: Callable[[Any], Any] | None) -> None:
    """Keep a batch's state; whole numbers that are summed are one state for all of a rank's batches."""
    if isinstance(state, list):
        kept[place] = [item.detach() for item in state]
        return
    exact = not state.is_floating_point() and getattr(reduction, "__name__", "") in _ORDERLESS
    if reduction is not None and exact and kept:
        first = next(iter(kept))
        kept[first] = reduction(torch.stack([kept[first], state]))
    else:
        kept[place] = state.detach().clone()


def _reduced(states: list[Any], reduction: Callable[[Any], Any] | None) -> Any:
    """Return what torchmetrics makes of the ranks' states; floating sums are made in float64."""
    if isinstance(states[0], list):
        items = [item for state in states for item in state]
        return reduction(items) if reduction is not None and items else items
    if len(states) == 1:
        return states[0]
    stacked = torch.stack(states)
    if reduction is None:
        return stacked
    return reduction(stacked.double()).to(stacked.dtype) if stacked.is_floating_point() else reduction(stacked)
