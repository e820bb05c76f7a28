"""Evaluate exactly: the same figures for any number of workers, to the last sample.

Batches are fixed, and each is given whole to one rank. A batch's float64 sums
fill its own row of a table; the tables are added over ranks (exactly, because
all other ranks have zeros there), and the rows are then summed without
rounding. For a torchmetrics.Metric (the package is not imported), the states
are stored after every batch and reduced once, at the end, as torchmetrics
reduces over ranks: each batch counts as a rank, in the order of batches.
"""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from trainers.causes import classify
from trainers.data.batch import Batch, map_tensors
from trainers.data.feed import Feed
from trainers.devices.device import get_rng_state, set_rng_state
from trainers.devices.group import Group
from trainers.errors import (
    FIX,
    MISSING,
    ConfigError,
    RunFailedError,
    first_line,
)
from trainers.model.sharding import is_sharded
from trainers.model.state import modules_beside
from trainers.step.ceiling import OUT_OF_MEMORY, next_smaller
from trainers.step.forward import ForwardPass, shape_of
from trainers.task import weight_of

logger = logging.getLogger(__name__)

_Place = tuple[int, int]
"""The number of a batch, and where a part of it starts."""
_LOSS, _WEIGHT = 0, 1  # used like the names of metrics
_TOLERANCE = 1e-3
_NARROW_TOLERANCE = 0.05
"""Relative tolerances of figures: in float32, and where products are rounded
to fewer bits.
"""
_ROUNDING = 1e-6  # of figures near zero
_FEW = 64
# reductions of torchmetrics that ignore order; exact for integers
_ORDERLESS = ("dim_zero_sum", "dim_zero_max", "dim_zero_min")


def evaluate(
    forward: ForwardPass,
    feed: Feed,
    microbatch_size: int,
    group: Group,
    *,
    seeds: tuple[int, ...] = (0,),
    collective: bool = False,
) -> dict[str, float]:
    """Evaluate every sample exactly once; return `val_loss` and the task's metrics.

    Metrics are named `val_<name>`. A metric that only some batches report is
    averaged over those batches. There is no `val_loss` if the task's loss is
    None in evaluation.

    Every rank must call it.

    `forward` must use the bare module. Before the final reduction there are no
    collectives, unless the model is sharded or `collective` says that the
    task's forward has some. Then every rank runs equally many forwards: a rank
    with one batch fewer runs an extra forward and ignores its result. Each
    batch's random numbers follow from `seeds` and the batch's number; random
    state is restored.

    If a batch runs out of memory, this batch and all later batches are
    evaluated in halves, or in smaller parts if halves are too large: the
    figures are the same up to rounding. If forwards are collectives, or a
    single sample is too large, RunFailedError is raised.
    """
    length = len(feed.dataset)  # type: ignore[arg-type]
    batches = list(torch.arange(length).split(microbatch_size))
    mine = range(group.rank, len(batches), group.world_size)
    rounds = -(-len(batches) // group.world_size)
    model = forward.model
    together = collective or is_sharded(model)
    idle = []
    if together and len(mine) < rounds:
        idle = [_Piece(0, 0, batches[0])]
    todo = [_Piece(index, 0, batches[index]) for index in mine]
    if feed.most is not None:
        todo = _halved(todo, feed.most)
    measured = _Measured(forward)
    random_state = get_rng_state(group.device)
    try:
        with (
            torch.no_grad(),
            evaluating(model, *modules_beside(forward.task, model)),
        ):
            while todo or idle:
                error, size = measured.take(
                    feed, todo, idle, seeds, collective
                )
                if error is None:
                    break
                if together or size == 1:
                    smaller = next_smaller(microbatch_size)
                    raise too_large(error, size, group, smaller) from error
                feed.most = next_smaller(size)
                logger.info(
                    "an evaluation batch of %d does not fit (%s): trying %d at a time",
                    size,
                    first_line(error),
                    feed.most,
                )
                todo = _halved(todo[measured.done :], feed.most)
    finally:
        set_rng_state(random_state, group.device)
    return _figures(measured, len(batches), group)


def check_evaluation(
    forward: ForwardPass, dataset: Dataset[Any], size: int
) -> ConfigError | str | None:
    """Return a warning if figures depend on which samples are evaluated together.

    The figures of the first `size` samples (at most 64 unless the dataset is a
    TensorDataset), evaluated together, are compared with those of their two
    halves.

    Returns a ConfigError for metrics of a wrong shape, and None if the pass
    fails or its results are random. Call it in a `throwaway` block, on every
    rank.
    """
    most = size if type(dataset) is TensorDataset else min(size, _FEW)
    rows = torch.arange(min(most, len(dataset)))  # type: ignore[arg-type]
    halves = [half for half in rows.tensor_split(2) if len(half)]
    tolerance = (
        _TOLERANCE if forward.spec.name == "fp32" else _NARROW_TOLERANCE
    )
    whole: dict[str, float] = {}
    try:
        with torch.no_grad(), evaluating(forward.model):
            whole = _figures_of(forward, dataset, [rows])
            parts = _figures_of(forward, dataset, halves)
            again = parts
            differ = []
            # Some batches lack some metrics.
            for name in whole.keys() & parts.keys():
                least = max(tolerance * abs(whole[name]), _ROUNDING)
                if abs(whole[name] - parts[name]) > least:
                    differ.append(name)
            if differ:
                again = _figures_of(forward, dataset, halves)
    except Exception as error:
        if isinstance(error, ConfigError) and not whole:
            return error
        # The evaluation itself will report the error better.
        logger.debug("evaluation cannot be tried: %s", error)
        return None
    for name in sorted(differ):
        if parts[name] == again[name]:
            return (
                f"val_{name} depends on which samples are evaluated together: for the first {len(rows)} it is "
                f"{whole[name]:.6g} at once, and {parts[name]:.6g} in halves; make each sample's result independent of "
                "the others (padding, batch statistics, weight()), or compare at the same `evaluate.microbatch_size`"
            )
    return None


def _figures_of(
    forward: ForwardPass, dataset: Dataset[Any], pieces: Sequence[Tensor]
) -> dict[str, float]:
    """Return the loss and the averaged metrics of samples evaluated in these pieces."""
    measured = _Measured(forward)
    start = 0
    for rows in pieces:
        batch = forward.read(dataset, rows, training=False)
        outputs, loss = forward(batch)
        measured.add(_Piece(0, start, rows), batch, outputs, loss)
        start += len(rows)
    sums = {name: value.item() for (_, name), value in measured.sums.items()}
    figures = {
        name: sums[name] / samples
        for name, samples in measured.samples.items()
    }
    if sums[_WEIGHT] and measured.has_loss == {True}:
        figures["loss"] = sums[_LOSS] / sums[_WEIGHT]
    return figures


def too_large(
    error: BaseException, size: int, group: Group, smaller: int
) -> RunFailedError:
    """Return the error for an evaluation batch of `size` that ran out of memory."""
    words = f"rank {group.rank}: an evaluation batch of {size} ran out of memory ({first_line(error)})"
    return RunFailedError(
        classify(error),
        f"{words}{FIX}it with `evaluate.microbatch_size: {smaller}`",
    )


class _Piece(NamedTuple):
    """What one forward pass evaluates: a batch, or a part of it."""

    batch: int
    start: int
    """Where the part starts within the batch."""
    rows: Tensor
    """Rows of the dataset, int64 [samples]."""

    def seed(self, seeds: tuple[int, ...]) -> int:
        """Return the piece's seed; a batch's first piece has the batch's seed."""
        part = [self.start] if self.start else []
        return batch_seed(*seeds, self.batch, *part)


def _halved(pieces: Sequence[_Piece], most: int) -> list[_Piece]:
    """Split pieces of more than `most` samples."""
    halved = []
    for piece in pieces:
        start = piece.start
        for rows in piece.rows.split(most):
            halved.append(_Piece(piece.batch, start, rows))
            start += len(rows)
    return halved


class _Measured:
    """The sums and metric states that one rank has collected from its batches."""

    def __init__(self, forward: ForwardPass) -> None:
        self.sums = dict[tuple[int, str | int], Tensor]()
        """By batch number and name: the loss times its weight, the weight, and
        the sums of the metrics.
        """
        self.samples = Counter[str]()
        """By metric name: the number of samples in the batches that have it."""
        self.has_loss: set[bool] = set()
        self.states = MetricStates()
        self.done = 0
        """Number of pieces done in the last `take`."""
        self.forward = forward
        self._exact = (
            torch.float32 if forward.device.type == "mps" else torch.float64
        )

    def take(
        self,
        feed: Feed,
        pieces: Sequence[_Piece],
        idle: Sequence[_Piece],
        seeds: tuple[int, ...],
        with_loss: bool,
    ) -> tuple[BaseException | None, int]:
        """Measure the pieces; run the `idle` ones without measuring them.

        Returns the out-of-memory error of a forward pass and the size of its
        piece, or None and 0. An out-of-memory error in a metric is raised: a
        metric that has already seen the batch would count it twice.
        """
        self.done = 0
        forward = self.forward
        every = [*pieces, *idle]
        rows = [piece.rows for piece in every]
        found = feed.batches(
            rows, False, [piece.seed(seeds) for piece in every]
        )
        for piece in every:
            is_idle = self.done == len(pieces)
            try:
                batch = next(found)
                outputs, loss = forward(
                    batch, with_loss=with_loss or not is_idle
                )
            except (RuntimeError, MemoryError) as error:
                if classify(error) in OUT_OF_MEMORY:
                    # Its frames hold the tensors that did not fit.
                    return error.with_traceback(None), len(piece.rows)
                raise
            if not is_idle:
                self.add(piece, batch, outputs, loss)
                self.done += 1
        next(found, None)  # lets a loader end its epoch
        return None, 0

    def add(
        self, piece: _Piece, batch: Batch, outputs: Any, loss: Tensor | None
    ) -> None:
        """Add the loss and the metrics of one forward pass to the sums."""
        task = self.forward.task
        owner = type(task).__name__
        samples = len(piece.rows)
        found = _flat(task.metrics(outputs, batch), owner)
        check_names(found, owner)
        values = self.states.take(found, piece[:2], samples, owner)
        self.samples.update(dict.fromkeys(values, samples))
        self.has_loss.add(loss is not None)
        if loss is None:
            loss = torch.zeros((), device=self.forward.device)
        weight = weight_of(task, batch, samples).to(loss.device, self._exact)
        weighed = loss.to(self._exact) * weight
        # A loss of weight 0 is left out, as in training.
        self._sum(piece.batch, _LOSS, weighed.masked_fill(weight == 0, 0.0))
        self._sum(piece.batch, _WEIGHT, weight)
        for name, value in values.items():
            total = value.to(loss.device, self._exact).sum()
            self._sum(piece.batch, name, total)

    def _sum(self, batch: int, name: str | int, value: Tensor) -> None:
        before = self.sums.get((batch, name))
        self.sums[batch, name] = value if before is None else before + value


def _figures(
    measured: _Measured, num_batches: int, group: Group
) -> dict[str, float]:
    """Compute the figures from what all ranks have measured."""
    task = type(measured.forward.task).__name__
    said = group.gather((measured.samples, measured.has_loss))
    samples: Counter[str] = sum((of_rank for of_rank, _ in said), Counter())
    has_loss = set[bool]().union(*(of_rank for _, of_rank in said))
    if len(has_loss) == 2:
        raise ConfigError(
            f"{task}.loss()",
            MISSING,
            "is None for only some batches of an evaluation",
            "return None for all of them, or for none",
        )
    names = [_LOSS, _WEIGHT, *samples]
    table = torch.zeros(num_batches, len(names), dtype=torch.float64)
    if measured.sums:
        rows = [batch for batch, _ in measured.sums]
        columns = [names.index(name) for _, name in measured.sums]
        table[rows, columns] = (
            torch.stack(list(measured.sums.values())).cpu().double()
        )
    loss_sum, weight_sum, *sums_of = map(
        math.fsum, group.sum(table).T.tolist()
    )
    figures = {}
    for name, total in zip(samples, sums_of, strict=True):
        figures[name] = total / samples[name]
    of_states = measured.states.figures(group)
    if both := sorted(figures.keys() & of_states.keys()):
        raise _taken(both[0], "is the name of two figures", task)
    figures |= of_states
    named = {f"val_{name}": figure for name, figure in figures.items()}
    if has_loss == {False}:
        return named
    val_loss = loss_sum / weight_sum if weight_sum else math.nan
    return {"val_loss": val_loss, **named}


def _flat(found: Any, task: str) -> dict[str, Any]:
    """Flatten nested mappings of a task's metrics to names `<name>_<key>`.

    `task` is the name of the task's class.
    """
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{task}.metrics()",
            type(found).__name__,
            "must be a dict of metrics by name",
            "return {} where there are none",
        )
    flat: dict[str, Any] = {}
    for name, value in found.items():
        parts: dict[str, Any] = {name: value}
        if isinstance(value, Mapping):
            parts = {
                f"{name}_{key}": part
                for key, part in _flat(value, task).items()
            }
        if twice := flat.keys() & parts.keys():
            raise _taken(min(twice), "is the name of two metrics", task)
        flat |= parts
    return flat


def check_names(names: Iterable[str], task: str) -> None:
    """Raise ConfigError for a metric whose name is not text, or is reserved."""
    for name in names:
        if not isinstance(name, str):
            raise _taken(name, "must be text", task)
        if name == "loss":
            raise _taken(
                name, "is taken: `val_loss` is the mean of loss()", task
            )


def _taken(name: object, rule: str, task: str) -> ConfigError:
    return ConfigError(
        "metric", name, rule, f"give it another name in {task}.metrics()"
    )


def batch_seed(*numbers: int) -> int:
    """Return the seed of one batch: the same on any rank, whatever else the run does."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0])


@contextlib.contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and restore its own mode afterwards."""
    modes = [
        (module, module.training)
        for model in models
        for module in model.modules()
    ]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class MetricStates:
    """The states of one evaluation's metrics, batch by batch."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}  # torchmetrics.Metric by name
        # Tensors or lists of them, by metric and state.
        self._states: dict[str, dict[str, dict[_Place, Any]]] = {}

    def take(
        self, values: Mapping[str, Any], place: _Place, samples: int, task: str
    ) -> dict[str, Tensor]:
        """Store and reset the metrics of a piece of a batch; return the plain tensors.

        Raises ConfigError, which names the class `task`, for a value that is
        neither a tensor [samples] nor a metric.
        """
        tensors = {}
        for name, value in values.items():
            if _is_one_each(value, samples):
                tensors[name] = value
                continue
            if not getattr(value, "_reductions", None):
                raise ConfigError(
                    f"metric {name}",
                    shape_of(value),
                    f"must be a tensor of shape [{samples}], with one real value per sample, or a torchmetrics.Metric that has states",
                    f"return it unreduced from {task}.metrics(), and metrics of a collection or a wrapper one by one",
                )
            self._metrics[name] = value
            states = self._states.setdefault(name, {})
            for attribute, state in value.metric_state.items():
                kept = states.setdefault(attribute, {})
                _keep(kept, place, state, value._reductions[attribute])
            value.reset()
        return tensors

    def figures(self, group: Group) -> dict[str, float]:
        """Compute each metric's figure over all batches of all ranks.

        A vector gives figures named `<name>_<index>`.

        Every rank must call it. Raises ConfigError for a figure of more than
        one dimension.
        """
        ranks = group.gather(map_tensors(Tensor.cpu, self._states))
        if not any(ranks):
            return {}
        figures: dict[str, float] = {}
        for name in self._metrics:
            # The first rank that has the metric computes the figure.
            if not any(name in before for before in ranks[: group.rank]):
                figures |= self._computed(name, ranks)
        merged: dict[str, float] = {}
        for of_rank in group.gather(figures):
            merged |= of_rank
        return merged

    def _computed(self, name: str, ranks: list[Any]) -> dict[str, float]:
        metric = self._metrics[name]
        before = metric.metric_state
        of_ranks = [rank[name] for rank in ranks if name in rank]
        for attribute, reduction in metric._reductions.items():
            kept: dict[_Place, Any] = {}
            for states in of_ranks:
                kept |= states[attribute]
            reduced = _reduced(
                [kept[place] for place in sorted(kept)], reduction
            )
            on_device = map_tensors(methodcaller("to", metric.device), reduced)
            setattr(metric, attribute, on_device)
        with torch.no_grad():
            # The class's compute(): the instance's would gather again.
            figure = type(metric).compute(metric)
        for attribute, state in before.items():
            setattr(metric, attribute, state)
        figures: dict[str, float] = {}
        for full_name, part in _flat({name: figure}, name).items():
            figures |= _numbers(full_name, part)
        return figures


def _is_one_each(value: Any, samples: int) -> bool:
    if not isinstance(value, Tensor) or value.is_complex():
        return False
    return value.shape[:1] == (samples,) and value.numel() == samples


def _numbers(name: str, figure: Any) -> dict[str, float]:
    """Return a metric's figures by name; ConfigError for more than one dimension."""
    if isinstance(figure, Tensor) and figure.numel() == 1:
        return {name: float(figure)}
    if not isinstance(figure, Tensor) or figure.ndim > 1:
        raise ConfigError(
            f"metric {name}",
            shape_of(figure),
            "must be one number, or a vector of them",
            "choose a metric that averages",
        )
    values = figure.double().tolist()
    return {f"{name}_{index}": value for index, value in enumerate(values)}


def _keep(
    kept: dict[_Place, Any],
    place: _Place,
    state: Any,
    reduction: Callable[[Any], Any] | None,
) -> None:
    """Store a batch's state.

    Integer states whose reduction ignores order are merged into one state per
    rank.
    """
    if isinstance(state, list):
        kept[place] = [item.detach() for item in state]
        return
    orderless = getattr(reduction, "__name__", "") in _ORDERLESS
    exact = orderless and not state.is_floating_point()
    if reduction is not None and exact and kept:
        first = next(iter(kept))
        kept[first] = reduction(torch.stack([kept[first], state]))
    else:
        kept[place] = state.detach().clone()


def _reduced(states: list[Any], reduction: Callable[[Any], Any] | None) -> Any:
    """Reduce the states as torchmetrics reduces over ranks.

    Floating-point states are reduced in float64.
    """
    if isinstance(states[0], list):
        items = [item for state in states for item in state]
        return reduction(items) if reduction is not None and items else items
    if len(states) == 1:
        return states[0]
    stacked = torch.stack(states)
    if reduction is None:
        return stacked
    if stacked.is_floating_point():
        return reduction(stacked.double()).to(stacked.dtype)
    return reduction(stacked)
