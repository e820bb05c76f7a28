"""The state of a lane's process: restored after each trial, and checked to be as before the first.

A Baseline is taken before the first trial. `restore` undoes what can be undone and returns what cannot (a thread that
still runs and is not known to be harmless, a replaced module, memory above the floor): then the process must not be
used again. Modules beside the task are forgotten, so that each trial imports them anew; what installed packages keep
in their globals is put back (module_state.py), and so is what has a value for the whole process (settings.py), also
what a run sets itself (seeds, threads, precision), since a task's module and its constructor run before that.
"""

import contextlib
import gc
import itertools
import multiprocessing
import operator
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it
import torch.distributed as dist

from trainers.devices.rng import get_rng_state, set_rng_state
from trainers.step.cuda_graphs import capture_failed
from tune.lanes.leftovers import Children, Files, Memory, Threads
from tune.lanes.module_state import ModuleState, is_of_users
from tune.lanes.settings import Settings
from tune.lanes.watched_code import WatchedCode


class Baseline:
    """The state of a process before its first trial; every rank of a lane has its own."""

    def __init__(self, device: torch.device, path: Sequence[str] | None) -> None:
        """`path`: see `follow`."""
        self._device = device
        self.follow(path)
        self._modules = dict(sys.modules)
        self._state = ModuleState()
        self._settings = Settings()
        self._code = WatchedCode()
        self._start_method = multiprocessing.get_start_method(allow_none=True)
        self._random = get_rng_state(device)
        self._threads, self._children, self._files = Threads(), Children(), Files(device)
        self._group = dist.group.WORLD if dist.is_initialized() else None
        self._groups = set(_groups())
        gc.collect()
        gc.freeze()  # what is there stays: later collections look only at what trials make
        self._num_frozen = len(sys.modules)
        self._memory = Memory(device)
        self._state.others += [self._settings, self._code, self._memory]

    def follow(self, path: Sequence[str] | None) -> None:
        """Set the directories of the task, whose modules are imported anew by each trial; None: all modules that are
        not installed are, wherever they lie.
        """
        self._path = None if path is None else tuple(f"{Path(directory)}{os.sep}" for directory in path)

    def close(self) -> None:
        """Record no more imports: for a process that goes on to do other things."""
        self._state.close()

    def restore(self) -> list[str]:
        """Restore everything; returns what could not be, in words."""
        try:
            return self._restore()
        except Exception as error:
            return [f"what cannot even be put back: {type(error).__name__}: {error!s:.120}"]

    def _restore(self) -> list[str]:
        left = self._restore_modules()
        left += self._children.restore()
        self._destroy_groups()
        torch._dynamo.reset()
        left += self._state.restore()
        left += self._code.restore()
        gc.collect()
        changed = self._settings.restore()  # after the last words of what was collected
        torch.set_flush_denormal(False)
        multiprocessing.set_start_method(self._start_method, force=True)  # whoever asks for it sets the default
        if changed:
            gc.collect()  # what the hooks of a trial held
        set_rng_state(self._random, self._device)
        objects = gc.get_objects()
        left += self._files.restore(objects, lambda: self._threads.write_files() or self._children.has_harmless())
        has_imported = len(sys.modules) != self._num_frozen
        left += self._memory.held(objects, has_imported)
        del objects
        if has_imported:
            gc.freeze()
            self._num_frozen = len(sys.modules)
        return [*left, *self._remains(changed)]

    def _remains(self, changed: Sequence[int] = ()) -> Iterator[str]:
        """What is still not as it was; `changed`: the settings that were put back."""
        yield from self._settings.remains(changed)
        if (dist.group.WORLD if dist.is_initialized() else None) is not self._group:
            yield "the process group is another"
        if capture_failed():
            yield "a capture of CUDA graphs that failed, and what torch has not put back after it"
        if leaked := self._threads.leaked():
            yield f"still running: thread {', '.join(leaked)}"

    def _destroy_groups(self) -> None:
        """Leave the process groups that were made since."""
        if not dist.is_available() or not (new := [group for group in _groups() if group not in self._groups]):
            return
        for group in [None] if self._group is None else new:  # None: all there are
            with contextlib.suppress(Exception):  # `_remains` tells of the default group
                dist.destroy_process_group(group)

    def _restore_modules(self) -> list[str]:
        """Forget the task's modules; returns those replaced: they are restored, but others may refer to the new."""
        now = sys.modules
        replaced = []
        if not all(map(operator.is_, map(now.get, self._modules), self._modules.values())):
            replaced = [name for name, module in self._modules.items() if now.get(name) is not module]
        for name in [name for name in replaced if name in self._state.executed and name in now]:
            replaced.remove(name)  # imported again, as transformers does to itself
            self._modules[name] = now[name]
        for name in replaced:
            now[name] = self._modules[name]
        new = itertools.islice(
            (name for name in reversed(now) if name not in self._modules), len(now) - len(self._modules)
        )
        for name in list(new):  # the newest are the last: the search ends with them
            module = now[name]
            if not is_of_users(module, self._path):
                self._modules[name] = module
                continue
            del now[name]
            parent, _, leaf = name.rpartition(".")
            namespace = vars(now[parent]) if parent in now else {}
            if namespace.get(leaf) is module:  # `from package import module` would still find it
                del namespace[leaf]
        return [f"the module {name} was replaced" for name in replaced]


def _groups() -> list[Any]:
    return list(dist.distributed_c10d._world.pg_map) if dist.is_available() else []
