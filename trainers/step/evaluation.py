"""Exact distributed evaluation: the same figures for any number of workers, to the last sample.

Fixed batches are dealt whole to ranks; each batch's float64 sums fill its own row of a table, which is added over
ranks (to zeros, so exactly) and then summed without rounding. For torchmetrics see trainers/step/metric_states.py.
"""

import math

import torch
from torch import nn

from trainers.data.feed import Feed
from trainers.devices.group import Group
from trainers.model.precision import PrecisionSpec
from trainers.model.sharding import is_sharded
from trainers.step.forward import ForwardPass
from trainers.step.metric_states import MetricStates
from trainers.task import Task


def evaluate(
    model: nn.Module, task: Task, feed: Feed, microbatch_size: int, spec: PrecisionSpec, group: Group
) -> dict[str, float]:
    """`val_loss` and the task's metrics as `val_<name>`, over every sample once. Every rank must call it.

    `model` is the bare module: nothing here is a collective until the end, but the forwards of a sharded one. Those are
    equally many on every rank: a rank with a batch less runs one whose result is left out.
    """
    length = len(feed.dataset)  # type: ignore[arg-type]
    batches = list(torch.arange(length).split(microbatch_size))
    mine = range(group.rank, len(batches), group.world_size)
    rounds = -(-len(batches) // group.world_size)
    idle = batches[:1] if is_sharded(model) and len(mine) < rounds else []
    forward = ForwardPass(model, task, spec, group.device)
    rows: list[torch.Tensor] = []
    names: list[str] = []
    states = MetricStates()
    exact = torch.float32 if group.device.type == "mps" else torch.float64
    was_training = model.training
    batch = None
    model.eval()
    try:
        with torch.no_grad():
            for batch in feed.batches([batches[index] for index in mine] + idle, training=False):
                if len(rows) == len(mine):
                    forward(batch, with_loss=False)
                    continue
                outputs, loss = forward(batch)
                index = mine[len(rows)]
                values = states.take(task.metrics(outputs, batch), index, len(batches[index]), type(task).__name__)
                names = list(values)
                weight = task.weight(batch).to(loss.device, exact)
                sums = [value.to(exact).sum() for value in values.values()]
                rows.append(torch.stack([loss.to(exact) * weight, weight, *sums]))
    except RuntimeError as error:
        forward.explain(error, batch)
        raise
    finally:
        model.train(was_training)
    names = next(filter(None, group.gather(names)), names)
    table = torch.zeros(len(batches), 2 + len(names), dtype=torch.float64)
    if rows:
        table[list(mine)] = torch.stack(rows).cpu().double()
    columns = group.sum(table).T.tolist()
    loss_sum, weight_sum, *sums_of = [math.fsum(column) for column in columns]
    figures = {name: total / length for name, total in zip(names, sums_of, strict=True)} | states.figures(group)
    val_loss = loss_sum / weight_sum if weight_sum else math.nan
    return {"val_loss": val_loss, **{f"val_{name}": figure for name, figure in figures.items()}}
