"""What a model and its task have to keep beside the values of the model's tensors.

Which parameters are frozen, how modules and buffers have changed since the task's
model() made them, and what the task trains beside the model: a checkpoint keeps these,
and a resumed run makes the model anew.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainers.data.batch import parts_of
from trainers.errors import CheckpointError, ConfigError
from trainers.model.sharding import is_sharded


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def frozen_digests(model: nn.Module) -> dict[str, str]:
    """Return by name a SHA-256 of each parameter that needs no gradient.

    A checkpoint with `checkpoint.parameters: trained` has these in their place. `model`
    is as the task makes it, on the CPU, so that digests depend on neither
    precision nor strategy.
    """
    digests = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            digests[name] = _digest(parameter)
    return digests


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    plain = tensor.detach().cpu().contiguous().flatten()
    digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_frozen(saved: Any, now: Mapping[str, str] | None) -> None:
    """Raise CheckpointError unless a checkpoint left out these very parameters.

    None: it, or this run, has them all.
    """
    if not isinstance(saved, dict) or now is None:
        if saved is not now:
            raise CheckpointError(
                "it was written with another `checkpoint.parameters` than this run has"
            )
        return
    for name in sorted(map(str, saved.keys() | now.keys())):
        if saved.get(name) != now.get(name):
            raise CheckpointError(
                f"it was trained on another base: the frozen `{name}` is not what it was"
            )


def load_model(
    model: nn.Module, saved: Mapping[str, Any], frozen: Mapping[str, str] | None
) -> None:
    """Load a model's state; `frozen` parameters, which it lacks, stay the model's own."""
    missing, unexpected = model.load_state_dict(saved, strict=not frozen)
    wrong = sorted({*missing, *unexpected} - (frozen or {}).keys())
    if wrong:
        raise CheckpointError(f"it does not fit this model: {', '.join(wrong[:4])}")


def modules_beside(task: Any, model: nn.Module) -> list[nn.Module]:
    """Return the task's modules with parameters to train that are not the model's."""
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
    """Return by name what the optimizer holds beside the model, such as a loss's own.

    With it comes what else is in the same attributes of the task. All of it is the
    model's equal: on its device, alike on all ranks, averaged over them, kept in
    checkpoints.

    Raises ConfigError for what no checkpoint would find again.
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
            f"a parameter of {list(lost.pop().shape)}",
            "is neither the model's nor in an attribute of the task, and no checkpoint would have it",
            "keep it, or its module, as an attribute of the task",
        )
    if is_sharded(model):
        raise ConfigError(
            "strategy",
            "fsdp",
            f"shards the model alone, and {owner} holds `{next(iter(found))}`, too",
            "set `strategy: ddp`, or make it a part of the model",
        )
    return found


def _tensors_of(model: nn.Module) -> set[Tensor]:
    return {*model.parameters(), *model.buffers()}


def left_beside(task: Any, model: nn.Module, kept: Iterable[str]) -> dict[str, Tensor]:
    """Return by name the tensors of a task that are neither the model's nor `kept`."""
    own = _tensors_of(model)
    left = {}
    for name, tensor in _all_tensors(task).items():
        if tensor not in own and name not in kept:
            left[name] = tensor
    return left


def sums_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return by name the sums of floating tensors, which tell whether one has changed."""
    sums = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.is_meta and not is_lazy(tensor):
            total = float(tensor.detach().sum(dtype=torch.float64))
            sums[name] = str(total)  # as words NaN is equal to itself
    return sums


def place(
    tensors: Iterable[Tensor], device: torch.device, dtype: torch.dtype | None
) -> None:
    """Move tensors to a device, in place; floating ones also to a format, if given."""
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
    """Return the task's tensors of these names.

    Raises CheckpointError where one is missing.
    """
    there = _all_tensors(task)
    missing = sorted(names - there.keys())
    if missing:
        raise CheckpointError(f"it does not fit this task, which has no `{missing[0]}`")
    return {name: there[name] for name in names}


@torch.no_grad()
def load_beside(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Take back what a checkpoint has; CheckpointError where it has other tensors."""
    shapes = {name: one.shape for name, one in tensors.items()}
    if {name: one.shape for name, one in saved.items()} != shapes:
        raise CheckpointError(
            "it does not fit this task: what is trained beside the model has other names or shapes"
        )
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])


class AsMade:
    """A model as it was made: what is frozen, modes of modules, and which tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._required, self._training = _switches(model)
        self._shapes = _shapes(model)
        self._parameters = set(model.parameters())

    def changes(self, model: nn.Module) -> dict[str, Any]:
        """Return what is otherwise now, as plain data; nothing where all is as it was."""
        required, training = _switches(model)
        buffers = []
        for name, shape in _shapes(model).items():
            if name not in required and self._shapes.get(name) != shape:
                buffers.append(name)
        found = {
            "requires_grad": _others(required, self._required),
            "training": _others(training, self._training),
            "buffers": buffers,
        }
        return {name: changed for name, changed in found.items() if changed}

    def late_parameters(self, model: nn.Module) -> list[str]:
        """Name the parameters that the model was made without, or that were exchanged."""
        late = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter not in self._parameters:
                late.append(name)
        return late


def _others(now: dict[str, bool], before: dict[str, bool]) -> dict[str, bool]:
    """Return what is otherwise than before, but for what was not there."""
    found = {}
    for name, on in now.items():
        if on != before.get(name, on):
            found[name] = on
    return found


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    shapes = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            shapes[name] = value.shape
    return shapes


def _switches(model: nn.Module) -> tuple[dict[str, bool], dict[str, bool]]:
    parameters = model.named_parameters(remove_duplicate=False)
    required = {name: parameter.requires_grad for name, parameter in parameters}
    return required, {name: module.training for name, module in model.named_modules()}


def apply_changes(model: nn.Module, changes: Mapping[str, Any]) -> None:
    """Freeze, unfreeze and switch as `changes` says."""
    for name, required in changes.get("requires_grad", {}).items():
        model.get_parameter(name).requires_grad_(bool(required))
    for name, training in changes.get("training", {}).items():
        model.get_submodule(name).training = bool(training)


def add_buffers(
    model: nn.Module, changes: Mapping[str, Any], saved: Mapping[str, Any]
) -> None:
    """Register the buffers that forward passes had made, or given another shape."""
    tensors = (*model.parameters(), *model.buffers())
    device = next((tensor.device for tensor in tensors), None)
    for name in changes.get("buffers", []):
        owner, _, inner = name.rpartition(".")
        value = saved[name]
        if isinstance(value, Tensor):
            module = model.get_submodule(owner)
            vars(module).pop(inner, None)  # `self.mean = None` until the first forward
            module.register_buffer(inner, value.to(device, copy=True))


def train_as_made(model: nn.Module) -> list[str]:
    """Put a model into training mode but for what its maker put into evaluation mode.

    Returns the names of those modules, without what is in them.

    A model that is in evaluation mode as a whole (as `from_pretrained` gives one) is
    trained as a whole.
    """
    kept: dict[str, nn.Module] = {}
    if model.training:
        for name, module in model.named_modules():
            if not module.training:
                kept[name] = module
    model.train()
    for module in kept.values():
        module.training = False
    return [name for name in kept if name.rpartition(".")[0] not in kept]
