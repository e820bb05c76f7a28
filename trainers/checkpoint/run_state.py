"""The training state of a run: what a checkpoint holds, and how it is taken back.

It is the same under every strategy and for any number of workers: whole tensors, under the bare module's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainers.checkpoint.checkpoints import Loaded
from trainers.config import TrainConfig
from trainers.devices.rng import set_rng_state
from trainers.errors import CheckpointError, ConfigError
from trainers.model.sharding import is_sharded, shard_like, whole
from trainers.step.replica import Replica
from trainers.task import Task

_SECTIONS = ("model", "optimizer", "scaler", "task", "position")
_HOW = ("fused", "foreach", "capturable")
"""Options of an optimizer that say how its step is computed: this run's, not the checkpoint's. So is whatever the
configuration has changed since, as a sweep's population does."""


def training_state(parts: Replica, task: Task, position: dict[str, Any]) -> dict[str, Any]:
    """Everything but random state, without any wrapper's prefix; `position` says where in the data the run is.

    Every rank must call it; of a sharded model rank 0 alone has the tensors.
    """
    state = {
        "model": parts.model.state_dict(),
        "optimizer": parts.optimizer.state_dict(),
        "scaler": parts.step.scaler.state_dict(),
        "task": task.state_dict(),
        "position": position,
    }
    return whole(state, parts.group) if is_sharded(parts.model) else state


def restore(parts: Replica, task: Task, loaded: Loaded, config: TrainConfig) -> dict[str, Any]:
    """Take back a loaded checkpoint and return its position.

    Raises CheckpointError when it does not fit the model, ConfigError when it was trained on other steps.
    """
    state = loaded.state
    if missing := set(_SECTIONS) - set(state):
        raise CheckpointError(f"checkpoint {loaded.name} is no checkpoint of ours: it has no {sorted(missing)[0]}")
    position: dict[str, Any] = state["position"]
    for name, now in (("global_batch_size", config.batch_size), ("train_samples", parts.sampler.length)):
        if position[name] != now:
            raise ConfigError(
                name,
                now,
                f"differs from the {position[name]} that checkpoint {loaded.name} was trained with",
                "train under another `name`, or start anew with --fresh",
            )
    model_state, task_state = state["model"], state["task"]
    if is_sharded(parts.model):
        model_state = shard_like(model_state, parts.model.state_dict())
        task_state = shard_like(task_state, task.state_dict())
    own = (*_HOW, *_changed(config, loaded.config))
    try:
        parts.model.load_state_dict(model_state)
        parts.optimizer.load_state_dict(_optimizer_state(parts.optimizer, state["optimizer"], own))
        match_layout(parts.optimizer)
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint {loaded.name} does not fit this model: {error}") from error
    parts.step.scaler.load_state_dict(state["scaler"])
    task.load_state_dict(task_state)
    if loaded.rank_state is not None:
        set_rng_state(loaded.rank_state, parts.device)
    return position


def match_layout(optimizer: Optimizer) -> None:
    """Each moment in the memory format of its parameter: a checkpoint may come from a run with another one
    (`channels_last`), and fused steps walk both in the order in which they lie in memory.
    """
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            is_tensor = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_tensor and value.stride() != parameter.stride():
                moments[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _changed(config: TrainConfig, before: dict[str, Any]) -> list[str]:
    """The optimizer's options that are not those of the checkpoint's configuration."""
    then, now = before.get("optimizer"), config.tree()["optimizer"]
    return [] if then is None else [name for name in now if then.get(name) != now[name]]


def _optimizer_state(optimizer: Optimizer, saved: dict[str, Any], own: Sequence[str]) -> dict[str, Any]:
    """The saved state as this run's optimizer takes it: what has a parameter's shape is cut as that parameter is, and
    the options `own` are this run's.
    """
    groups = [
        {**theirs, **{option: ours[option] for option in own if option in ours}}
        for theirs, ours in zip(saved["param_groups"], optimizer.param_groups, strict=True)
    ]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_number = dict(zip((number for group in groups for number in group["params"]), parameters, strict=True))

    def cut(value: Any, parameter: Tensor) -> Any:
        return shard_like(value, parameter) if getattr(value, "shape", None) == parameter.shape else value

    state = {
        number: {name: cut(value, by_number[number]) for name, value in entries.items()}
        for number, entries in saved["state"].items()
    }
    return {**saved, "state": state, "param_groups": groups}
