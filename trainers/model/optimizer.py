"""Optimizer, learning rate and batch-size rules from configuration.

Several optimizers, each with its own parameters, are joined into one.
"""

import contextlib
import inspect
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainers.config import TrainConfig
from trainers.config.sections import ScalingRule, ScheduleConfig
from trainers.data.batch_schedule import BatchSchedule
from trainers.errors import MISSING, ConfigError, shorten
from trainers.model.moving_average import MovingAverage
from trainers.model.sharding import is_shard
from trainers.model.state import left_beside, parameters_of
from trainers.versions import import_torchao

logger = logging.getLogger(__name__)

NARROW = {
    "adamw8bit": "AdamW8bit",
    "adamw4bit": "AdamW4bit",
    "adamwfp8": "AdamWFp8",
}
"""Classes of torchao.optim by `optimizer.name`."""

_FLAGS = ("found_inf", "grad_scale")
"""Attributes of an optimizer that its fused step reads."""
_CLASSES: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
"""torch's and torchao's defaults for Adam."""


ONLY = "train"
"""The name of a task's only optimizer, and of its phase."""


class JoinedOptimizer(Optimizer):
    """Several optimizers as one, whose step is one step of each.

    Groups and states remain those of the parts, in their order.

    Its state_dict has the layout of one optimizer with all groups; each part
    loads its share of it.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        # Without torch's constructor, which would make other groups and state.
        self.parts = dict(parts)
        first, *others = self.parts.values()
        self.defaults = dict(first.defaults)
        for part in others:
            for name in self.defaults.keys() - part.defaults.keys():
                del self.defaults[name]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all parts."""
        return [
            group
            for part in self.parts.values()
            for group in part.param_groups
        ]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The states of all parts, by parameter."""
        state: dict[Tensor, Any] = {}
        for part in self.parts.values():
            state |= part.state
        return state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether every part skips bad steps itself, as torch's loss scaler asks."""
        return all(
            getattr(part, "_step_supports_amp_scaling", False)
            for part in self.parts.values()
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of every part."""
        for part in self.parts.values():
            for flag in _FLAGS:
                if hasattr(self, flag):
                    setattr(part, flag, getattr(self, flag))
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        for part in self.parts.values():
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return all parts' states, with parameters numbered across the parts."""
        groups: list[dict[str, Any]] = []
        state: dict[int, Any] = {}
        first = 0
        for part in self.parts.values():
            own = part.state_dict()
            groups += _numbered(own["param_groups"], first)
            for number, entries in own["state"].items():
                state[first + number] = entries
            first += len(parameters_of(part))
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        groups = iter(state_dict["param_groups"])
        first = 0
        for part in self.parts.values():
            own = _numbered([next(groups) for _ in part.param_groups], -first)
            numbers = {number for group in own for number in group["params"]}
            state = {}
            for number, entries in state_dict["state"].items():
                if number - first in numbers:
                    state[number - first] = entries
            part.load_state_dict({"state": state, "param_groups": own})
            first += len(numbers)


def _numbered(
    groups: list[dict[str, Any]], shift: int
) -> list[dict[str, Any]]:
    return [
        {**group, "params": [number + shift for number in group["params"]]}
        for group in groups
    ]


def optimizers_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the parts of a joined optimizer; any other optimizer is its only part."""
    if isinstance(optimizer, JoinedOptimizer):
        return list(optimizer.parts.values())
    return [optimizer]


def join(
    given: Optimizer | Mapping[str, Optimizer], model: nn.Module, task: str
) -> Optimizer:
    """Combine the optimizers that the class `task` returned into one.

    Raises ConfigError if a value is not an optimizer that the loop can step,
    or if two share a parameter.
    """
    field = f"{task}.optimizer()"
    parts = given if isinstance(given, Mapping) else {ONLY: given}
    if not parts or not all(map(_is_usable, parts.values())):
        raise ConfigError(
            field,
            type(given).__name__,
            "must be an optimizer, or a dict of them by name, with a step() that needs no closure and a finite number as each group's `lr`",
            "return only such optimizers here, and a scheduler, if there is one, from the task's schedule()",
        )
    if not isinstance(given, Mapping):
        return given
    owners: dict[nn.Parameter, str] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for name, part in parts.items():
        for parameter in parameters_of(part):
            owner = owners.setdefault(parameter, name)
            if owner != name:
                raise ConfigError(
                    field,
                    list(parts),
                    f"has parameter `{names.get(parameter, '?')}` in both {owner} and {name}",
                    "give each its own parameters",
                )
    return JoinedOptimizer(parts)


def _is_usable(part: Any) -> bool:
    with contextlib.suppress(Exception):
        inspect.signature(part.step).bind()
        return all(math.isfinite(group["lr"]) for group in part.param_groups)
    return False


def lr_scale(scaling: ScalingRule, size: int) -> float:
    """Return the factor of `lr_scaling` on the learning rate at a global batch size.

    linear: k (Goyal et al. 2017, arXiv 1706.02677, section 2.1); sqrt and sde:
    sqrt(k) (Malladi et al. 2022, arXiv 2205.10287), with k = global batch size
    / base batch size.
    """
    ratio = scaling.ratio(size)
    return ratio if scaling.rule == "linear" else math.sqrt(ratio)


def scaled_options(
    scaling: ScalingRule, size: int, base: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options, except learning rate, that rule sde sets at a batch size.

    The mean gradient of k times the samples has 1 / sqrt(k) times the noise,
    and eps is scaled alike, to eps / sqrt(k). Betas become beta^k, so that the
    moments forget as much per sample; beta^k equals Malladi's 1 - k (1 - beta)
    to first order, and is never below 0. Decoupled weight decay becomes
    weight_decay * sqrt(k), which removes as much per sample (lr * weight_decay
    / size is constant). L2 is part of the loss, and is not scaled.
    """
    if scaling.rule != "sde":
        return {}
    ratio = scaling.ratio(size)
    scaled: dict[str, Any] = {}
    if "betas" in base:
        scaled["betas"] = tuple(beta**ratio for beta in base["betas"])
    if "eps" in base:
        scaled["eps"] = base["eps"] / math.sqrt(ratio)
    if "weight_decay" in base and base.get("decoupled_weight_decay", True):
        scaled["weight_decay"] = base["weight_decay"] * math.sqrt(ratio)
    return scaled


def scaled_decay(
    decay: float | None, scaling: ScalingRule, size: int
) -> float | None:
    """Return the decay of the weights' average at a batch size; None without one.

    With rule sde, the average covers the same number of samples at any size
    (Busbridge et al. 2023, arXiv 2307.13813).
    """
    if decay is None or scaling.rule != "sde":
        return decay
    return float(decay ** scaling.ratio(size))


def built_lr(config: TrainConfig) -> float:
    """Return the learning rate with which to build an optimizer.

    It is scaled to the batch size; with a batch schedule it is not, because
    each step scales it.
    """
    if config.batch_schedule is not None:
        return config.optimizer.lr
    return config.optimizer.lr * lr_scale(config.lr_scaling, config.batch_size)


def build_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Build the configured optimizer over all parameters, fused where possible.

    Frozen parameters are included, because they may be unfrozen later; without
    a gradient no step changes them.

    Fused steps read `found_inf` on the device, so a bad step is skipped
    without host synchronisation.
    """
    chosen = config.optimizer
    every = model.parameters()
    parameters = [p for p in every if p.is_floating_point() or p.is_complex()]
    options = chosen.model_dump(exclude={"name"}, exclude_none=True)
    options["lr"] = built_lr(config)
    if chosen.betas is not None:
        options["betas"] = tuple(chosen.betas)
    if config.batch_schedule is None:
        base = (
            _ADAM | {"decoupled_weight_decay": chosen.name != "adam"} | options
        )
        options |= scaled_options(config.lr_scaling, config.batch_size, base)
    if chosen.name in NARROW:
        return narrow_adamw(chosen.name, parameters, options)
    # torch has no fused step for complex numbers or sparse gradients, and
    # torch 2.15 no fused SGD for shards.
    fused = all(p.is_floating_point() for p in parameters)
    if chosen.name == "sgd" and any(is_shard(p) for p in parameters):
        fused = False
    for module in model.modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
        ):
            fused = False
    return _CLASSES[chosen.name](parameters, fused=fused, **options)  # type: ignore[call-arg]


def check_optimizer(optimizer: Optimizer, task: str, rule: str) -> None:
    """Raise ConfigError for an optimizer that the run cannot use.

    It must not have a torch LR scheduler attached, since the run sets the
    learning rate in every step, and must have the options that the `rule` of
    `lr_scaling` scales.
    """
    if rule == "sde" and any(
        "betas" not in group for group in optimizer.param_groups
    ):
        raise ConfigError(
            "lr_scaling.rule",
            rule,
            f"scales the betas of Adam, which the optimizer of {task}.optimizer() does not have",
            "set `rule: sqrt`",
        )
    is_marked = any("initial_lr" in group for group in optimizer.param_groups)
    for part in optimizers_of(optimizer):
        if is_marked or hasattr(part.step, "_wrapped_by_lr_sched"):
            raise _overruled(
                task,
                "comes with a torch LR scheduler, which `lr_schedule` overrules",
            )


def warn_untrained(model: nn.Module, optimizer: Optimizer, task: Any) -> None:
    """Warn of parameters that require a gradient and are in no optimizer.

    They may be the model's, or in the task's attributes. Also warn of blocks
    that train in evaluation mode, as `from_pretrained` makes them.
    """
    held = set(parameters_of(optimizer))
    named = {**dict(model.named_parameters()), **left_beside(task, model, ())}
    names = [
        name
        for name, tensor in named.items()
        if tensor.requires_grad and tensor.is_leaf and tensor not in held
    ]
    if names:
        logger.warning(
            "no optimizer has %s: training does not change them (if that is intended, freeze them with %s)",
            shorten(names),
            "`requires_grad_(False)`",
        )
    blocks = [
        name
        for name, block in model.named_modules()
        if not block.training and any(block.children())
        if any(weight.requires_grad for weight in block.parameters())
    ]
    if blocks:
        logger.warning(
            "model() leaves %s in evaluation mode: they train without dropout (if that is not intended, call train() there)",
            shorten(blocks),
        )


def check_groups(optimizer: Optimizer, task: str, count: int) -> None:
    """Raise ConfigError if the optimizer's number of groups has changed."""
    if len(optimizer.param_groups) != count:
        raise ConfigError(
            f"{task}.optimizer()",
            MISSING,
            "got or lost a parameter group during training, which a resumed run could not repeat",
            "give it all parameters from the start: no step changes a frozen parameter",
        )


def check_lr(optimizer: Optimizer, task: str, lrs: Sequence[float]) -> None:
    """Raise ConfigError if a group's learning rate is not the one that was set."""
    check_groups(optimizer, task, len(lrs))
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        if not math.isclose(float(group["lr"]), lr, rel_tol=1e-6):
            raise _overruled(
                task,
                f"must leave the learning rate alone, but made it {float(group['lr']):g} instead of {lr:g}",
            )


def _overruled(task: str, rule: str) -> ConfigError:
    return ConfigError(
        f"{task}.optimizer()",
        MISSING,
        rule,
        "return the scheduler from the task's schedule()",
    )


def set_training(optimizer: Any, training: bool) -> None:
    """Switch a schedule-free optimizer between its two sets of weights.

    In training mode the model has the weights being trained; otherwise it has
    their average, which is evaluated and saved (Defazio et al. 2024, arXiv
    2405.15682).
    """
    for part in optimizers_of(optimizer):
        switch = getattr(part, "train" if training else "eval", None)
        if callable(switch):
            switch()


@contextlib.contextmanager
def averaged(
    optimizer: Optimizer, ema: MovingAverage | None
) -> Iterator[None]:
    """Swap in, within the block, the weights that are evaluated and saved.

    These are the averages that the optimizer or `ema` keeps, if any.
    """
    set_training(optimizer, False)
    try:
        with ema.in_place() if ema is not None else contextlib.nullcontext():
            yield
    finally:
        set_training(optimizer, True)


def warmup_steps(
    schedule: ScheduleConfig,
    total_steps: int,
    batches: BatchSchedule | None = None,
) -> int:
    """Return how many of `total_steps` belong to the warm-up.

    With `batches`, a fractional warm-up is a share of the samples, not of the
    steps.
    """
    warmup = schedule.warmup
    if not isinstance(warmup, float):
        return warmup
    if batches is not None:
        return batches.step_at(
            math.ceil(warmup * batches.samples(total_steps))
        )
    return math.ceil(warmup * total_steps)


def lr_factor(
    schedule: ScheduleConfig,
    step: int,
    total_steps: int,
    batches: BatchSchedule | None = None,
) -> float:
    """Return the learning rate's factor in `step` (from 0) of `total_steps`.

    During warm-up the factor rises linearly, and reaches 1 at the last step of
    the warm-up. Later it is constant, or falls, linearly or along half a
    cosine, to reach 0 just after the run's last step. Progress is measured in
    steps or, with `batches`, in samples.
    """
    steps = warmup_steps(schedule, total_steps, batches)
    if step < steps:
        return (step + 1) / steps
    if schedule.name == "constant":
        return 1.0
    if batches is not None:
        step = batches.samples(step)
        steps = batches.samples(steps)
        total_steps = batches.samples(total_steps)
    progress = (step - steps) / max(1, total_steps - steps)
    if schedule.name == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def narrow_adamw(
    name: str, parameters: Iterable[nn.Parameter], options: Mapping[str, Any]
) -> Optimizer:
    """Build torchao's AdamW of this `optimizer.name`; ConfigError without torchao.

    The optimizer's steps are not fused, but compiled, with one graph for each
    shape of parameter.
    """
    library = import_torchao("torchao.optim", "optimizer.name", name, "adamw")
    kind = getattr(library, NARROW[name])
    plain = type(kind.__name__, (_PlainState, kind), {})
    made: Optimizer = plain(parameters, **options)
    return made


class _PlainState:
    """Makes the state_dict of a torchao optimizer contain only plain tensors.

    Checkpoints cannot contain torchao's own kinds of tensors.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with each narrow moment as a mapping of plain tensors."""
        whole: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        state = {}
        for number, entries in whole["state"].items():
            state[number] = {
                name: _taken_apart(entry) for name, entry in entries.items()
            }
        return {**whole, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises ValueError if shapes or formats differ from this optimizer's.
        """
        super().load_state_dict({**state_dict, "state": {}})  # type: ignore[misc]
        optimizer: Any = self
        parameters = parameters_of(optimizer)
        for number, entries in state_dict["state"].items():
            if entries:
                parameter = parameters[number]
                optimizer.state[parameter] = _filled(
                    optimizer, parameter, entries
                )


def _taken_apart(value: Any) -> Any:
    if not hasattr(value, "__tensor_flatten__"):
        return value
    names, _ = value.__tensor_flatten__()
    return {name: getattr(value, name) for name in names}


def _filled(
    optimizer: Any, parameter: Tensor, entries: Mapping[str, Any]
) -> dict[str, Any]:
    state = {
        "step": torch.tensor(float(entries["step"])),
        "exp_avg": optimizer._new_buffer(parameter, True),
        "exp_avg_sq": optimizer._new_buffer(parameter, False),
    }
    for name in ("exp_avg", "exp_avg_sq"):
        ours = _taken_apart(state[name])
        theirs = entries[name]
        if not isinstance(ours, dict):
            ours = {name: ours}
            theirs = {name: theirs}
        for key, mine in ours.items():
            saved = theirs[key]
            if mine.shape != saved.shape or mine.dtype != saved.dtype:
                raise ValueError(
                    f"{name} is {saved.dtype} {list(saved.shape)}, not {mine.dtype} {list(mine.shape)}"
                )
            mine.copy_(saved)
    return state
