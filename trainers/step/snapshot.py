"""Run throw-away passes, and restore every object they may have changed."""

import contextlib
import copy
import functools
import logging
import operator
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
from trainers.step.forward import ForwardPass, bare_of
from trainers.task import Task

logger = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 20
"""The largest tensor or array that is copied without being passed to `keep`."""
_TOTAL_BYTES = 1 << 24
"""The most bytes that all of these copies may take."""
_MANY = 1000  # items: what is in a longer list or dict is data, not state
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
_OURS = ("trainers", "tune", "cluster")
_STATEFUL = (Task, nn.Module, Optimizer, LRScheduler, Dataset)
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    np.generic,
    torch.dtype,
    torch.device,
    torch.Size,
)
_DEFINED = (
    ModuleType,
    FunctionType,
    type,
)  # what an import or a definition leaves in a module
_GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
)


_Held = tuple[str, Callable[[], dict[Any, Any]], dict[Any, Any]]
"""A name, what reads its items now, and what they were."""


class Snapshot:
    """Records the state of all objects reachable from some roots, to restore it later.

    It records attributes (including those of classes, closures and globals in the
    user's own modules), containers, random generators, the tensors given to `keep`, and
    all small tensors, copied to host memory. A larger tensor is only watched: a warning
    names it if it was changed. Library objects are skipped, except modules, optimizers,
    schedulers and datasets. Sharded modules are skipped too: they move their parameters
    themselves.

    `restore` puts changed values back in place.
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
        self._held: list[_Held] = []
        self._held_beside: list[_Held] = []  # data, generators, metrics and schedulers
        self._seen: dict[int, Any] = {}  # holds them, so that no number comes twice
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
        """Put everything back, to the bit."""
        with torch.no_grad():
            for undo in self._undo:
                undo()
        for tensor, version, name in self._watched.values():
            if tensor._version != version:
                logger.warning(
                    "%s was changed by a pass that is thrown away, and is too large to be put back: %s",
                    name,
                    "return it from the task's state_dict()",
                )

    def changed(self) -> str | None:
        """Name what now refers to another object or has other numbers, or return None.

        Tensors of the device that were changed in place do not count.
        """
        return _first_change([*self._held, *self._held_beside])

    def changed_for_step(self) -> str | None:
        """As `changed`, but leave out random generators, data, metrics and schedulers.

        They change between steps, which read batches and learning rates alone.
        """
        return _first_change(self._held)

    def forget_copies(self) -> None:
        """Free what `restore` needs, and keep what `changed` needs."""
        self._undo.clear()
        self._watched.clear()

    def _hold(
        self, name: str, read: Callable[[], dict[Any, Any]], beside: bool = False
    ) -> dict[Any, Any]:
        """Return what `read` gives now, and remember it for `changed`."""
        before = read()
        is_beside = beside or self._is_beside
        (self._held_beside if is_beside else self._held).append((name, read, before))
        return before

    def _hold_items(
        self, container: Any, name: str, beside: bool = False
    ) -> dict[Any, Any]:
        """Register a container's items to be put back if they change; return them."""
        before = self._hold(name, functools.partial(_items, container), beside)
        self._undo.append(functools.partial(_refill, container, before))
        return before

    def _take(self, value: Any, name: str) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
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
            self._undo.append(functools.partial(np.copyto, array, array.copy()))
            self._hold(name, lambda: {"": array.tobytes()})

    def _take_container(self, container: Any, name: str) -> None:
        is_data = len(container) > _MANY
        items = self._hold_items(container, name, beside=is_data)
        if not is_data:
            self._descend(items.items(), name)

    def _take_items(self, items: Any, name: str) -> None:
        self._descend(enumerate(items), name)

    def _take_generator(self, generator: Any, name: str) -> None:
        self._undo.append(_generator_undo(generator))
        read = functools.partial(_digest, generator)
        self._hold(name, read, beside=True)

    def _take_partial(self, call: Any, name: str) -> None:
        self._descend(enumerate((call.func, call.args, call.keywords)), name)

    def _take_method(self, method: Any, name: str) -> None:
        self._descend([("", method.__self__), ("", method.__func__)], name)

    def _descend(self, items: Iterable[tuple[Any, Any]], name: str) -> None:
        """Queue the items; only text and integer keys become part of their names.

        Other keys could make names very long.
        """
        for key, item in items:
            if isinstance(item, _PLAIN):
                continue
            is_named = key != "" and isinstance(key, str | int)
            path = f"{name}.{key}" if is_named else name
            self._left.append((item, path, self._is_beside))

    def _take_tensor(self, tensor: Tensor, name: str) -> None:
        has_no_numbers = tensor.is_meta or nn.parameter.is_lazy(tensor)
        is_dense = tensor.layout is torch.strided and not tensor.is_inference()
        if has_no_numbers or not is_dense:
            return
        overlaps = torch._debug_has_internal_overlap(tensor) == 1
        is_whole = type(tensor) in (Tensor, nn.Parameter) and not overlaps
        if tensor.device.type != self._device.type:
            self._hold(name, lambda: {"": tensor._version})
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

    def _take_function(self, function: FunctionType, name: str) -> None:
        if not self._is_users(function.__module__):
            return
        self._descend([("", function.__dict__), ("", function.__defaults__)], name)
        for cell in function.__closure__ or ():
            self._take_cell(cell, name)

    def _take_cell(self, cell: CellType, name: str) -> None:
        """Record a variable of an enclosing function."""
        try:
            content = cell.cell_contents
        except ValueError:  # it has no value yet
            return
        self._undo.append(functools.partial(setattr, cell, "cell_contents", content))
        self._hold(name, lambda: {"": cell.cell_contents})
        self._descend([("", content)], name)

    def _take_object(self, value: Any, name: str) -> None:
        if hasattr(value, "__dict__"):
            self._seen[id(vars(value))] = vars(value)
            is_metric = "_reductions" in vars(value)  # torchmetrics'
            self._is_beside |= is_metric or isinstance(value, (Dataset, LRScheduler))
            self._descend(self._hold_items(vars(value), name).items(), name)
        if isinstance(value, Optimizer):  # however many parameters it has
            self._descend(enumerate(value.state.values()), name)
        self._is_beside = False  # a class is everybody's
        for owner in type(value).__mro__:
            self._take_slots(value, owner, name)
            self._take(owner, owner.__name__)

    def _take_slots(self, value: Any, owner: type, name: str) -> None:
        """Record what an object keeps in the `__slots__` of one of its classes."""
        names = vars(owner).get("__slots__", ())
        for slot in [names] if isinstance(names, str) else names:
            if not slot.startswith("__") and hasattr(value, slot):
                content = getattr(value, slot)
                self._hold(name, functools.partial(_slot, value, slot))
                put_back = functools.partial(object.__setattr__, value, slot, content)
                self._undo.append(put_back)
                self._descend([(slot, content)], name)

    def _take_class(self, owner: type, name: str) -> None:
        """Record the attributes of a user's class, and the globals of its module."""
        if not self._is_users(owner.__module__):
            return
        module = sys.modules[owner.__module__]
        self._take_names(owner, owner.__name__)
        if id(module) not in self._seen:
            self._seen[id(module)] = module
            self._take_names(module, module.__name__)

    def _take_names(self, owner: type | ModuleType, name: str) -> None:
        before = self._hold(name, functools.partial(_names, owner))
        self._undo.append(functools.partial(_restore_names, owner, before))
        self._descend(before.items(), name)

    def _is_users(self, module: str | None) -> bool:
        """Whether a module is the user's own code.

        It is if it belongs to the task's package, or to no installed package.
        """
        package = (module or "").partition(".")[0]
        file = getattr(sys.modules.get(module or ""), "__file__", None)
        if not file or package in _OURS:
            return False
        return package == self._package or not any(part in file for part in _LIBRARIES)


_KINDS: list[tuple[Any, Callable[[Snapshot, Any, str], None]]] = [
    (Tensor, Snapshot._take_tensor),
    (np.ndarray, Snapshot._take_array),
    ((dict, list, set, deque), Snapshot._take_container),
    ((tuple, frozenset), Snapshot._take_items),
    (_GENERATORS, Snapshot._take_generator),
    (functools.partial, Snapshot._take_partial),
    (MethodType, Snapshot._take_method),
    (FunctionType, Snapshot._take_function),
    (type, Snapshot._take_class),
]
"""How each kind of object is recorded."""


def _items(container: Any) -> dict[Any, Any]:
    """Return the items of a dict, list, set or deque without a subclass's methods."""
    if isinstance(container, dict):
        return dict.copy(container)
    if isinstance(container, set):
        return {member: member for member in container}
    return dict(enumerate(container))


def _refill(container: Any, before: dict[Any, Any]) -> None:
    """Restore the items of a dict, list, set or deque without a subclass's methods."""
    if _is_same(_items(container), before):
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


def _first_change(held: Iterable[_Held]) -> str | None:
    for name, read, before in held:
        now = read()
        if _is_same(now, before):
            continue
        for key in before.keys() | now.keys():
            old = before.get(key)
            new = now.get(key)
            is_plain = isinstance(old, _PLAIN) and isinstance(new, _PLAIN)
            if old is not new and not (is_plain and old == new):
                is_named = key != "" and isinstance(key, str | int)
                path = f"{name}.{key}" if is_named else name
                return path.replace("._modules.", ".")
    return None


def _is_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether the same items are there in the same order, as they mostly are."""
    if not now and not before:  # as most dicts of a module's hooks
        return True
    is_alike = list(now) == list(before)
    return is_alike and all(map(operator.is_, now.values(), before.values()))


def _slot(value: Any, slot: str) -> dict[Any, Any]:
    return {slot: getattr(value, slot, None)}


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _digest(generator: Any) -> dict[Any, Any]:
    return {"": digest(_generator_state(generator))}


def _generator_undo(generator: Any) -> Callable[[], None]:
    state = _generator_state(generator)
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, state)
    if isinstance(generator, np.random.Generator):
        return functools.partial(setattr, generator.bit_generator, "state", state)
    return functools.partial(generator.set_state, state)


class CollectiveWatch(TorchDispatchMode):
    """Notes whether anything inside sends tensors to other ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run every operation as it is."""
        self.seen |= func.namespace in (
            "c10d",
            "_c10d_functional",
            "_c10d_functional_autograd",
        )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def throwaway(
    forward: ForwardPass, optimizer: Optimizer | None = None, dataset: Any = None
) -> Iterator[Snapshot]:
    """Restore model, task, dataset and random state exactly at the end of the block.

    Gradients are dropped. With `optimizer`, its state and all parameters are restored
    too, so its steps may be taken inside. Copies are kept in host memory; call `keep`
    of the yielded snapshot to add tensors.

    If the model is bare and not sharded, each rank answers collectives by itself, so it
    may fail or run alone without leaving other ranks waiting.
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
        task.load_state_dict(task_state)  # what only the task itself can put back
        snapshot.restore()
        set_rng_state(random_state, device)
