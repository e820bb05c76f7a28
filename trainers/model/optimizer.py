"""Optimizer, learning rate and batch-size rules from configuration.

Several optimizers, each with parameters of its own, are joined into one.
"""

import contextlib
import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainers.config import TrainConfig
from trainers.config.sections import ScheduleConfig
from trainers.data.batch_schedule import BatchSchedule
from trainers.errors import MISSING, ConfigError, shorten
from trainers.model.moving_average import MovingAverage
from trainers.model.precision import NARROW, narrow_adamw
from trainers.model.sharding import is_shard
from trainers.model.state import left_beside

logger = logging.getLogger(__name__)

_FLAGS = ("found_inf", "grad_scale")
"""What a fused step reads of its optimizer."""
_CLASSES: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
"""What torch and torchao give Adam where nothing is said."""
_FUSED_DEVICES = ("cpu", "cuda", "mps")


class JoinedOptimizer(Optimizer):
    """Hold the groups and states of several optimizers; a step is one of each.

    Groups and states stay the parts' own, in their order.

    Its state_dict is that of one optimizer with all groups; each part takes its own
    part of one.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        # Without torch's own constructor: it makes groups and a state, and these are
        # the parts'.
        self.parts = dict(parts)
        first, *others = self.parts.values()
        self.defaults = {
            name: value
            for name, value in first.defaults.items()
            if all(name in one.defaults for one in others)
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parts' own groups."""
        return [group for part in self.parts.values() for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The parts' own states, by parameter."""
        return {
            parameter: state
            for part in self.parts.values()
            for parameter, state in part.state.items()
        }

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether every part skips a step by itself, as torch's loss scaler asks it."""
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
        """Return all parts' states, with parameters numbered on from part to part."""
        groups: list[dict[str, Any]] = []
        state: dict[int, Any] = {}
        first = 0
        for part in self.parts.values():
            own = part.state_dict()
            groups += _numbered(own["param_groups"], first)
            state |= {
                first + number: entries for number, entries in own["state"].items()
            }
            first = sum(len(group["params"]) for group in groups)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        groups = iter(state_dict["param_groups"])
        first = 0
        for part in self.parts.values():
            own = [next(groups) for _ in part.param_groups]
            end = first + sum(len(group["params"]) for group in own)
            state = {
                number - first: one
                for number, one in state_dict["state"].items()
                if first <= number < end
            }
            part.load_state_dict(
                {"state": state, "param_groups": _numbered(own, -first)}
            )
            first = end


def _numbered(groups: list[dict[str, Any]], shift: int) -> list[dict[str, Any]]:
    return [
        {**group, "params": [number + shift for number in group["params"]]}
        for group in groups
    ]


def optimizers_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the parts of a joined optimizer; any other one is its only part."""
    return (
        list(optimizer.parts.values())
        if isinstance(optimizer, JoinedOptimizer)
        else [optimizer]
    )


def join(
    given: Optimizer | Mapping[str, Optimizer], model: nn.Module, task: str
) -> Optimizer:
    """Return what the class `task` gave as optimizer, as one.

    Raises ConfigError where it is none, or two of several have one parameter.
    """
    field = f"{task}.optimizer()"
    fix = "return a dict of optimizers by name, each with parameters of its own"
    if not isinstance(given, Mapping):
        if not hasattr(given, "param_groups"):
            alone = "return it alone, and its scheduler from schedule()"
            raise ConfigError(
                field,
                type(given).__name__,
                "must be an optimizer, or a dict of them by name",
                alone,
            )
        return given
    owners: dict[int, str] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, part in given.items():
        if not isinstance(name, str) or not isinstance(part, Optimizer):
            raise ConfigError(
                field,
                {name: type(part).__name__},
                "must be an optimizer by its name",
                fix,
            )
        for parameter in (
            parameter for group in part.param_groups for parameter in group["params"]
        ):
            if (owner := owners.setdefault(id(parameter), name)) != name:
                where = f"has parameter `{names.get(id(parameter), '?')}` in both {owner} and {name}"
                raise ConfigError(field, list(given), where, fix)
    if not given:
        raise ConfigError(field, {}, "has no optimizer", fix)
    return JoinedOptimizer(given)


def lr_scale(config: TrainConfig, size: int) -> float:
    """Return by what `lr_scaling` multiplies the learning rate at a global batch size.

    linear: k (Goyal et al. 2017, arXiv 1706.02677, section 2.1); sqrt and sde: sqrt(k)
    (Malladi et al. 2022, arXiv 2205.10287), with k = global batch size / base batch
    size.
    """
    ratio = config.lr_scaling.ratio(size)
    return ratio if config.lr_scaling.rule == "linear" else math.sqrt(ratio)


def scaled_options(
    config: TrainConfig, size: int, base: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options that rule sde changes at a batch size, but the learning rate.

    Gradients of k times the samples have noise of 1 / sqrt(k), which is what eps stands
    beside: eps / sqrt(k). Betas forget as much a sample: beta^k, which is Malladi's 1 -
    k (1 - beta) to the first order, and never below 0. Decoupled weight decay takes as
    much off a sample (lr * weight_decay / size stays): weight_decay * sqrt(k). L2 is a
    part of the loss, and stays.
    """
    if config.lr_scaling.rule != "sde":
        return {}
    ratio = config.lr_scaling.ratio(size)
    scaled: dict[str, Any] = {}
    if "betas" in base:
        scaled["betas"] = tuple(beta**ratio for beta in base["betas"])
    if "eps" in base:
        scaled["eps"] = base["eps"] / math.sqrt(ratio)
    if "weight_decay" in base and base.get(
        "decoupled_weight_decay", config.optimizer.name != "adam"
    ):
        scaled["weight_decay"] = base["weight_decay"] * math.sqrt(ratio)
    return scaled


def scaled_decay(config: TrainConfig, size: int) -> float | None:
    """Return the decay of the weights' average at a batch size; None without one.

    With rule sde it averages as many samples at any size (Busbridge et al. 2023, arXiv
    2307.13813).
    """
    decay = config.ema.decay
    return (
        decay ** config.lr_scaling.ratio(size)
        if decay is not None and config.lr_scaling.rule == "sde"
        else decay
    )


def built_lr(config: TrainConfig) -> float:
    """Return the learning rate that an optimizer is built with: that of the batch size.

    Where there is a schedule, whose steps multiply it, it is the base batch size's.
    """
    return config.optimizer.lr * (
        1.0
        if config.batch_schedule is not None
        else lr_scale(config, config.batch_size)
    )


def build_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Build the configured optimizer over all parameters, fused where the device can.

    A frozen one has no gradient, and no step moves it; it may be unfrozen later.

    Fused steps read `found_inf` on the device, so a bad step is skipped without a host
    synchronisation.
    """
    chosen = config.optimizer
    parameters = [
        p for p in model.parameters() if p.is_floating_point() or p.is_complex()
    ]
    options = chosen.model_dump(exclude={"name"}, exclude_none=True) | {
        "lr": built_lr(config)
    }
    if chosen.betas is not None:
        options["betas"] = tuple(chosen.betas)
    if config.batch_schedule is None:
        options |= scaled_options(config, config.batch_size, _ADAM | options)
    fused = all(
        p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters
    )
    if chosen.name == "sgd" and any(is_shard(p) for p in parameters):
        fused = False  # torch 2.15 has no sharded form of it
    if any(
        isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        for module in model.modules()
    ):
        fused = False  # torch has no fused step of it
        if chosen.name != "sgd":
            rule = "takes no sparse gradients, such as an embedding of this model has"
            fix = "make it with `sparse=False`, or return torch.optim.SparseAdam from optimizer()"
            raise ConfigError("optimizer.name", chosen.name, rule, fix)
    if chosen.name in NARROW:
        return narrow_adamw(chosen.name, parameters, options)
    return _CLASSES[chosen.name](parameters, fused=fused, **options)  # type: ignore[call-arg]


def check_optimizer(optimizer: Optimizer, task: str, rule: str) -> None:
    """Raise ConfigError for an optimizer that a step cannot use.

    That is one with a torch LR scheduler attached, since the run sets the learning rate
    in every step, one that asks for the loss again (LBFGS), and one without what the
    `rule` of `lr_scaling` scales.
    """
    if rule == "sde" and any("betas" not in group for group in optimizer.param_groups):
        what = f"scales the betas of Adam, which the optimizer of {task}.optimizer() does not have"
        raise ConfigError("lr_scaling.rule", rule, what, "set `rule: sqrt`")
    for each in optimizers_of(optimizer):
        closure = inspect.signature(type(each).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            rule = "computes the loss several times a step, by a closure, and a step here computes it once"
            fix = "choose one whose step() needs no closure"
            raise ConfigError(f"{task}.optimizer()", type(each).__name__, rule, fix)
    marked = any("initial_lr" in group for group in optimizer.param_groups)
    if marked or any(
        hasattr(one.step, "_wrapped_by_lr_sched") for one in optimizers_of(optimizer)
    ):
        raise _overruled(
            f"{task}.optimizer()",
            "comes with a torch LR scheduler, which `lr_schedule` overrules",
        )


def warn_untrained(model: nn.Module, optimizer: Optimizer, task: Any) -> None:
    """Warn of parameters that require a gradient and are in no optimizer.

    They are the model's, or of the task's attributes.
    """
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    named = {**dict(model.named_parameters()), **left_beside(task, model, ())}
    names = [
        name
        for name, one in named.items()
        if one.requires_grad and one.is_leaf and id(one) not in held
    ]
    if names:
        words = "no optimizer has %s: they stay as they are (where that is meant, %s says so)"
        logger.warning(words, shorten(names), "`requires_grad_(False)`")


def check_groups(optimizer: Optimizer, task: str, count: int) -> None:
    """Raise ConfigError where the optimizer's number of groups has changed."""
    if len(optimizer.param_groups) != count:
        rule = "has been given a group while the model is trained, which a run that goes on would not have"
        fix = "give it all parameters from the start: no step moves a frozen one"
        raise ConfigError(f"{task}.optimizer()", MISSING, rule, fix)


def check_lr(optimizer: Optimizer, task: str, lrs: Sequence[float]) -> None:
    """Raise ConfigError where a group's learning rate is not the one that was set."""
    check_groups(optimizer, task, len(lrs))
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        if not math.isclose(float(group["lr"]), lr, rel_tol=1e-6):
            rule = f"must leave the learning rate alone, and has made {float(group['lr']):g} of {lr:g}"
            raise _overruled(f"{task}.optimizer()", rule)


def _overruled(field: str, rule: str) -> ConfigError:
    fix = "return the scheduler from the task's schedule()"
    return ConfigError(field, MISSING, rule, fix)


def set_training(optimizer: Any, training: bool) -> None:
    """Tell a schedule-free optimizer which of its weights the model is to have.

    Those that it trains, or their average, which is evaluated and kept (Defazio et al.
    2024, arXiv 2405.15682).

    Others have no such modes.
    """
    one: Any
    for one in optimizers_of(optimizer):
        if callable(getattr(one, "train", None)) and callable(
            getattr(one, "eval", None)
        ):
            (one.train if training else one.eval)()


@contextlib.contextmanager
def averaged(optimizer: Optimizer, ema: MovingAverage | None) -> Iterator[None]:
    """Let the model have inside the weights that are evaluated and kept.

    They are the optimizer's own average, or `ema`'s.
    """
    set_training(optimizer, False)
    try:
        with ema.in_place() if ema is not None else contextlib.nullcontext():
            yield
    finally:
        set_training(optimizer, True)


def warmup_steps(
    schedule: ScheduleConfig, total_steps: int, batches: BatchSchedule | None = None
) -> int:
    """Return how many of `total_steps` are the warm-up.

    With `batches` a share is one of samples.
    """
    warmup = schedule.warmup
    if not isinstance(warmup, float):
        return warmup
    if batches is not None:
        return batches.step_at(math.ceil(warmup * batches.samples(total_steps)))
    return math.ceil(warmup * total_steps)


def lr_factor(
    schedule: ScheduleConfig,
    step: int,
    total_steps: int,
    batches: BatchSchedule | None = None,
) -> float:
    """Return the factor of the learning rate in `step` (from 0) of `total_steps`.

    Warm-up rises linearly and reaches 1 at its last step; then constant, or linear or
    half a cosine to 0 after the last step. That course counts steps, or, with
    `batches`, the samples before them.
    """
    steps = warmup_steps(schedule, total_steps, batches)
    if step < steps:
        return (step + 1) / steps
    if schedule.name == "constant":
        return 1.0
    if batches is not None:
        step, steps, total_steps = (
            batches.samples(at) for at in (step, steps, total_steps)
        )
    progress = (step - steps) / max(1, total_steps - steps)
    return (
        1.0 - progress
        if schedule.name == "linear"
        else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
