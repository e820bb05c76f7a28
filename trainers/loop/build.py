"""Builds a worker's replica, in the order that memory and seeds need."""

import contextlib
import io
import logging
from dataclasses import replace
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from trainers.config import TrainConfig
from trainers.context import RunContext
from trainers.data.batch import fetch, map_tensors
from trainers.data.sampler import StepSampler, split_share
from trainers.devices.device import device_name, resolve_device, seed_all, set_flags
from trainers.devices.group import Group
from trainers.devices.peers import check_peers
from trainers.errors import ConfigError, classify
from trainers.loop.watchdog import enter
from trainers.model.optimizer import check_optimizer, set_training
from trainers.model.precision import apply_matmul, resolve_precision
from trainers.model.sharding import is_sharded, whole
from trainers.model.strategy import check_static_graph, compile_model, place_model, wrap_model
from trainers.step.ceiling import OUT_OF_MEMORY, read_ceiling, refuse_microbatch
from trainers.step.cuda_graphs import GraphedStep
from trainers.step.flops import count_flops
from trainers.step.forward import ForwardPass
from trainers.step.microbatch import Probe, choose_microbatch
from trainers.step.noise_scale import NoiseScale, noise_scale
from trainers.step.replica import Replica
from trainers.step.splitting import check_loss
from trainers.step.throwaway import CollectiveWatch, throwaway
from trainers.step.train_step import TrainStep
from trainers.task import Task, task_feed

logger = logging.getLogger(__name__)


def build_replica(task: Task, config: TrainConfig, context: RunContext) -> Replica:
    """Build the device, data, model, optimizer and step of this worker. Every rank must call it."""
    device = resolve_device(config.device, context.device_index)
    group = Group(context.rank, context.world_size, device)
    if context.local_world_size != context.world_size:
        check_peers(group, context.storage)
    spec = resolve_precision(config.precision, device)
    set_flags(device, config.scaling.cpus_per_worker, config.deterministic)
    apply_matmul(spec)

    train, val = _load_data(task, config, context, group)
    sampler = _make_sampler(train, config, context)
    seed_all(config.seed)
    enter("model")
    model = task.model()
    spec = spec.with_layout(config.channels_last, model, device)
    model = place_model(spec.convert_model(model), group, config.strategy)
    model.train()
    optimizer = task.optimizer(model, config)
    check_optimizer(optimizer, type(task).__name__)
    set_training(optimizer, True)
    _check_state(task, group)
    enter("probe")
    probe = Probe(ForwardPass(model, task, spec, device), optimizer, train, group)
    microbatch_size, accumulation = _find_microbatch(probe, sampler.length, config, context)
    noise = noise_scale(config, group, model, accumulation)
    pieces = max(group.world_size * accumulation, 2 if noise is not None and noise.halves_every_steps else 1)
    watch = CollectiveWatch()
    with watch if group.world_size > 1 else contextlib.nullcontext():  # throw-away passes, of every rank alike
        flops_per_sample = count_flops(probe.forward, train, sampler.permutation()[:microbatch_size])
        warning = check_loss(probe.forward, train, sampler.permutation(), microbatch_size, pieces)
    if warning and group.rank == 0:
        logger.warning("%s", warning)
    even = is_sharded(model) or any(group.gather(watch.seen))

    enter("wrapping and compiling the model")
    step = _make_step(probe, config, noise, accumulation)
    sharers = context.local_world_size if device.type == "cpu" else 1
    train_feed, val_feed = (
        task_feed(dataset, task, config.data, device, sharers=sharers, seed=config.seed) for dataset in (train, val)
    )
    seed_all(config.seed + context.rank)  # dropout and transforms differ between ranks
    replica = Replica(
        device=device,
        group=group,
        spec=spec,
        model=model,
        optimizer=optimizer,
        step=step,
        sampler=sampler,
        train_feed=train_feed,
        val_feed=val_feed,
        total_steps=config.max_steps or (config.epochs or 0) * sampler.steps_per_epoch,
        microbatch_size=microbatch_size,
        accumulation=accumulation,
        flops_per_sample=flops_per_sample,
        even=even,
    )
    if isinstance(step.forward.model, DistributedDataParallel):
        _settle_buckets(replica)
    return replica


def _load_data(task: Task, config: TrainConfig, context: RunContext, group: Group) -> tuple[Dataset[Any], Dataset[Any]]:
    """Load the datasets of both splits and refuse an empty one."""
    seed_all(config.seed)  # data that draws without a generator of its own is the same in every process
    enter("setup")
    if context.local_rank == 0:
        task.setup()
    enter("the barrier after setup")
    group.barrier()
    enter("dataset")
    train, val = splits = [task.dataset(split) for split in ("train", "val")]
    for split, found in zip(("train", "val"), cast("list[object]", splits), strict=True):
        if found is None:
            rule = f'gives no dataset for its "{split}" split, and every run needs one'
            fix = "return one from dataset(); for val a few samples that are held back will do"
            raise ConfigError("task", config.task, rule, fix)
    if not hasattr(train, "__len__") or not hasattr(val, "__len__"):
        raise ConfigError("task", config.task, "has a dataset without length", "give map-style datasets (`__len__`)")
    for split, dataset in (("train", train), ("val", val)):
        if len(dataset) == 0:
            raise ConfigError("task", config.task, f'has no sample in its "{split}" split', "check its files")
    return train, val


def _make_sampler(train: Dataset[Any], config: TrainConfig, context: RunContext) -> StepSampler:
    size, drop_last = config.batch_size, config.drop_last
    sampler = StepSampler(
        train, context.world_size, context.rank, seed=config.seed, drop_last=drop_last, global_batch_size=size
    )
    if sampler.steps_per_epoch == 0:
        rule = f"gives no whole step of the {sampler.length} training samples with drop_last"
        raise ConfigError("global_batch_size", size, rule, "lower it, or set `drop_last: false`")
    return sampler


def _find_microbatch(probe: Probe, num_train: int, config: TrainConfig, context: RunContext) -> tuple[int, int]:
    """Return the microbatch size, and how many of them a worker accumulates at most."""
    group, name = probe.group, device_name(probe.group.device)
    share = -(-min(config.batch_size, num_train) // context.world_size)
    ceiling = read_ceiling(config, context, name) if group.rank == 0 else None
    ceiling, bounds = group.first((ceiling, context.microbatch_bounds))
    largest = min(share, ceiling or share) if config.microbatch_size == "auto" else share
    tried = [largest]

    def tell(size: int, fits: bool) -> None:
        tried.append(size)
        context.fits(size, fits)

    try:
        size = choose_microbatch(config.microbatch_size, largest, probe, largest < share, bounds, tell)
    except (RuntimeError, MemoryError) as error:
        # The other ranks of a sharded model still wait in its forward.
        if is_sharded(probe.forward.model) and classify(error) in OUT_OF_MEMORY:
            refuse_microbatch(error, tried[-1], config, context, name)
        raise
    accumulation = len(split_share(torch.empty(share), size))
    check_static_graph(config.ddp, group, accumulation, size)
    return size, accumulation


def _make_step(probed: Probe, config: TrainConfig, noise: NoiseScale | None, accumulation: int) -> TrainStep:
    """Compile and wrap the model, and make its step, with the noise scale where that is asked for."""
    model, group = probed.forward.model, probed.group
    if config.compile != "off":
        compile_model(model, config.compile, config.fullgraph)
    watch = noise.hook if noise is not None and accumulation == 1 else None
    wrapped = wrap_model(model, group, config.strategy, config.ddp, watch)
    kind = GraphedStep if config.cuda_graphs else TrainStep
    step = kind(replace(probed.forward, model=wrapped), probed.optimizer, group, config.clip_grad_norm)
    step.noise = noise
    return step


def _settle_buckets(replica: Replica) -> None:
    """Run two throw-away passes: DDP rebuilds its buckets after the first backward, and a resumed run must sum
    gradients in the order in which the unbroken one does.
    """
    forward, dataset = replica.step.forward, replica.train_feed.dataset
    with throwaway(forward, dataset=dataset):
        # As large as training's own: what fits is known, and another size would be compiled for nothing. Read here: a
        # loader's process would go on from the random state that it is left in.
        rows = replica.sampler.anchor(0).repeat(replica.microbatch_size).tolist()
        fetched = fetch(dataset, rows, forward.task.collate)
        for _ in range(2):
            with torch.no_grad():
                batch = map_tensors(lambda tensor: tensor.to(forward.device, copy=True), fetched)
                batch = forward.task.transform(batch, True)
            (forward.loss(batch) * 0.0).backward()


def _check_state(task: Task, group: Group) -> None:
    """A task's own state must come back from a checkpoint: say so before training, not after a crash."""
    state: dict[str, Any] = whole(task.state_dict(), group)
    data = io.BytesIO()
    try:
        torch.save(state, data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception as error:
        rule = "has a state_dict with more than tensors and plain data, which cannot be loaded safely"
        fix = "keep numbers, text, lists, dicts and tensors in it"
        raise ConfigError("task", type(task).__name__, rule, fix) from error
