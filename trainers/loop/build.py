"""Everything that a run is made of, built in the order that memory and seeds need."""

from __future__ import annotations

import copy
import io
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.data.feed import Feed
from trainers.data.sampler import StepSampler, split_share
from trainers.devices.device import device_name, resolve_device, seed_all, set_flags
from trainers.devices.peers import check_peers
from trainers.devices.rng import get_rng_state, set_rng_state
from trainers.errors import ConfigError, classify
from trainers.model.precision import PrecisionSpec, apply_matmul, resolve_precision
from trainers.model.strategy import Group, check_static_graph, compile_model, is_sharded, place_model, whole, wrap_model
from trainers.step.ceiling import read_ceiling, refuse_microbatch, setting_of
from trainers.step.cuda_graphs import GraphedStep
from trainers.step.flops import count_flops
from trainers.step.microbatch import OUT_OF_MEMORY, choose_microbatch
from trainers.step.noise_scale import noise_scale
from trainers.step.train_step import TrainStep
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
    flops_per_sample: float | None
    """Known to rank 0 (to every rank of a sharded model)."""

    def close(self) -> None:
        """End loader processes and let go of the data."""
        self.train_feed.close()
        self.val_feed.close()


def build_parts(task: Task, config: TrainConfig, context: RunContext) -> Parts:
    """Device, data, model, optimizer and step of this worker. Every rank must call it."""
    device = resolve_device(config.device, context.device_index)
    group = Group(context.rank, context.world_size, device)
    if context.local_world_size != context.world_size:
        check_peers(group, context.storage)
    spec = resolve_precision(config.precision, device)
    set_flags(device, config.scaling.cpus_per_worker, config.deterministic)
    apply_matmul(spec)

    seed_all(config.seed)  # data that draws without a generator of its own is the same in every process
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
    model = task.model()
    spec = spec.with_layout(config.channels_last, model, device)
    model = place_model(spec.convert_model(model), group, config.strategy)
    model.train()
    optimizer = task.optimizer(model, config)
    share = -(-min(config.batch_size, sampler.length) // context.world_size)
    _check_state(task, group)
    ceiling = _ceiling(config, context, device) if group.rank == 0 else None
    ceiling, bounds = group.first((ceiling, context.microbatch_bounds))
    largest = min(share, ceiling or share) if config.microbatch_size == "auto" else share
    tried = [largest]

    def tell(size: int, fits: bool) -> None:
        tried.append(size)
        context.fits(size, fits)

    try:
        microbatch_size = choose_microbatch(
            config.microbatch_size,
            largest,
            model,
            optimizer,
            task,
            train,
            spec,
            group,
            accumulates=largest < share,
            bounds=bounds,
            tell=tell,
        )
    except (RuntimeError, MemoryError) as error:
        if is_sharded(model) and classify(error) in OUT_OF_MEMORY:  # the other ranks still wait in its forward
            refuse_microbatch(error, tried[-1], config, context, device_name(device))
        raise
    accumulation = len(split_share(torch.empty(share), microbatch_size))
    check_static_graph(config.ddp, group, accumulation, microbatch_size)
    flops_per_sample = None
    if group.rank == 0 or is_sharded(model):  # every rank where its forward is a collective
        microbatch = sampler.permutation()[:microbatch_size]
        flops_per_sample = count_flops(model, task, train, microbatch, spec, device)
    if config.compile != "off":
        compile_model(model, config.compile, config.fullgraph)
    noise = noise_scale(config, group, model, accumulation)
    watch = noise.hook if noise is not None and accumulation == 1 else None
    wrapped = wrap_model(model, group, config.strategy, config.ddp, watch)
    kind = GraphedStep if config.cuda_graphs else TrainStep
    step = kind(wrapped, task, optimizer, spec, group, config.clip_grad_norm)
    step.noise = noise
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
        accumulation,
        flops_per_sample,
    )
    if isinstance(wrapped, DistributedDataParallel):
        _settle_buckets(parts)
    return parts


def _ceiling(config: TrainConfig, context: RunContext, device: torch.device) -> int | None:
    """The largest microbatch that is not known to run out of memory in mid-training."""
    found = read_ceiling(context.storage, setting_of(config, context.world_size, device_name(device)))
    known = [size for size in (found, context.microbatch_ceiling) if size is not None]
    return min(known, default=None)


def _settle_buckets(parts: Parts) -> None:
    """Two throw-away passes: DDP rebuilds its buckets after the first backward, and a resumed run must sum gradients
    in the order in which the unbroken one does. Weights, buffers and random state are as before.
    """
    device, step = parts.device, parts.step
    random_state, task_state = get_rng_state(device), copy.deepcopy(step.task.state_dict())
    buffers = {name: buffer.clone() for name, buffer in parts.model.named_buffers()}
    # As large as training's own: what fits is known, and another size would be compiled for nothing.
    rows = [parts.sampler.anchor(0).repeat(parts.microbatch_size)] * 2
    for batch in parts.train_feed.batches(rows, training=True):
        (step.loss(batch) * 0.0).backward()
    step.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in parts.model.named_buffers():
            buffer.copy_(buffers[name])
    step.task.load_state_dict(task_state)
    set_rng_state(random_state, device)


def _check_state(task: Task, group: Group) -> None:
    """A task's own state must come back from a checkpoint: say so before training, not after a crash."""
    state: dict[str, Any] = whole(task.state_dict(), group)
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
