"""What a checkpoint of a model and its task holds besides the model's tensors.

It holds which parameters are frozen, how modules and buffers have changed
since the task's model() made them, and what the task trains outside the model.
A resumed run, which calls model() again, needs all of this.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainers.data.batch import as_bytes, parts_of
from trainers.errors import MISSING, CheckpointError, ConfigError
from trainers.model.sharding import is_sharded


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all the optimizer's groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def frozen_digests(model: nn.Module) -> dict[str, str]:
    """Return, by name, a SHA-256 of each parameter that requires no gradient.

    With `checkpoint.parameters: trained`, checkpoints contain these digests
    instead of the parameters. `model` must be as the task creates it, on the
    CPU, so that digests depend on neither precision nor strategy.
    """
    digests = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            digests[name] = _digest(parameter)
    return digests


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    digest.update(as_bytes(tensor.cpu()).numpy().data)
    return digest.hexdigest()


def check_frozen(saved: Any, now: Mapping[str, str] | None) -> None:
    """Raise CheckpointError unless the checkpoint leaves out the same parameters.

    `saved` has the digests of the parameters that the checkpoint leaves out,
    and `now` of those that this run's checkpoints leave out. Either is None if
    no parameter is left out.
    """
    if not isinstance(saved, dict) or now is None:
        if saved is not now:
            raise CheckpointError(
                "it was written with a different `checkpoint.parameters` from this run's"
            )
        return
    for name in sorted(map(str, saved.keys() | now.keys())):
        if saved.get(name) != now.get(name):
            raise CheckpointError(
                f"it was trained on a different base: the frozen `{name}` differs"
            )


def load_model(
    model: nn.Module,
    saved: Mapping[str, Any],
    frozen: Mapping[str, str] | None,
) -> None:
    """Load a model's state; `frozen` parameters, which `saved` lacks, do not change."""
    missing, unexpected = model.load_state_dict(saved, strict=not frozen)
    wrong = sorted({*missing, *unexpected} - (frozen or {}).keys())
    if wrong:
        raise CheckpointError(
            f"it does not fit this model: missing or unexpected {', '.join(wrong[:4])}"
        )


def modules_beside(task: Any, model: nn.Module) -> list[nn.Module]:
    """Return the task's modules with trainable parameters outside the model."""
    own = set(model.parameters())
    found = []
    for value in vars(task).values():
        if isinstance(value, nn.Module):
            others = set(value.parameters()) - own
            if any(parameter.requires_grad for parameter in others):
                found.append(value)
    return found


def trained_beside(
    task: Any, model: nn.Module, optimizer: Optimizer
) -> dict[str, Tensor]:
    """Return, by name, the task's tensors that the optimizer trains outside the model.

    An example is a loss with parameters. If an attribute of the task holds such
    a tensor, the attribute's other tensors are included too, except the
    model's. All tensors returned are treated like the model's: they are moved
    to the model's device, kept equal on all ranks, and saved in checkpoints,
    and their gradients are averaged over ranks.

    Raises ConfigError for a parameter that is in no attribute of the task,
    since no checkpoint could restore it.
    """
    own = _tensors_of(model)
    lost = set[Tensor](parameters_of(optimizer)) - own
    if not lost:
        return {}
    owner = f"{type(task).__name__}.optimizer()"
    found: dict[str, Tensor] = {}
    for name, value in vars(task).items():
        tensors = dict(_tensors(value, name))
        if not lost.isdisjoint(tensors.values()):
            for inner, tensor in tensors.items():
                if tensor not in own:
                    found[inner] = tensor
    lost -= set(found.values())
    if lost:
        raise ConfigError(
            owner,
            MISSING,
            f"has a parameter of shape {list(lost.pop().shape)} that is neither the model's nor in an attribute of the task, so that no checkpoint would have it",
            "keep the parameter, or its module, as an attribute of the task",
        )
    if is_sharded(model):
        raise ConfigError(
            "strategy",
            "fsdp",
            f"shards only the model, and {owner} also holds `{next(iter(found))}`",
            "set `strategy: ddp`, or make it a part of the model",
        )
    return found


def _tensors_of(model: nn.Module) -> set[Tensor]:
    return {*model.parameters(), *model.buffers()}


def left_beside(
    task: Any, model: nn.Module, kept: Iterable[str]
) -> dict[str, Tensor]:
    """Return, by name, a task's tensors that are neither the model's nor in `kept`."""
    own = _tensors_of(model)
    left = {}
    for name, tensor in _all_tensors(task).items():
        if tensor not in own and name not in kept:
            left[name] = tensor
    return left


def sums_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the sums of floating tensors by name, to detect later changes."""
    sums = {}
    for name, tensor in tensors.items():
        if (
            tensor.is_floating_point()
            and not tensor.is_meta
            and not is_lazy(tensor)
        ):
            total = float(tensor.detach().sum(dtype=torch.float64))
            sums[name] = str(total)  # as text, NaN equals itself
    return sums


def place(
    tensors: Iterable[Tensor], device: torch.device, dtype: torch.dtype | None
) -> None:
    """Move tensors to a device, in place; cast floating ones to `dtype`, if given."""
    for tensor in tensors:
        wanted = dtype if tensor.is_floating_point() else None
        tensor.data = tensor.data.to(device, wanted)


def _all_tensors(task: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in vars(task).items():
        found |= _tensors(value, name)
    return found


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, nn.Module):
        for inner, tensor in value.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor):
                yield f"{name}.{inner}", tensor
    elif isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple, dict)):
        for key, item in parts_of(value) or ():
            if isinstance(item, (nn.Module, Tensor)):
                yield from _tensors(item, f"{name}.{key}")


def find_beside(task: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the task's tensors with these names.

    Raises CheckpointError if one is missing.
    """
    there = _all_tensors(task)
    missing = sorted(names - there.keys())
    if missing:
        raise CheckpointError(
            f"it does not fit this task, which has no `{missing[0]}`"
        )
    return {name: there[name] for name in names}


@torch.no_grad()
def load_beside(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Load saved tensors in place; CheckpointError if names or shapes differ.

    Tensors that are no parameters take the saved shape.
    """
    for name in tensors.keys() & saved.keys():
        if type(tensors[name]) is Tensor and not tensors[name].requires_grad:
            tensors[name].resize_(saved[name].shape)
    if shapes_of(saved) != shapes_of(tensors):
        raise CheckpointError(
            "it does not fit this task: the tensors trained outside the model differ in name or shape"
        )
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])


class AsMade:
    """Records a new model: frozen parameters, modules' modes and tensors' shapes."""

    def __init__(self, model: nn.Module) -> None:
        self._required, self._training = _switches(model)
        self._shapes = shapes_of(model.state_dict())
        self._parameters = set(model.parameters())

    def changes(self, model: nn.Module) -> dict[str, Any]:
        """Return what differs from the new model, as plain data; empty if nothing."""
        required, training = _switches(model)
        shapes = shapes_of(model.state_dict())
        buffers = [
            name
            for name, shape in shapes.items()
            if name not in required and self._shapes.get(name) != shape
        ]
        found = {
            "requires_grad": _others(required, self._required),
            "training": _others(training, self._training),
            "buffers": buffers,
        }
        return {name: changed for name, changed in found.items() if changed}

    def late_parameters(self, model: nn.Module) -> list[str]:
        """Name trainable parameters that were added to the new model or replaced."""
        return [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter not in self._parameters
        ]


def _others(now: dict[str, bool], before: dict[str, bool]) -> dict[str, bool]:
    """Return the values that differ from before, ignoring names that are new."""
    return {name: on for name, on in now.items() if on != before.get(name, on)}


def shapes_of(tensors: Any) -> dict[str, Any]:
    """Return the shapes of named tensors; None for other values."""
    named = tensors.items() if isinstance(tensors, dict) else ()
    return {name: getattr(tensor, "shape", None) for name, tensor in named}


def _switches(model: nn.Module) -> tuple[dict[str, bool], dict[str, bool]]:
    parameters = model.named_parameters(remove_duplicate=False)
    required = {
        name: parameter.requires_grad for name, parameter in parameters
    }
    return required, {
        name: module.training for name, module in model.named_modules()
    }


def apply_changes(model: nn.Module, changes: Mapping[str, Any]) -> None:
    """Freeze or unfreeze parameters and switch modes as `changes` says."""
    for name, required in changes.get("requires_grad", {}).items():
        model.get_parameter(name).requires_grad_(bool(required))
    for name, training in changes.get("training", {}).items():
        model.get_submodule(name).training = bool(training)


def add_buffers(
    model: nn.Module, changes: Mapping[str, Any], saved: Mapping[str, Any]
) -> None:
    """Register the saved buffers that forward passes had created or reshaped."""
    tensors = (*model.parameters(), *model.buffers())
    device = next((tensor.device for tensor in tensors), None)
    for name in changes.get("buffers", []):
        owner, _, inner = name.rpartition(".")
        value = saved[name]
        if isinstance(value, Tensor):
            module = model.get_submodule(owner)
            # `self.mean = None` until the first forward.
            vars(module).pop(inner, None)
            module.register_buffer(inner, value.to(device, copy=True))


def train_as_made(model: nn.Module) -> None:
    """Put a model into training mode, except modules created in evaluation mode.

    If the whole model is in evaluation mode (as `from_pretrained` returns it),
    all of it is put into training mode.
    """
    kept = []
    if model.training:
        kept = [module for module in model.modules() if not module.training]
    model.train()
    for module in kept:
        module.training = False
