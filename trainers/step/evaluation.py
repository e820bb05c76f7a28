"""Exact distributed evaluation: the same figures for any number of workers, to the last sample.

Fixed batches are dealt whole to ranks; each batch's float64 sums fill its own row of a table, which is added over
ranks (to zeros, so exactly) and then summed without rounding. For torchmetrics see trainers/step/metric_states.py.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import nn

from trainers.data.feed import Feed
from trainers.devices.group import Group
from trainers.devices.rng import get_rng_state, set_rng_state
from trainers.errors import ConfigError
from trainers.model.precision import PrecisionSpec
from trainers.model.sharding import is_sharded
from trainers.step.forward import ForwardPass
from trainers.step.metric_states import MetricStates
from trainers.task import Task


def evaluate(
    model: nn.Module,
    task: Task,
    feed: Feed,
    microbatch_size: int,
    spec: PrecisionSpec,
    group: Group,
    *,
    seeds: tuple[int, ...] = (0,),
    collective: bool = False,
) -> dict[str, float]:
    """`val_loss` and the task's metrics as `val_<name>`, over every sample once. Every rank must call it.

    `model` is the bare module: nothing here is a collective until the end, but the forwards of a sharded one, and of a
    task of which `collective` says so. Those are equally many on every rank: a rank with a batch less runs one whose
    result is left out. What is drawn for a batch follows from `seeds` and its number; random state is put back.
    """
    length = len(feed.dataset)  # type: ignore[arg-type]
    batches = list(torch.arange(length).split(microbatch_size))
    mine = range(group.rank, len(batches), group.world_size)
    rounds = -(-len(batches) // group.world_size)
    idle = batches[:1] if (collective or is_sharded(model)) and len(mine) < rounds else []
    drawn = [batch_seed(*seeds, index) for index in [*mine, *([0] * len(idle))]]
    forward = ForwardPass(model, task, spec, group.device)
    rows: list[torch.Tensor] = []
    names: list[str] = []
    states = MetricStates()
    exact = torch.float32 if group.device.type == "mps" else torch.float64
    batch, random_state = None, get_rng_state(group.device)
    try:
        with torch.no_grad(), evaluating(model):
            for batch in feed.batches([batches[index] for index in mine] + idle, training=False, seeds=drawn):
                if len(rows) == len(mine):
                    forward(batch, with_loss=collective)
                    continue
                outputs, loss = forward(batch)
                index = mine[len(rows)]
                found = task.metrics(outputs, batch)
                check_names(found, type(task).__name__)
                values = states.take(found, index, len(batches[index]), type(task).__name__)
                names = list(values)
                weight = task.weight(batch).to(loss.device, exact)
                sums = [value.to(exact).sum() for value in values.values()]
                rows.append(torch.stack([loss.to(exact) * weight, weight, *sums]))
    except RuntimeError as error:
        forward.explain(error, batch)
        raise
    finally:
        set_rng_state(random_state, group.device)
    names = next(filter(None, group.gather(names)), names)
    table = torch.zeros(len(batches), 2 + len(names), dtype=torch.float64)
    if rows:
        table[list(mine)] = torch.stack(rows).cpu().double()
    columns = group.sum(table).T.tolist()
    loss_sum, weight_sum, *sums_of = [math.fsum(column) for column in columns]
    figures = {name: total / length for name, total in zip(names, sums_of, strict=True)}
    of_states = states.figures(group)
    if both := sorted(figures.keys() & of_states.keys()):
        raise _taken(both[0], "is the name of two figures", type(task).__name__)
    figures |= of_states
    val_loss = loss_sum / weight_sum if weight_sum else math.nan
    return {"val_loss": val_loss, **{f"val_{name}": figure for name, figure in figures.items()}}


def check_names(names: Iterable[str], task: str) -> None:
    """Raise ConfigError where the metrics of the class `task` have a name that evaluation takes itself, or none."""
    for name in names:
        if not isinstance(name, str):
            raise _taken(name, "must be text", task)
        if name == "loss":
            raise _taken(name, "is taken: `val_loss` is the mean of loss()", task)


def _taken(name: object, rule: str, task: str) -> ConfigError:
    return ConfigError("metric", name, rule, f"give it another name in {task}.metrics()")


def batch_seed(*numbers: int) -> int:
    """Return the seed of one batch: the same on any rank, and of nothing else in the run."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0])


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and each back into the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
