"""Everything that a run is made of, built in the order that memory and seeds need."""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.device import resolve_device, seed_all, set_flags
from trainers.errors import ConfigError
from trainers.loader import Feed
from trainers.microbatch import choose_microbatch
from trainers.parallel import Group, wrap_model
from trainers.precision import PrecisionSpec, apply_matmul, resolve_precision
from trainers.rng import get_rng_state, set_rng_state
from trainers.sampler import StepSampler, split_share
from trainers.step import TrainStep
from trainers.task import Task

logger = logging.getLogger(__name__)


@dataclass
class Parts:
    """The parts of one worker's run."""

    device: torch.device
    group: Group
    spec: PrecisionSpec
    model: nn.Module
    """The bare module: its state_dict has no wrapper's prefix."""
    optimizer: Optimizer
    step: TrainStep
    sampler: StepSampler
    train_feed: Feed
    val_feed: Feed
    total_steps: int
    microbatch_size: int
    accumulation: int

    def close(self) -> None:
        """End loader processes and let go of the data."""
        self.train_feed.close()
        self.val_feed.close()


def build_parts(task: Task, config: TrainConfig, context: RunContext) -> Parts:
    """Device, data, model, optimizer and step of this worker. Every rank must call it."""
    device = resolve_device(config.device, context.device_index)
    group = Group(context.rank, context.world_size, device)
    spec = resolve_precision(config.precision, device)
    set_flags(device, config.scaling.cpus_per_worker, config.deterministic)
    apply_matmul(spec, device)

    if context.local_rank == 0:
        task.setup()
    group.barrier()
    train, val = task.dataset("train"), task.dataset("val")
    if not hasattr(train, "__len__") or not hasattr(val, "__len__"):
        raise ConfigError("task", config.task, "has a dataset without length", "give map-style datasets (`__len__`)")
    for split, dataset in (("train", train), ("val", val)):
        if len(dataset) == 0:
            raise ConfigError("task", config.task, f'has no sample in its "{split}" split', "check its files")
    sampler = StepSampler(
        train,
        global_batch_size=config.batch_size,
        num_replicas=context.world_size,
        rank=context.rank,
        seed=config.seed,
        drop_last=config.drop_last,
    )
    if sampler.steps_per_epoch == 0:
        raise ConfigError(
            "global_batch_size",
            config.batch_size,
            f"gives no whole step of the {sampler.length} training samples with drop_last",
            "lower it, or set `drop_last: false`",
        )
    total_steps = config.max_steps or (config.epochs or 0) * sampler.steps_per_epoch

    seed_all(config.seed)
    model = spec.convert_model(task.model().to(device))
    model.train()
    optimizer = task.optimizer(model, config)
    share = -(-min(config.batch_size, sampler.length) // context.world_size)
    _check_state(task)
    microbatch_size = choose_microbatch(config.microbatch_size, share, model, optimizer, task, train, spec, group)
    if config.compile != "off":
        # In place: the module keeps its class and its names; dynamic=False, since every size here comes back.
        model.compile(mode=config.compile, fullgraph=config.fullgraph, dynamic=False)
    wrapped = wrap_model(model, group)
    step = TrainStep(wrapped, task, optimizer, spec, group, config.clip_grad_norm)
    sharers = context.local_world_size if device.type == "cpu" else 1
    feed = Feed(train, task, config.data, device, sharers=sharers, seed=config.seed)
    val_feed = Feed(val, task, config.data, device, sharers=sharers, seed=config.seed)
    seed_all(config.seed + context.rank)  # dropout and transforms differ between ranks
    parts = Parts(
        device,
        group,
        spec,
        model,
        optimizer,
        step,
        sampler,
        feed,
        val_feed,
        total_steps,
        microbatch_size,
        accumulation=len(split_share(torch.empty(share), microbatch_size)),
    )
    if context.world_size > 1:
        _settle_buckets(parts)
    return parts


def _settle_buckets(parts: Parts) -> None:
    """Two throw-away passes: DDP rebuilds its buckets after the first backward, and a resumed run must sum gradients
    in the order in which the unbroken one does. Weights, buffers and random state are as before.
    """
    device, step = parts.device, parts.step
    random_state = get_rng_state(device)
    buffers = {name: buffer.clone() for name, buffer in parts.model.named_buffers()}
    rows = [parts.sampler.anchor(0).repeat(2)] * 2  # two samples: BatchNorm refuses one
    for batch in parts.train_feed.batches(rows, training=True):
        (step.loss(batch) * 0.0).backward()
    step.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in parts.model.named_buffers():
            buffer.copy_(buffers[name])
    set_rng_state(random_state, device)


def _check_state(task: Task) -> None:
    """A task's own state must come back from a checkpoint: say so before training, not after a crash."""
    state: dict[str, Any] = task.state_dict()
    data = io.BytesIO()
    try:
        torch.save(state, data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception as error:
        raise ConfigError(
            "task",
            type(task).__name__,
            "has a state_dict with more than tensors and plain data, which cannot be loaded safely",
            "keep numbers, text, lists, dicts and tensors in it",
        ) from error
