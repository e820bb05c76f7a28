"""Builds a worker's replica, in the order that memory and seeds need."""

import contextlib
import io
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainers.causes import classify
from trainers.config import TrainConfig
from trainers.config.train import CAPTURING
from trainers.context import RunContext
from trainers.data.batch import fetch, map_tensors
from trainers.data.feed import Feed
from trainers.data.sampler import StepSampler, check_apart, split_share
from trainers.devices.device import device_name, resolve_device, seed_all, set_flags
from trainers.devices.group import Group
from trainers.devices.peers import check_peers
from trainers.errors import ConfigError, shorten
from trainers.loop.data import load_data, make_sampler, steps_in_all, tell_samples
from trainers.loop.watchdog import enter
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
from trainers.model.sharding import is_sharded, whole
from trainers.model.state import (
    AsMade,
    frozen_digests,
    place,
    train_as_made,
    trained_beside,
)
from trainers.model.strategy import (
    Replicated,
    compile_loss,
    compile_model,
    no_sync,
    place_model,
    share_tensors,
    sync_batchnorm,
    wrap_model,
)
from trainers.step.ceiling import OUT_OF_MEMORY, read_ceiling, refuse_microbatch
from trainers.step.cuda_graphs import GraphedStep
from trainers.step.evaluation import check_evaluation, evaluating
from trainers.step.flops import count_flops
from trainers.step.forward import ForwardPass
from trainers.step.microbatch import SAMPLES, Probe, check_loss, choose_microbatch
from trainers.step.snapshot import CollectiveWatch, throwaway
from trainers.step.train_step import (
    PhasedStep,
    Replica,
    TrainStep,
    is_phased,
    make_phases,
)
from trainers.task import Task, task_feed

logger = logging.getLogger(__name__)


def build_replica(task: Task, config: TrainConfig, context: RunContext) -> Replica:
    """Build the device, data, model, optimizer and step of this worker.

    Every rank must call it.
    """
    group = _prepare_device(config, context)
    device = group.device
    train, val = load_data(task, config, context, group)
    sampler = make_sampler(train, task, config, group)
    _refuse_with_phases(task, config, evaluates=val is not None)
    sharers = context.local_world_size if device.type == "cpu" else 1

    def feed(dataset: Dataset[Any]) -> Feed:
        return task_feed(
            dataset, task, config.data, device, sharers=sharers, seed=config.seed
        )

    train_feed = feed(train)
    val_feed = None if val is None else feed(val)
    seed_all(config.seed)
    trained = make_trained(task, _make_model(task, train), config, group)
    share_tensors(list(trained.beside.values()), group)
    model = trained.model
    forward = trained.forward
    _check_state(task, group)
    enter("probe")
    probe = Probe(
        forward,
        trained.optimizer,
        train,
        group,
        make_phases(forward, trained.optimizer),
    )
    try:
        microbatch_size, accumulation = _find_microbatch(
            probe, sampler.length, config, context
        )
    except ValueError as error:
        _refuse_single(error, "microbatch_size", config.microbatch_size)
        raise
    pieces = group.world_size * accumulation
    seen = _look_first(probe, sampler, val, config, microbatch_size, pieces)
    warnings = _said(seen.found, group)
    # Named beside what was seen, since not every model is counted.
    syncs = group.world_size > 1 and _has(model, nn.SyncBatchNorm)
    even = is_sharded(model) or any(group.gather(seen.collectives or syncs))

    enter("wrapping and compiling the model")
    step = _make_step(probe, config, accumulation)
    if trained.ema is not None:
        trained.ema.follow(step.scaler)
    seed_all(config.seed + context.rank)  # dropout and transforms differ between ranks
    total_steps = steps_in_all(config, sampler.batches)
    replica = Replica(
        device=device,
        group=group,
        spec=forward.spec,
        model=model,
        optimizer=trained.optimizer,
        step=step,
        sampler=sampler,
        train_feed=train_feed,
        val_feed=val_feed,
        total_steps=total_steps,
        microbatch_size=microbatch_size,
        accumulation=accumulation,
        flops_per_sample=seen.flops_per_sample,
        schedule=_make_schedule(
            task,
            trained.optimizer,
            config,
            sampler,
            total_steps,
            evaluates=val is not None,
        ),
        ema=trained.ema,
        as_made=trained.as_made,
        beside=trained.beside,
        frozen=trained.frozen,
        samples=seen.samples,
        held_back=seen.held_back,
        even=even,
        warnings=warnings,
    )
    if isinstance(step.forward.model, DistributedDataParallel):
        _settle_buckets(replica, config, context)
    return replica


@dataclass(frozen=True)
class _Seen:
    """Record what throw-away passes before training have shown."""

    found: list[ConfigError | str | None]
    """What to raise or to warn of."""
    flops_per_sample: float | None
    samples: str
    held_back: str
    collectives: bool
    """Whether anything was sent to other ranks."""


def _look_first(
    probe: Probe,
    sampler: StepSampler,
    val: Dataset[Any] | None,
    config: TrainConfig,
    microbatch_size: int,
    pieces: int,
) -> _Seen:
    """Take the throw-away passes before training, of every rank alike."""
    train = probe.dataset
    forward = probe.forward
    group = probe.group
    last = min(sampler.batches.steps_in(0), steps_in_all(config, sampler.batches)) - 1
    planned = [
        rows for step in (0, last) for rows in sampler.plan(step, microbatch_size)[0]
    ]
    singles = any(group.gather(min(map(len, planned)) == 1))
    watch = CollectiveWatch()
    with throwaway(forward, dataset=(train, val)):
        with watch if group.world_size > 1 else contextlib.nullcontext():
            # First: of a model as it was made.
            rows = sampler.rows(0, SAMPLES)
            found = [
                check_loss(part, train, rows, microbatch_size, pieces)
                for part in probe.passes
            ]
            if singles and _has(forward.model, nn.modules.batchnorm._BatchNorm):
                _try_single(probe, sampler.anchor(0))
            microbatch = sampler.rows(0, microbatch_size)
            flops_per_sample = count_flops(forward, train, microbatch, probe.phases)
        samples = tell_samples(train)
        held_back = tell_samples(val)
        found.append(check_apart(train, val))
        if val is not None and not is_sharded(forward.model):
            enter("evaluation")
            at_once = config.evaluate.microbatch_size
            found.append(check_evaluation(forward, val, at_once))
    return _Seen(found, flops_per_sample, samples, held_back, watch.seen)


def _has(model: nn.Module, kind: type[nn.Module]) -> bool:
    return any(isinstance(module, kind) for module in model.modules())


def _prepare_device(config: TrainConfig, context: RunContext) -> Group:
    """Choose and set up this worker's device; return its place among all."""
    device = resolve_device(config.device, context.device_index)
    group = Group(context.rank, context.world_size, device)
    set_flags(
        device, config.scaling.cpus_per_worker, config.deterministic
    )  # before any collective: it binds the GPU
    apply_matmul(resolve_precision(config.precision, device))
    if context.local_world_size != context.world_size:
        check_peers(group, context.storage)
    return group


def _make_model(task: Task, train: Dataset[Any]) -> nn.Module:
    """Return the task's model.

    Lazy layers (nn.LazyLinear) get their shapes by a first sample, before an optimizer
    has their parameters.
    """
    enter("model")
    made: Any = task.model()
    if not isinstance(made, nn.Module):
        rule = "must be a module, an instance of nn.Module"
        raise ConfigError(
            f"{type(task).__name__}.model()",
            type(made).__name__,
            rule,
            "return it alone",
        )
    if any(map(is_lazy, (*made.parameters(), *made.buffers()))):
        with torch.no_grad(), evaluating(made):
            batch = fetch(train, [0], task.collate)
            task.forward(made, task.transform(batch, True))
    return made


@dataclass(frozen=True)
class Trained:
    """A model, neither compiled nor wrapped yet, and its optimizer."""

    forward: ForwardPass
    optimizer: Optimizer
    ema: MovingAverage | None
    as_made: AsMade
    beside: dict[str, Tensor]
    """What the task trains beside the model."""
    frozen: dict[str, str] | None
    """Digests of the parameters that checkpoints leave out; None where they have them
    all.
    """

    @property
    def model(self) -> nn.Module:
        """The bare module."""
        return self.forward.model


def make_trained(
    task: Task, model: nn.Module, config: TrainConfig, group: Group
) -> Trained:
    """Place or shard a task's model; make its optimizer and its moving average."""
    frozen = (
        frozen_digests(model) if config.checkpoint.parameters == "trained" else None
    )
    if config.ddp.sync_batchnorm:
        model = sync_batchnorm(model, group)
    spec = resolve_precision(config.precision, group.device).with_layout(
        config.channels_last, model, group.device
    )
    narrow = spec.scaler or spec.parameters is not None
    if narrow and (
        names := [name for name, one in model.named_parameters() if one.is_complex()]
    ):
        rule = f"has no complex numbers, and the parameter `{names[0]}` is complex"
        raise ConfigError("precision", config.precision, rule, "set `precision: fp32`")
    model = place_model(spec.convert_model(model), group, config.strategy)
    checkpoint_activations(
        model, config.activation_checkpointing, config.compile != "off"
    )
    if (names := train_as_made(model)) and group.rank == 0:
        learns = any(
            one.requires_grad
            for name in names
            for one in model.get_submodule(name).parameters()
        )
        words = "in evaluation mode while the rest is trained, as model() made it: %s"
        logger.log(logging.WARNING if learns else logging.INFO, words, shorten(names))
    optimizer = join(task.optimizer(model, config), model, type(task).__name__)
    check_optimizer(optimizer, type(task).__name__, config.lr_scaling.rule)
    beside = trained_beside(task, model, optimizer)
    place(beside.values(), group.device, spec.parameters)
    if beside and optimizer.state:  # it may have made it where they were
        optimizer.load_state_dict(optimizer.state_dict())
    if group.rank == 0:
        warn_untrained(model, optimizer, task)
    set_training(optimizer, True)
    decay = scaled_decay(config, config.batch_size)
    ema = (
        None if decay is None else MovingAverage(model, optimizer, decay, frozen or ())
    )
    forward = ForwardPass(model, task, spec, group.device)
    return Trained(forward, optimizer, ema, AsMade(model), beside, frozen)


def _said(found: list[ConfigError | str | None], group: Group) -> list[str]:
    """Return rank 0's warnings, said there; raise its first error on every rank."""
    warnings: list[str] = []
    for words in group.first(found):
        if isinstance(words, ConfigError):
            raise words
        if words is not None:
            warnings.append(words)
    for warning in warnings if group.rank == 0 else ():
        logger.warning("%s", warning)
    return warnings


def _refuse_with_phases(task: Task, config: TrainConfig, evaluates: bool) -> None:
    """Raise ConfigError for what does not go with steps that the task makes itself.

    Such steps are of the bare model.
    """
    if not is_phased(task):
        return
    name = type(task).__name__
    rule = f"is for steps of one loss, and {name} defines training_step() or phases()"
    for key, value, refused, fix in (
        ("strategy", config.strategy, ("fsdp", "dp"), "set `strategy: ddp`"),
        ("cuda_graphs", config.cuda_graphs, (True,), "set `cuda_graphs: false`"),
    ):
        if value in refused:
            raise ConfigError(key, value, rule, fix)
    if evaluates and type(task).loss is Task.loss:
        fix = 'define it, or return None from dataset("val")'
        raise ConfigError(
            "task", config.task, 'has no loss() for the samples of its "val" split', fix
        )


def _find_microbatch(
    probe: Probe, num_train: int, config: TrainConfig, context: RunContext
) -> tuple[int, int]:
    """Return the microbatch size, and how many of them a worker accumulates at most."""
    group = probe.group
    name = device_name(probe.group.device)
    share = -(-min(config.batch_size, num_train) // context.world_size)
    ceiling = read_ceiling(config, context, name) if group.rank == 0 else None
    ceiling, bounds = group.first((ceiling, context.microbatch_bounds))
    largest = (
        min(share, ceiling or share) if config.microbatch_size == "auto" else share
    )
    tried = [largest]

    def tell(size: int, fits: bool) -> None:
        tried.append(size)
        context.fits(size, fits)

    try:
        size = choose_microbatch(
            config.microbatch_size, largest, probe, largest < share, bounds, tell
        )
    except (RuntimeError, MemoryError) as error:
        # The other ranks of a sharded model still wait in its forward.
        if is_sharded(probe.forward.model) and classify(error) in OUT_OF_MEMORY:
            refuse_microbatch(error, tried[-1], config, context, name)
        raise
    accumulation = len(split_share(torch.empty(share), size))
    return size, accumulation


def _try_single(probe: Probe, row: Tensor) -> None:
    """Raise ConfigError where BatchNorm refuses a microbatch of one sample.

    An epoch's last microbatch may be one.
    """
    forward = probe.forward
    try:
        with torch.no_grad():
            batch = fetch(probe.dataset, row.tolist(), forward.task.collate)
            batch = forward.task.transform(
                map_tensors(lambda tensor: tensor.to(forward.device), batch), True
            )
            forward(batch, with_loss=False)
    except ValueError as error:
        _refuse_single(error, "drop_last", False)
        raise


def _refuse_single(error: ValueError, field: str, value: object) -> None:
    """Raise ConfigError for BatchNorm's complaint about one sample; else return."""
    if "more than 1 value per channel" in str(error):
        rule = "leaves a worker a microbatch of one sample, which BatchNorm cannot normalise"
        fix = "choose a batch size that leaves each worker two samples of every step, or set `drop_last: true`"
        raise ConfigError(field, value, rule, fix) from error


def _make_step(probed: Probe, config: TrainConfig, most: int) -> TrainStep:
    """Compile the model and its loss, wrap it, and make its step.

    A step has at most `most` microbatches.
    """
    model = probed.forward.model
    group = probed.group
    if config.compile != "off":
        for module in (
            model,
            *(model.children() if probed.phases else ()),
        ):  # which a phase may call by themselves
            compile_model(module, config.compile, config.fullgraph)
    captures = config.compile in CAPTURING
    if probed.phases:
        phased = PhasedStep(
            probed.forward,
            probed.optimizer,
            group,
            config.clip_grad_norm,
            probed.phases,
        )
        for phase in phased.phases.values():
            phase.copies_gradients = captures
        return phased
    wrapped = wrap_model(model, group, config.strategy)
    of = replace(probed.forward, model=wrapped)
    if config.compile != "off":
        of = replace(of, compiled_loss=compile_loss(of.task.loss, config.compile))
    step: TrainStep
    if _captures(config, group, probed.optimizer, most):
        asked = config.cuda_graphs is True
        step = GraphedStep(
            of, probed.optimizer, group, config.clip_grad_norm, asked=asked
        )
    else:
        step = TrainStep(of, probed.optimizer, group, config.clip_grad_norm)
    step.copies_gradients = captures
    return step


def _captures(
    config: TrainConfig, group: Group, optimizer: Optimizer, most: int
) -> bool:
    """Return whether to capture steps where they can be.

    With `auto` those of one microbatch at most.
    """
    if config.cuda_graphs != "auto":
        return config.cuda_graphs
    fits = group.device.type == "cuda" and group.world_size == most == 1
    fits &= config.strategy in ("ddp", "none") and config.compile not in CAPTURING
    fits &= config.activation_checkpointing == "none"
    return fits and all(
        param_group.get("fused") for param_group in optimizer.param_groups
    )


def _make_schedule(
    task: Task,
    optimizer: Optimizer,
    config: TrainConfig,
    sampler: StepSampler,
    total_steps: int,
    evaluates: bool,
) -> Schedule | None:
    """Make the task's scheduler; None where it leaves the course to the configuration."""
    if type(task).schedule is Task.schedule:
        return None
    stand_in = StandIn(optimizer)
    given = task.schedule(stand_in, config)
    if given is None:
        return None
    name = f"{type(task).__name__}.schedule()"
    if config.lr_schedule.name != "constant":
        rule = f"is overruled by {name}, which gives a scheduler of its own"
        raise ConfigError(
            "lr_schedule.name", config.lr_schedule.name, rule, "remove one of the two"
        )
    batches = sampler.batches if config.counts_samples else None
    schedule = Schedule(given, stand_in, config.lr_schedule, total_steps, batches)
    _require_plain(schedule.state_dict(), type(schedule.scheduler).__name__)
    if schedule.every == "epoch" and not sampler.known_length:
        rule = "counts what nobody knows: a stream does not say how many samples it has"
        raise ConfigError("schedule()", "epoch", rule, "count steps")
    if schedule.by_figure and not evaluates:
        rule = 'goes by a figure of the validation split, and dataset("val") gives none'
        raise ConfigError(
            "schedule()", name, rule, "return a few samples that are held back"
        )
    epochs = sampler.batches.place(total_steps).epoch if sampler.known_length else 0
    schedule.try_to_the_end(
        total_steps, [sampler.batches.first_step(epoch + 1) for epoch in range(epochs)]
    )
    return schedule


def _settle_buckets(replica: Replica, config: TrainConfig, context: RunContext) -> None:
    """Run throw-away passes.

    One on each rank by itself, of samples of its own, shows whether DDP can average
    what the loss depends on; then two in which it does: DDP rebuilds its buckets after
    the first backward, and a resumed run must sum gradients in the order in which the
    unbroken one does.
    """
    step = replica.step
    forward = replica.step.forward
    dataset = replica.train_feed.dataset
    wrapped = forward.model
    assert isinstance(wrapped, Replicated)
    # As large as training's own: what fits is known, and another size would be compiled
    # for nothing. Read here: a loader's process would go on from the random state that
    # it is left in.
    size = replica.microbatch_size
    anchor = replica.sampler.anchor(0)
    share = replica.sampler.share(0)[:size] if replica.sampler.known_length else anchor
    own = torch.cat([share, anchor.repeat(size - len(share))])
    for alone, rows in (
        (True, own),
        (False, anchor.repeat(size)),
        (False, anchor.repeat(size)),
    ):
        with throwaway(forward, dataset=dataset):
            with torch.no_grad():
                fetched = fetch(dataset, rows.tolist(), forward.task.collate)
                batch = map_tensors(
                    lambda tensor: tensor.to(forward.device, copy=True), fetched
                )
                batch = forward.task.transform(batch, True)
            wrapped.called = False
            try:
                with no_sync(wrapped) if alone else contextlib.nullcontext():
                    (forward.loss(batch) * 0.0).backward()
            except (RuntimeError, MemoryError) as error:
                if classify(error) in OUT_OF_MEMORY:
                    refuse_microbatch(
                        error,
                        replica.microbatch_size,
                        config,
                        context,
                        device_name(replica.device),
                    )
                raise
            why = (
                next(filter(None, replica.group.gather(wrapped.unfit())), None)
                if alone
                else None
            )
            if why is not None:
                step.average_by_hand(why)
                return


def _check_state(task: Task, group: Group) -> None:
    """Raise ConfigError unless a task's own state will come back from a checkpoint.

    Said before training, not after a crash.
    """
    _require_plain(whole(task.state_dict(), group), type(task).__name__)


def _require_plain(state: dict[str, Any], owner: str) -> None:
    data = io.BytesIO()
    try:
        torch.save(state, data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception as error:
        rule = "has a state_dict with more than tensors and plain data, which cannot be loaded safely"
        fix = "keep numbers, text, lists, dicts and tensors in it"
        raise ConfigError("task", owner, rule, fix) from error
