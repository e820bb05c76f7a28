"""Run throw-away passes, and restore every object they may have changed."""

import contextlib
import copy
import copyreg
import functools
import logging
import random
import sys
import sysconfig
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

from trainers.data.batch import tensors_of
from trainers.data.stream import digest
from trainers.devices.device import get_rng_state, set_rng_state
from trainers.devices.group import answered_locally
from trainers.model.sharding import is_sharded, local
from trainers.model.state import parameters_of
from trainers.step._changes import PLAIN, Changes, Read, is_same, path_of
from trainers.step.forward import ForwardPass, bare_of
from trainers.task import Task

logger = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 20
"""The largest tensor or array that is copied without being passed to `keep`."""
_TOTAL_BYTES = 1 << 24
"""The most bytes that all copies of small tensors and arrays may take together."""
_MANY = 1000  # items: a longer list or dict holds data, not state
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
_OURS = ("trainers", "tune", "cluster")
_STATEFUL = (Task, nn.Module, Optimizer, LRScheduler, Dataset)
# What an import or a definition leaves in a module.
_DEFINED = (
    ModuleType,
    FunctionType,
    type,
)
_CONTAINERS = (dict, list, set, deque)
_GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
)


class Snapshot:
    """Records the state of all objects reachable from some roots, to restore it later.

    It records the attributes of objects and of the user's classes, variables of
    closures, globals of the user's modules, containers, random generators, the
    tensors given to `keep`, and small tensors. Tensors are copied to host
    memory. A larger tensor is only watched: a warning names it if it was
    changed. Library objects are skipped, except modules, optimizers,
    schedulers and datasets. Sharded modules are skipped too: they move their
    parameters themselves.
    """

    def __init__(
        self,
        task: Task,
        others: Mapping[str, Any],
        device: torch.device,
        kept: Iterable[Tensor] = (),
    ) -> None:
        self._device = device
        self._undo: list[Callable[[], None]] = []
        self.changes = Changes()
        """What has changed since the snapshot was made; it outlives the copies."""
        self._seen: dict[
            int, Any
        ] = {}  # keeps them alive, so that no id is reused
        self._watched: dict[int, tuple[Tensor, int, str]] = {}
        self._copied_bytes = 0
        self._package = type(task).__module__.partition(".")[0]
        for tensor in kept:
            self.keep(tensor)
        self._is_beside = False
        self._left = [
            *((value, name, False) for name, value in others.items()),
            (task, type(task).__name__, False),
        ]
        while self._left:
            value, name, self._is_beside = self._left.pop()
            self._take(value, name)

    def keep(self, tensor: Tensor) -> None:
        """Copy a tensor, whatever its size, so that `restore` puts its values back."""
        self._seen[id(tensor)] = tensor
        self._watched.pop(id(tensor), None)
        mine = local(tensor)
        copied = mine.to("cpu", copy=True)
        required = tensor.requires_grad

        def undo() -> None:
            mine.copy_(copied)
            if tensor.requires_grad is not required and tensor.is_leaf:
                tensor.requires_grad_(required)

        self._undo.append(undo)

    def restore(self) -> None:
        """Put everything back in place, bit for bit."""
        with torch.no_grad():
            for undo in self._undo:
                undo()
        for tensor, version, name in self._watched.values():
            if tensor._version != version:
                logger.warning(
                    "%s was changed by a throw-away pass, and is too large to be restored: %s",
                    name,
                    "return it from the task's state_dict()",
                )

    def _record(
        self,
        owner: Any,
        name: str,
        read: Read,
        put_back: Callable[[Any, dict[Any, Any]], None],
    ) -> None:
        """Register the items that `read` returns now, and everything in them."""
        is_data = isinstance(owner, _CONTAINERS) and len(owner) > _MANY
        before = self.changes.hold(
            name, owner, read, self._is_beside or is_data
        )
        self._undo.append(functools.partial(put_back, owner, before))
        if not is_data:
            self._descend(before.items(), name)

    def _take(self, value: Any, name: str) -> None:
        if isinstance(value, PLAIN) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        for kinds, take in _KINDS:
            if isinstance(value, kinds):
                take(self, value, name)
                return
        is_stateful = isinstance(value, _STATEFUL)
        is_users = is_stateful or self._is_users(type(value).__module__)
        if is_users and not is_sharded(value):
            self._take_object(value, name)

    def _take_array(self, array: Any, name: str) -> None:
        is_plain = array.dtype != object and array.flags.writeable
        if is_plain and self._affordable(array.nbytes):
            self._undo.append(
                functools.partial(np.copyto, array, array.copy())
            )
            self.changes.hold(name, array, _bytes, self._is_beside)

    def _take_container(self, container: Any, name: str) -> None:
        self._record(container, name, _items, _refill)

    def _take_cell(self, cell: CellType, name: str) -> None:
        """Record a variable of an enclosing function."""
        self._record(cell, name, _content, _set_content)

    def _take_generator(self, generator: Any, name: str) -> None:
        get_state, set_state = _state_of(generator)
        self._undo.append(functools.partial(set_state, get_state()))
        self.changes.hold(name, get_state, _digest, beside=True)

    def _take_items(self, items: Any, name: str) -> None:
        self._descend(enumerate(items), name)

    def _take_call(self, call: Any, name: str) -> None:
        """Record what a partial, a method or a user's function refers to."""
        if isinstance(call, functools.partial):
            self._descend(
                enumerate((call.func, call.args, call.keywords)), name
            )
        elif isinstance(call, MethodType):
            self._descend([("", call.__self__), ("", call.__func__)], name)
        elif self._is_users(call.__module__):
            held = (
                call.__dict__,
                call.__defaults__,
                *(call.__closure__ or ()),
            )
            self._descend((("", part) for part in held), name)

    def _descend(self, items: Iterable[tuple[Any, Any]], name: str) -> None:
        """Queue all items that are not plain values."""
        for key, item in items:
            if not isinstance(item, PLAIN):
                self._left.append((item, path_of(name, key), self._is_beside))

    def _take_tensor(self, tensor: Tensor, name: str) -> None:
        has_no_numbers = tensor.is_meta or nn.parameter.is_lazy(tensor)
        is_dense = tensor.layout is torch.strided and not tensor.is_inference()
        if has_no_numbers or not is_dense:
            return
        overlaps = torch._debug_has_internal_overlap(tensor) == 1
        is_whole = type(tensor) in (Tensor, nn.Parameter) and not overlaps
        if tensor.device.type != self._device.type:
            self.changes.hold(name, tensor, _version, self._is_beside)
        if is_whole and self._affordable(tensor.nbytes):
            self.keep(tensor)
        else:
            self._watched[id(tensor)] = (tensor, tensor._version, name)

    def _affordable(self, size_bytes: int) -> bool:
        total_bytes = self._copied_bytes + size_bytes
        if size_bytes > _SMALL_BYTES or total_bytes > _TOTAL_BYTES:
            return False
        self._copied_bytes = total_bytes
        return True

    def _take_object(self, value: Any, name: str) -> None:
        if hasattr(value, "__dict__"):
            self._seen[id(vars(value))] = vars(value)
            is_metric = "_reductions" in vars(value)  # torchmetrics'
            self._is_beside |= is_metric or isinstance(
                value, (Dataset, LRScheduler)
            )
            self._take_container(vars(value), name)
        self._record(value, name, _slots, _set_slots)
        if isinstance(value, Optimizer):  # however many parameters it has
            self._descend(enumerate(value.state.values()), name)
        self._is_beside = False  # other objects share the class
        for owner in type(value).__mro__:
            self._take(owner, owner.__name__)

    def _take_class(self, owner: type, name: str) -> None:
        """Record the attributes of a user's class, and the globals of its module."""
        if not self._is_users(owner.__module__):
            return
        module = sys.modules[owner.__module__]
        self._record(owner, name, _names, _restore_names)
        if id(module) not in self._seen:
            self._seen[id(module)] = module
            self._record(module, module.__name__, _names, _restore_names)

    def _is_users(self, module: str | None) -> bool:
        """Whether a module is the user's own code.

        That is so if the module belongs to the task's package, or to neither
        an installed package nor Paceline.
        """
        package = (module or "").partition(".")[0]
        file = getattr(sys.modules.get(module or ""), "__file__", None)
        if not file or package in _OURS:
            return False
        return package == self._package or not any(
            part in file for part in _LIBRARIES
        )


_KINDS: list[tuple[Any, Callable[[Snapshot, Any, str], None]]] = [
    (Tensor, Snapshot._take_tensor),
    (np.ndarray, Snapshot._take_array),
    (_CONTAINERS, Snapshot._take_container),
    ((tuple, frozenset), Snapshot._take_items),
    (CellType, Snapshot._take_cell),
    (_GENERATORS, Snapshot._take_generator),
    ((functools.partial, MethodType, FunctionType), Snapshot._take_call),
    (type, Snapshot._take_class),
]
"""How each kind of object is recorded."""


def _items(container: Any) -> dict[Any, Any]:
    """Return the items of a dict (not by a subclass's method), list, set or deque."""
    if isinstance(container, dict):
        return dict.copy(container)
    if isinstance(container, set):
        return {member: member for member in container}
    return dict(enumerate(container))


def _refill(container: Any, before: dict[Any, Any]) -> None:
    """Restore the items that `_items` returned, by the methods of the base class."""
    if is_same(_items(container), before):
        return
    kinds = (OrderedDict, dict, set, list, deque)
    base: Any = next(kind for kind in kinds if isinstance(container, kind))
    base.clear(container)
    if issubclass(base, dict):
        for key, item in before.items():
            base.__setitem__(container, key, item)
    elif base is set:
        set.update(container, before)
    else:
        base.extend(container, before.values())


def _names(owner: type | ModuleType) -> dict[str, Any]:
    names = [name for name in vars(owner) if not name.startswith("__")]
    return {name: vars(owner)[name] for name in names}


def _restore_names(owner: type | ModuleType, before: dict[str, Any]) -> None:
    """Restore a class's or module's names, but keep later imports and definitions."""
    now = _names(owner)
    for name in now.keys() - before.keys():
        if not isinstance(now[name], _DEFINED):
            delattr(owner, name)
    for name, value in before.items():
        if now.get(name) is not value:
            setattr(owner, name, value)


def _content(cell: CellType) -> dict[str, Any]:
    try:
        return {"": cell.cell_contents}
    except ValueError:  # it has no value yet
        return {}


def _set_content(cell: CellType, before: dict[str, Any]) -> None:
    for content in before.values():
        cell.cell_contents = content


def _version(tensor: Tensor) -> dict[str, int]:
    return {"": tensor._version}


def _digest(get_state: Callable[[], Any]) -> dict[str, str]:
    return {"": digest(get_state())}


def _bytes(array: Any) -> dict[str, bytes]:
    return {"": array.tobytes()}


def _slots(value: Any) -> dict[str, Any]:
    """Return what an object keeps in the `__slots__` of its classes."""
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    return {
        name: getattr(value, name) for name in names if hasattr(value, name)
    }


def _set_slots(value: Any, before: dict[str, Any]) -> None:
    for name, content in before.items():
        object.__setattr__(value, name, content)


def _state_of(
    generator: Any,
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return the functions that read and set a random generator's state."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, functools.partial(setattr, bits, "state")
    return generator.get_state, generator.set_state


class CollectiveWatch(TorchDispatchMode):
    """Notes whether anything in the block sends tensors to other ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation unchanged."""
        self.seen |= func.namespace in (
            "c10d",
            "_c10d_functional",
            "_c10d_functional_autograd",
        )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def throwaway(
    forward: ForwardPass,
    optimizer: Optimizer | None = None,
    dataset: Any = None,
) -> Iterator[Snapshot]:
    """Restore model, task, dataset and random state exactly at the end of the block.

    Gradients are dropped. With `optimizer`, its state and all parameters are
    restored too, so its steps may be taken inside. Copies are kept in host
    memory; call `keep` of the yielded snapshot to add tensors.

    If the model is bare and not sharded, collectives are answered locally: a
    rank that fails, or runs the block alone, leaves no other rank waiting.
    """
    task = forward.task
    device = forward.device
    model = bare_of(forward.model)
    kept = [*model.buffers()]
    if optimizer is not None:
        kept += [*parameters_of(optimizer), *model.parameters()]
        kept += tensors_of(list(optimizer.state.values()))
    random_state = get_rng_state(device)
    others = {"dataset": dataset, "optimizer": optimizer, "model": model}
    snapshot = Snapshot(task, others, device, kept)
    live = task.state_dict()
    for tensor in tensors_of(live):
        snapshot.keep(tensor)
    task_state = copy.deepcopy(live)
    answered: Any = contextlib.nullcontext()
    if model is forward.model and not is_sharded(model):
        answered = answered_locally()
    try:
        with answered:
            yield snapshot
    finally:
        model.zero_grad(set_to_none=True)
        # What only the task itself can put back.
        task.load_state_dict(task_state)
        snapshot.restore()
        set_rng_state(random_state, device)
