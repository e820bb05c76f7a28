"""The training state of a run: when it is written, and how it is restored.

A checkpoint does not depend on strategy or number of workers. Its tensors are
named as in the bare module. With a sharded model, each rank writes its rows
(trainers/checkpoint/_row_shards.py); a resumed run reads rows or whole
tensors, whichever its strategy needs.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainers.causes import classify
from trainers.checkpoint._row_shards import Cut, cut_rows
from trainers.checkpoint.manifest import Best, Figures
from trainers.checkpoint.store import Checkpoints, Loaded
from trainers.checkpoint.validation import (
    State,
    check_dtypes,
    check_state,
    loadable,
)
from trainers.config import TrainConfig
from trainers.config.model import refuse_changes
from trainers.devices.device import get_rng_state, set_rng_state
from trainers.errors import CheckpointError, ConfigError, StorageError, shorten
from trainers.measure.run_log import RunLog
from trainers.model.optimizer import optimizers_of
from trainers.model.sharding import (
    is_shard,
    is_sharded,
    place_rows,
    shard_like,
    whole,
)
from trainers.model.state import (
    add_buffers,
    apply_changes,
    check_frozen,
    left_beside,
    load_beside,
    load_model,
    sums_of,
)
from trainers.step.ceiling import OUT_OF_MEMORY
from trainers.step.train_step import Replica
from trainers.storage import Storage
from trainers.task import Task, overrides

logger = logging.getLogger(__name__)

# A temporary file unchanged for this long belongs to a killed process.
_LONG_DEAD_S = 3600.0
_HOW = ("fused", "foreach", "capturable")
"""Options that only say how an optimizer computes its step: this run's are
used, not the checkpoint's.
"""
_MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}
)
"""Moments that fused steps read by address: each must have its parameter's shape."""


class Keeper:
    """Keeps the state and the log of one worker's run on storage.

    Every rank must call every method except `due` equally often.

    `told` is called with the location of each checkpoint once it is complete,
    on every rank in the same step.
    """

    def __init__(
        self,
        storage: Storage,
        parts: Replica,
        task: Task,
        config: TrainConfig,
        log: RunLog | None,
        told: Callable[[str], None],
    ) -> None:
        self.parts = parts
        self.task = task
        self.config = config
        self.log = log
        self.told = told
        self.storage = storage
        keep = config.checkpoint
        self.checkpoints = Checkpoints(
            storage,
            parts.group,
            keep.keep,
            Best.of(keep.best, keep.best_mode),
            config.tree(),
        )
        named = dict(parts.model.named_parameters(remove_duplicate=False))
        self._frozen = {
            name: (named[name], named[name]._version)
            for name in parts.frozen or ()
        }
        self._left = self._sums_left()
        self.kept_step = -1
        self._kept_at = time.monotonic()

    def due(self) -> bool:
        """Return whether `every_s` has passed on this rank since the last checkpoint."""
        every_s = self.config.checkpoint.every_s
        return (
            every_s is not None and time.monotonic() - self._kept_at > every_s
        )

    def keep(self, position: State, figures: Figures, at_once: bool) -> None:
        """Begin a checkpoint at `position`.

        With `at_once`, or without `checkpoint.async`, also complete it.

        `figures` are those of an evaluation at this very step, if any. Raises
        StorageError.
        """
        self.settle()
        self._warn_of_left()
        step = int(position["step"])
        cut = self._cut(self._state(position))
        state = cut.rest
        rows = cut.rows or None
        random_state = get_rng_state(self.parts.device)
        self.kept_step = step
        self._kept_at = time.monotonic()
        # The log is written before the manifest: a complete checkpoint must
        # have its log.
        if self.config.checkpoint.async_ and not at_once:
            write_log = self.log.part(step) if self.log is not None else None
            self.checkpoints.start(
                step, state, random_state, figures, write_log, rows
            )
            return
        if self.log is not None:
            self.log.flush(step)
        self.told(
            self.checkpoints.save(step, state, random_state, figures, rows)
        )
        self._kept_at = time.monotonic()

    def advance(self) -> None:
        """Advance the checkpoint being written, if there is one, by one phase.

        Call this method when no rank is `busy` writing; otherwise it may have
        to wait.
        """
        where = (
            self.checkpoints.advance() if self.checkpoints.pending else None
        )
        if where is not None:
            self.told(where)

    def settle(self) -> None:
        """Wait until the checkpoint being written is complete."""
        where = self.checkpoints.finish()
        if where is not None:
            self.told(where)

    def resume(
        self, source: Storage | None, check: Callable[[State], None]
    ) -> State | None:
        """Restore the newest complete checkpoint that fits; return its position.

        Returns None if there is none.

        A run that has no checkpoint yet starts from the newest one of the run
        in `source`, if given; CheckpointError if that run has none. `check`
        raises CheckpointError for a position that this run cannot resume from.
        """

        def check_position(loaded: Loaded) -> None:
            check(loaded.state["position"])

        uses = (self._check, check_position, self._apply)
        if (loaded := self.checkpoints.load(*uses)) is not None:
            self.kept_step = int(loaded.state["position"]["step"])
        elif source is not None:
            loaded = Checkpoints(
                source, self.parts.group, self.checkpoints.keep
            ).load(*uses)
            if loaded is None:
                raise CheckpointError(
                    f"there is no complete checkpoint in {source.uri} to start from"
                )
        if self.log is not None:
            self.storage.clear_aside(idle_s=_LONG_DEAD_S)
            # Without a checkpoint, of a start that died in its first one.
            self.log.cut(max(0, self.kept_step))
        if loaded is None:
            return None
        position: State = loaded.state["position"]
        return position

    def _state(self, position: State) -> State:
        """Return the whole state, except random state.

        Raises ConfigError if it could not be loaded again.
        """
        parts = self.parts
        state = {
            "model": parts.model.state_dict(),
            "optimizer": parts.optimizer.state_dict(),
            "scaler": parts.step.scaler.state_dict(),
            "task": self.task.state_dict(),
            "position": position,
        }
        if parts.frozen is not None:
            self._require_frozen()
            state["frozen"] = parts.frozen
            for name in parts.frozen:
                state["model"].pop(name, None)
        if parts.beside:
            state["beside"] = {
                name: tensor.detach() for name, tensor in parts.beside.items()
            }
        if changed := parts.as_made.changes(parts.model):
            state["switched"] = changed
        for name, part in self._optional():
            if part is not None:
                state[name] = part.state_dict()
        plain: State = loadable(state, "checkpoint")
        return plain

    def _optional(self) -> list[tuple[str, Any]]:
        """Return the parts of the state that not every run has, by name."""
        return [("ema", self.parts.ema), ("schedule", self.parts.schedule)]

    def _cut(self, state: State) -> Cut:
        """Split the state into what rank 0 writes and this rank's rows."""
        if not is_sharded(self.parts.model):
            return Cut(state, {})
        cut = cut_rows(state, self.parts.group)
        return Cut(whole(cut.rest, self.parts.group), cut.rows)

    def _sums_left(self) -> dict[str, str]:
        """Return, on rank 0, checksums of the task's tensors that checkpoints leave out.

        Empty if the task has its own state_dict(), which may contain them.
        """
        if self.parts.group.rank != 0 or overrides(self.task, "state_dict"):
            return {}
        return sums_of(
            left_beside(self.task, self.parts.model, self.parts.names_beside)
        )

    def _warn_of_left(self) -> None:
        """Warn once if training changes tensors of the task that checkpoints leave out.

        An example is a teacher's moving average.
        """
        now = self._sums_left()
        names = []
        for name, then in self._left.items():
            if now.get(name, then) != then:
                names.append(name)
        if names:
            words = "training changes %s of the task, which checkpoints leave out: %s; return such tensors from the task's state_dict()"
            rest = "a resumed run, evaluate and predict use the initial values"
            logger.warning(words, shorten(names), rest)
            self._left = {}

    def _require_frozen(self) -> None:
        """Raise ConfigError if a parameter that checkpoints leave out has changed."""
        for name, (parameter, version) in self._frozen.items():
            if parameter.requires_grad or parameter._version != version:
                rule = f"leaves out parameters that model() froze, and `{name}` has since been unfrozen or changed"
                fix = "set `checkpoint.parameters: all`"
                raise ConfigError(
                    "checkpoint.parameters", "trained", rule, fix
                )

    def _check(self, loaded: Loaded) -> None:
        """Raise CheckpointError for a checkpoint that does not fit this run.

        Raises ConfigError if its batch sizes or its number of samples differ
        from this run's.
        """
        parts = self.parts
        config = self.config
        state = loaded.state
        position = check_state(state, loaded.name)
        state["position"] = asdict(position)
        check_frozen(state.get("frozen"), parts.frozen)
        check_dtypes(state["model"], parts.model.state_dict())
        for name, part in self._optional():
            if (part is None) != (name not in state):
                has = "no " if part is not None else ""
                raise CheckpointError(f"it has {has}{name}, unlike this run")
            if part is not None:
                part.check(state[name])
        sampler = parts.sampler
        sizes = sampler.batches.sizes if config.changes_batch else []
        then = {
            "global_batch_size": position.global_batch_size,
            "train_samples": position.train_samples,
            "batch_schedule": str(position.batch_sizes),
        }
        now = {
            "global_batch_size": config.batch_size,
            "train_samples": sampler.known_length,
            "batch_schedule": str(sizes),
        }
        fix = "train under another `name`, or start over with --fresh"
        refuse_changes(then, now, f"checkpoint {loaded.name}", fix)

    def _apply(self, loaded: Loaded) -> None:
        """Restore a loaded checkpoint.

        Raises CheckpointError if the model or the task rejects it.
        """
        try:
            self._take(loaded)
        except (CheckpointError, StorageError):
            raise
        except Exception as error:
            if classify(error) in OUT_OF_MEMORY:
                raise
            words = f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"it could not be loaded into this run ({' '.join(words.split())[:400]})"
            ) from error

    def _take(self, loaded: Loaded) -> None:
        parts = self.parts
        group = self.parts.group
        sharded = is_sharded(parts.model)

        def read(section: str, like: Any = None, into: Any = None) -> Any:
            tree = loaded.state[section]
            if loaded.rows is not None and sharded:
                place = partial(
                    place_rows,
                    like=next(filter(is_shard, parts.model.parameters())),
                )
                tree = loaded.rows.fill(
                    tree, group.rank, group.world_size, place, into
                )
            elif loaded.rows is not None:
                tree = loaded.rows.fill(tree, into=into)
            if sharded:
                return shard_like(tree, like)
            return tree

        # Each part is read only when it is applied, to save memory.
        switched = loaded.state.get("switched", {})
        apply_changes(parts.model, switched)
        add_buffers(parts.model, switched, loaded.state["model"])
        model_state = parts.model.state_dict()
        load_model(
            parts.model,
            read("model", model_state, into=model_state),
            parts.frozen,
        )
        load_beside(parts.beside, loaded.state.get("beside", {}))
        parts.optimizer.load_state_dict(
            _optimizer_state(parts.optimizer, read("optimizer"))
        )
        _check_moments(parts.optimizer)
        match_layout(parts.optimizer)
        parts.step.scaler.load_state_dict(read("scaler"))
        if parts.schedule is not None:
            parts.schedule.load_state_dict(read("schedule"))
        if parts.ema is not None:
            parts.ema.load_state_dict(read("ema"))
        self.task.load_state_dict(read("task", self.task.state_dict()))
        # The task's sampler may depend on its state.
        step = loaded.state["position"]["step"]
        order = loaded.state["position"]["order"]
        sampler = parts.sampler
        sampler.set_epoch(sampler.batches.place(max(0, step - 1)).epoch)
        if order and sampler.name(anew=True) != order:
            raise CheckpointError(
                "it has another order of samples: the task's sampler, or what it depends on, has changed since the epoch began"
            )
        if loaded.rank_state is not None:
            set_rng_state(loaded.rank_state, parts.device)


def _check_moments(optimizer: Optimizer) -> None:
    """Raise CheckpointError for moments that a fused step would read out of bounds.

    Only torch's own optimizers are checked: the state of others is unknown.
    """
    for part in filter(_is_torchs, optimizers_of(optimizer)):
        for parameter, moments in part.state.items():
            for name in _MOMENTS & moments.keys():
                moment = moments[name]  # None for SGD without momentum
                if moment is not None and moment.shape != parameter.shape:
                    words = f"{name} has shape {list(moment.shape)}, not {list(parameter.shape)}"
                    raise CheckpointError(
                        f"it does not fit this optimizer: {words}"
                    )


def _is_torchs(optimizer: Optimizer) -> bool:
    kinds = (kind for kind in type(optimizer).__mro__ if kind is not Optimizer)
    return any(kind.__module__.startswith("torch.optim.") for kind in kinds)


def match_layout(optimizer: Optimizer) -> None:
    """Give each moment the memory format of its parameter.

    A checkpoint may come from a run with another format (`channels_last`), and
    fused steps go through parameter and moment in memory order.

    Low-precision moments are not changed: torchao's tensor classes have their
    own layout.
    """
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            is_plain = type(value) is Tensor or is_shard(value)
            if not is_plain or value.shape != parameter.shape:
                continue
            if value.stride() != parameter.stride():
                dtype = value.dtype
                like = torch.empty_like(
                    parameter, dtype=dtype, requires_grad=False
                )
                moments[name] = like.copy_(value)


def _optimizer_state(optimizer: Optimizer, saved: State) -> State:
    """Convert the saved state for this run's optimizer.

    Tensors of a parameter's shape are sharded like the parameter. Options that
    only say how a step is computed stay those of this run.
    """
    groups = []
    state = {}
    was = [len(group["params"]) for group in saved["param_groups"]]
    now = [len(group["params"]) for group in optimizer.param_groups]
    if was != now:
        words = f"its groups have {was} parameters, this run's have {now}"
        raise CheckpointError(f"it does not fit this optimizer: {words}")
    pairs = zip(saved["param_groups"], optimizer.param_groups, strict=True)
    for theirs, ours in pairs:
        how = {option: ours[option] for option in _HOW if option in ours}
        groups.append({**ours, **theirs, **how})
        for number, parameter in zip(
            theirs["params"], ours["params"], strict=True
        ):
            entries = dict(saved["state"].get(number, {}))
            for name, value in entries.items():
                if getattr(value, "shape", None) == parameter.shape:
                    entries[name] = shard_like(value, parameter)
            if entries:
                state[number] = entries
    return {**saved, "state": state, "param_groups": groups}
