"""FunctionConfig: the configuration of a run with a `train_func` for Ray Train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from trainers.config.model import Settings, Tree, build
from trainers.config.sections import (
    Place,
    Restarts,
    RunName,
    ScalingConfig,
    Tracking,
)
from trainers.config.train import TrainConfig
from trainers.errors import ConfigError, did_you_mean

BATCH_KEYS = ("global_batch_size", "batch_size_per_worker")
KNOWN_KEYS = (*BATCH_KEYS, "precision")
FUNCTION_IDENTITY = ("train_func", "train_loop_config")
"""Keys that decide what is learned."""
_CONFIG = "train_loop_config"
_NO_SIZES = (
    "dropout",
    "epochs",
    "learning_rate",
    "lr",
    "momentum",
    "num_epochs",
    "seed",
    "weight_decay",
)
"""The last parts of a function's keys that change no tensor's size."""
_OF_TASK = "give the value in `train_loop_config`, which the `train_func` reads: this key is for a `task`"


_FOREIGN: dict[str, tuple[str, ...] | str] = {
    **dict.fromkeys(
        [*TrainConfig.model_fields, *TrainConfig.foreign], _OF_TASK
    ),
    **dict.fromkeys(BATCH_KEYS, "name the function's own key with `keys`"),
    "precision": "name the function's own key with `keys.precision`",
    "task": "keep one of `task` and `train_func`",
    "launcher": "remove it: a `train_func` runs on Ray",
    "checkpoint": "remove it: the function reports its checkpoints itself",
}


def flat(tree: Mapping[Any, Any], before: str = "") -> Tree:
    """Flatten a nested mapping to values by dotted key."""
    found: Tree = {}
    for name, value in tree.items():
        key = f"{before}{name}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{key}.")
        else:
            found[key] = value
    return found


class FunctionFailure(Settings):
    """Restarts of a function that fails."""

    max_failures: Restarts = 0
    """How often the function is restarted from its newest checkpoint, as in
    Ray's FailureConfig; -1: no limit.
    """


class FunctionConfig(Settings):
    """One run of a training function on Ray Train."""

    foreign = _FOREIGN
    call = "python -m trainers"

    train_func: str = Field(
        pattern=r"^\w[\w.-]*:[A-Za-z_]\w*$",
        max_length=256,
        examples=["my_script:train_func"],
        json_schema_extra={"rule": "must be `module:function`"},
    )
    """The function that each worker calls, as `module:function`, looked for
    from the YAML file's directory upwards.
    """
    train_loop_config: Tree = Field(
        default_factory=dict, examples=[{"batch_size": 32, "lr": 0.001}]
    )
    """The function's argument."""
    task_dir: Place = None
    """Directory to search first for the module of `task` or `train_func`; if
    relative, it is below the working directory, like `storage_path`. Sweeps
    set it in best.yaml.
    """
    name: RunName = "run"
    """Name of the run: its directory below `storage_path`."""
    storage_path: Place = Field(default=None, examples=["s3://bucket/runs"])
    """Where runs are kept: a directory or any pyarrow.fs URI (default
    $PACELINE_STORAGE, else ./results).
    """
    keys: dict[str, str] = Field(
        default_factory=dict,
        examples=[{"global_batch_size": f"{_CONFIG}.batch_size"}],
    )
    """The function's keys that hold `precision` (in the function's terms) and
    `global_batch_size` or `batch_size_per_worker`, as `{global_batch_size:
    train_loop_config.batch_size}`.

    Sweeps use their values for memory limits, figures and the answer.
    """
    scaling: ScalingConfig = ScalingConfig()
    """Workers and what each of them gets."""
    failure: FunctionFailure = FunctionFailure()
    """Restarts."""

    tracking: Tracking = Field(default_factory=list)

    @model_validator(mode="after")
    def _keys_are_there(self) -> Self:
        known = self._flat
        first, second = BATCH_KEYS
        for name, path in self.keys.items():
            key = field = f"keys.{name}"
            value: Any = path
            rule = ""
            if name not in KNOWN_KEYS:
                rule = "is not a known key"
                listed = f"use one of {', '.join(KNOWN_KEYS)}"
                fix = did_you_mean(name, KNOWN_KEYS, listed)
            elif name == second and first in self.keys:
                rule = f"conflicts with {first}"
                fix = "keep one of the two"
            elif path not in known:
                rule = f"names no key of {_CONFIG}"
                listed = f"use one of {', '.join(known)}"
                fix = f"add that key to `{_CONFIG}`"
                if known:
                    fix = did_you_mean(path, known, listed)
            elif name in BATCH_KEYS and not _is_count(known[path]):
                field = path
                value = known[path]
                rule = f"must be a whole number of at least 1, since `{key}` names it"
                fix = f"write for example `{path.rpartition('.')[2]}: 32`"
            if rule:
                raise ConfigError(field, value, rule, fix)
        return self

    @property
    def _flat(self) -> Tree:
        return flat({_CONFIG: self.train_loop_config})

    @property
    def batch_size(self) -> tuple[str, int] | None:
        """The batch size's key and value; None where `keys` names none."""
        for name in BATCH_KEYS:
            if name in self.keys:
                return name, self._flat[self.keys[name]]
        return None

    @property
    def precision(self) -> str | None:
        """The number format in the function's terms; None where `keys` names none."""
        path = self.keys.get("precision")
        return None if path is None else str(self._flat[path])

    @property
    def others(self) -> Tree:
        """The function's configuration without its batch size, rates, seed and length."""
        sizes = [self.keys.get(name) for name in BATCH_KEYS]
        return {
            path: value
            for path, value in self._flat.items()
            if path not in sizes and path.split(".")[-1] not in _NO_SIZES
        }


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


RunConfig = TrainConfig | FunctionConfig


def kind_of(
    tree: Mapping[str, Any],
) -> type[TrainConfig] | type[FunctionConfig]:
    """Return the class that validates a run's configuration.

    FunctionConfig if the run has a `train_func`, else TrainConfig.
    """
    return FunctionConfig if "train_func" in tree else TrainConfig


def build_run(tree: Tree, source: str) -> RunConfig:
    """Validate a run's configuration, of either kind; ConfigError as for `build`."""
    return build(kind_of(tree), tree, source)
