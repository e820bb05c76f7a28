"""Build a worker's replica, in the order that memory and seeds require."""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainers.checkpoint.validation import loadable
from trainers.config import TrainConfig
from trainers.config.train import CAPTURING
from trainers.context import RunContext
from trainers.data.batch import fetch
from trainers.data.feed import Feed
from trainers.data.sampler import StepSampler
from trainers.data.stream import Stream
from trainers.devices.device import (
    device_name,
    resolve_device,
    seed_all,
    set_flags,
)
from trainers.devices.group import Group
from trainers.devices.peers import check_peers
from trainers.errors import ConfigError
from trainers.loop._dry_run import (
    check_states,
    find_microbatch,
    look_first,
    settle_buckets,
)
from trainers.loop.data import (
    deal_out,
    load_data,
    look_into,
    uncounted,
)
from trainers.model.activations import checkpoint_activations
from trainers.model.moving_average import MovingAverage
from trainers.model.optimizer import (
    check_optimizer,
    join,
    scaled_decay,
    set_training,
    warn_untrained,
)
from trainers.model.precision import apply_matmul, resolve_precision
from trainers.model.schedule import Schedule, StandIn
from trainers.model.state import (
    AsMade,
    frozen_digests,
    place,
    train_as_made,
    trained_beside,
)
from trainers.model.strategy import (
    Replicated,
    compile_model,
    place_model,
    share_tensors,
    sync_batchnorm,
    wrap_model,
)
from trainers.step.ceiling import Ceiling
from trainers.step.cuda_graphs import GraphedStep
from trainers.step.evaluation import evaluating
from trainers.step.forward import ForwardPass
from trainers.step.microbatch import Probe
from trainers.step.snapshot import Snapshot
from trainers.step.train_step import (
    PhasedStep,
    Replica,
    Trained,
    TrainStep,
    is_phased,
    make_phases,
)
from trainers.task import Task, collate_of, overrides, task_feed

logger = logging.getLogger(__name__)


def build_replica(
    task: Task, config: TrainConfig, context: RunContext
) -> Replica:
    """Build the device, data, model, optimizer and step of this worker.

    Every rank must call it.
    """
    group = _prepare_device(config, context)
    seed_all(config.seed)
    train, val = load_data(task, config.task, context, group)
    if val is None:
        _refuse_what_evaluates(config, context.watches)
    sampler = _make_sampler(train, task, config, group)
    _refuse_with_phases(task, config, evaluates=val is not None)
    sharers = context.local_world_size if group.device.type == "cpu" else 1

    def feed(dataset: Dataset[Any]) -> Feed:
        return task_feed(
            dataset,
            task,
            config.data,
            group.device,
            sharers=sharers,
            seed=config.seed,
        )

    train_feed = feed(train)
    val_feed = None if val is None else feed(val)
    seed_all(config.seed)
    context.enter("model")
    trained = make_trained(task, _make_model(task, train), config, group)
    share_tensors(list(trained.beside.values()), group)
    check = partial(check_states, trained, task)
    check()
    context.enter("probe")
    phases = make_phases(trained.forward, trained.optimizer)
    probe = Probe(
        trained.forward, trained.optimizer, train, group, phases, check
    )
    wanted = config.microbatch_size
    ceiling = Ceiling(context, _setting(config, group), wanted == "auto")
    share = -(-min(config.batch_size, sampler.length) // group.world_size)
    size = find_microbatch(probe, share, wanted, ceiling, context)
    accumulation = -(-share // size)
    total_steps = config.max_steps or sampler.batches.first_step(
        config.epochs or 0
    )
    last = min(sampler.batches.steps_in(0), total_steps) - 1
    pieces = group.world_size * accumulation
    at_once = config.evaluate.microbatch_size
    seen = look_first(
        probe, sampler, last, size, pieces, val, at_once, context
    )
    context.enter("wrapping and compiling the model")
    step = _make_step(probe, config, accumulation)
    # Dropout and transforms differ between ranks.
    seed_all(config.seed + context.rank)
    schedule = _make_schedule(
        task,
        trained.optimizer,
        config,
        sampler,
        total_steps,
        evaluates=val is not None,
    )
    replica = Replica(
        **vars(trained),
        **vars(seen),
        group=group,
        step=step,
        sampler=sampler,
        train_feed=train_feed,
        val_feed=val_feed,
        total_steps=total_steps,
        microbatch_size=size,
        accumulation=accumulation,
        ceiling=ceiling,
        schedule=schedule,
    )
    if isinstance(step.forward.model, Replicated):
        settle_buckets(replica, step.forward.model)
    return replica


def _prepare_device(config: TrainConfig, context: RunContext) -> Group:
    """Choose and set up this worker's device; return its group of ranks."""
    device = resolve_device(config.device, context.device_index)
    group = Group(context.rank, context.world_size, device)
    # Before any collective, since set_flags binds the GPU.
    set_flags(device, config.scaling.cpus_per_worker, config.deterministic)
    apply_matmul(resolve_precision(config.precision, device))
    if context.local_world_size != context.world_size:
        check_peers(group, context.storage)
    return group


def _unheld(field: str, metric: str) -> ConfigError:
    """Return the error for a validation metric in a run without a validation split."""
    return ConfigError(
        field,
        metric,
        'is a figure of the validation split, and dataset("val") returned None',
        "return a few samples that are held back, or use another metric",
    )


def _refuse_what_evaluates(
    config: TrainConfig, watches: tuple[str, ...]
) -> None:
    """Raise ConfigError if the configuration names a metric of the validation split."""
    if config.checkpoint.best is not None:
        raise _unheld("checkpoint.best", config.checkpoint.best)
    if config.early_stopping.metric is not None:
        raise _unheld("early_stopping.metric", config.early_stopping.metric)
    for name in watches:
        if name.startswith("val_"):
            raise _unheld("objective", name)


def _make_sampler(
    train: Any, task: Task, config: TrainConfig, group: Group
) -> StepSampler:
    """Return the sampler of training steps, in the task's own order if it has one."""
    given = task.sampler(train, config)
    if isinstance(train, Stream):
        counted = {
            "epochs": config.epochs,
            "evaluate.every_epochs": config.evaluate.every_epochs,
            "checkpoint.every_epochs": config.checkpoint.every_epochs,
        }
        for key, value in counted.items():
            if value is not None:
                raise uncounted(key, value)
        look_into(train, given, config.batch_size, config.task, group)
        if config.data.num_workers > 1 and group.rank == 0:
            logger.warning(
                "`data.num_workers: %d` has the effect of 1: only one process reads a stream",
                config.data.num_workers,
            )
    return deal_out(
        train,
        given,
        group,
        sizes=config.batch_sizes,
        seed=config.seed,
        drop_last=config.drop_last,
        max_steps=config.max_steps or 0,
    )


def _make_model(task: Task, train: Dataset[Any]) -> nn.Module:
    """Return the task's model.

    A forward pass of one sample gives lazy layers (nn.LazyLinear) their shapes
    before an optimizer gets their parameters.
    """
    made: Any = task.model()
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"{type(task).__name__}.model()",
            type(made).__name__,
            "must be an instance of nn.Module",
            "return a module, and nothing else",
        )
    if any(map(is_lazy, (*made.parameters(), *made.buffers()))):
        with torch.no_grad(), evaluating(made):
            batch = fetch(train, [0], collate_of(task))
            task.forward(made, task.transform(batch, True))
    return made


def make_trained(
    task: Task, model: nn.Module, config: TrainConfig, group: Group
) -> Trained:
    """Place or shard a task's model; make its optimizer and its moving average."""
    frozen = None
    if config.checkpoint.parameters == "trained":
        frozen = frozen_digests(model)
    if config.ddp.sync_batchnorm:
        model = sync_batchnorm(model, group)
    row = resolve_precision(config.precision, group.device)
    spec = row.with_layout(config.channels_last, model, group.device)
    if spec.scaler or spec.parameters is not None:
        _refuse_complex(model, spec.name)
    model = place_model(spec.convert_model(model), group, config.strategy)
    is_compiled = config.compile != "off"
    checkpoint_activations(model, config.activation_checkpointing, is_compiled)
    train_as_made(model)
    owner = type(task).__name__
    optimizer = join(task.optimizer(model, config), model, owner)
    check_optimizer(optimizer, owner, config.lr_scaling.rule)
    beside = trained_beside(task, model, optimizer)
    place(beside.values(), group.device, spec.parameters)
    if beside and optimizer.state:  # the state may be on their old device
        optimizer.load_state_dict(optimizer.state_dict())
    if group.rank == 0:
        warn_untrained(model, optimizer, task)
    set_training(optimizer, True)
    ema = None
    decay = scaled_decay(
        config.ema.decay, config.lr_scaling, config.batch_size
    )
    if decay is not None:
        ema = MovingAverage(model, optimizer, decay, frozen or ())
    forward = ForwardPass(model, task, spec, group.device)
    return Trained(forward, optimizer, ema, AsMade(model), [*beside], frozen)


def _refuse_complex(model: nn.Module, precision: str) -> None:
    """Raise ConfigError for complex parameters in a format without complex numbers."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                "precision",
                precision,
                f"has no complex numbers, and the parameter `{name}` is complex",
                "set `precision: fp32`",
            )


def _refuse_with_phases(
    task: Task, config: TrainConfig, evaluates: bool
) -> None:
    """Raise ConfigError for settings that do not fit training_step() or phases().

    These methods use the bare model.
    """
    if not is_phased(task):
        return
    name = type(task).__name__
    rule = (
        f"does not work with training_step() or phases(), which {name} defines"
    )
    if config.strategy in ("fsdp", "dp"):
        raise ConfigError(
            "strategy", config.strategy, rule, "set `strategy: ddp`"
        )
    if config.cuda_graphs is True:
        raise ConfigError(
            "cuda_graphs", True, rule, "set `cuda_graphs: false`"
        )
    if evaluates and not overrides(task, "loss"):
        raise ConfigError(
            "task",
            config.task,
            'has no loss() for the samples of its "val" split',
            'define loss(), or return None from dataset("val")',
        )


def _setting(config: TrainConfig, group: Group) -> str:
    """Return the devices and settings that a ceiling is valid for, as text."""
    workers = f"{group.world_size} x {device_name(group.device)}"
    words = [workers, config.strategy, f"compile {config.compile}"]
    if config.activation_checkpointing != "none":
        words.append(
            f"activation_checkpointing {config.activation_checkpointing}"
        )
    return ", ".join(words)


def _make_step(probed: Probe, config: TrainConfig, most: int) -> TrainStep:
    """Compile and wrap the model, and make the training step.

    A step has at most `most` microbatches.
    """
    forward = probed.forward
    model = forward.model
    rest = (probed.optimizer, probed.group, config.clip_grad_norm)
    is_compiled = config.compile != "off"
    if is_compiled:
        compile_model(model, config.compile, config.fullgraph)
    captures = config.compile in CAPTURING
    if probed.phases:
        if is_compiled:
            # A phase may call each child directly.
            for child in model.children():
                compile_model(child, config.compile, config.fullgraph)
        phased = PhasedStep(forward, *rest, probed.phases)
        for phase in phased.phases.values():
            phase.copies_gradients = captures
        return phased
    of = replace(
        forward, model=wrap_model(model, probed.group, config.strategy)
    )
    step: TrainStep
    if _captures(config, probed, most):
        step = GraphedStep(of, *rest, asked=config.cuda_graphs is True)
    else:
        step = TrainStep(of, *rest)
    step.copies_gradients = captures
    return step


def _captures(config: TrainConfig, probed: Probe, most: int) -> bool:
    """Return whether to try to capture steps as CUDA graphs.

    With `auto`, only steps of a single microbatch on a single GPU are captured,
    with a fused optimizer, and without strategy dp or fsdp, activation
    checkpointing, and compile modes that capture CUDA graphs themselves.
    """
    if config.cuda_graphs != "auto":
        return config.cuda_graphs
    group = probed.group
    is_one_pass = group.device.type == "cuda" and group.world_size == most == 1
    is_bare = (
        config.strategy in ("ddp", "none") and config.compile not in CAPTURING
    )
    keeps_all = config.activation_checkpointing == "none"
    groups = probed.optimizer.param_groups
    is_fused = all(param_group.get("fused") for param_group in groups)
    return is_one_pass and is_bare and keeps_all and is_fused


def _make_schedule(
    task: Task,
    optimizer: Optimizer,
    config: TrainConfig,
    sampler: StepSampler,
    total_steps: int,
    evaluates: bool,
) -> Schedule | None:
    """Make the task's scheduler; None if the configuration sets the learning rate."""
    if not overrides(task, "schedule"):
        return None
    stand_in = StandIn(optimizer)
    given = task.schedule(stand_in, config)
    if given is None:
        return None
    course = config.lr_schedule
    if course.name != "constant":
        raise ConfigError(
            "lr_schedule.name",
            course.name,
            f"is overruled by {type(task).__name__}.schedule(), which returns a scheduler",
            "remove one of the two",
        )
    batches = sampler.batches if config.counts_samples else None
    schedule = Schedule(given, stand_in, course, total_steps, batches)
    owner = f"{type(schedule.scheduler).__name__}.state_dict()"
    loadable(schedule.state_dict(), owner)
    if schedule.by_figure and not evaluates:
        raise _unheld("schedule()", schedule.figure)
    epochs = 0
    if sampler.known_length:
        epochs = sampler.batches.place(total_steps).epoch
    elif schedule.every == "epoch":
        raise uncounted("schedule()", "epoch")
    ends = [sampler.batches.first_step(epoch + 1) for epoch in range(epochs)]
    # load_state_dict() would keep attributes that the scheduler made later.
    device = torch.device("cpu")
    before = Snapshot(task, {"schedule": schedule.scheduler}, device)
    schedule.try_to_the_end(total_steps, ends)
    before.restore()
    return schedule
