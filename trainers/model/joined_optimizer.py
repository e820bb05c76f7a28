"""Join several optimizers, each with parameters of its own, into one."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainers.errors import ConfigError

_FLAGS = ("found_inf", "grad_scale")
"""What a fused step reads of its optimizer."""


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
