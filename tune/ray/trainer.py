"""A TorchTrainer that trains in a lane when a trial calls its `fit` (Ray)."""

import copy
import re
import uuid
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray import cloudpickle

from tune.ray_internals import get_session

_NAME_BY_RAY = re.compile(r"ray_train_run-\d{4}(-\d\d){2}_\d\d(-\d\d){2}")
"""The name that Ray gives to a nameless run: its start time, to the second."""


class TorchTrainer(ray.train.torch.TorchTrainer):
    """Replaces `ray.train.torch.TorchTrainer`.

    Inside a trial of `tune.ray.Tuner`, `fit` runs the training function on the
    workers of a lane; anywhere else, it is Ray's own `fit`.
    """

    def fit(self) -> Any:
        """Train as Ray's `fit` does, and return its result."""
        ask = getattr(get_session(), "ask", None)
        if ask is None or self.running_in_local_mode:  # type: ignore[attr-defined] # typed as in the first version of Ray Train
            return super().fit()
        own: Any = self
        given = {
            "scaling_config": own.scaling_config,
            "run_config": with_own_name(own.run_config),
            "datasets": own.datasets,
            "dataset_config": own.data_config,
            "validation_config": own.validation_config,
        }
        group = own.backend_config
        packed = cloudpickle.dumps(own._get_train_func())
        return ask("fit", packed, given, group.backend, group.timeout_s)


def with_own_name(run_config: Any) -> Any:
    """Return a RunConfig whose run has a unique name.

    With Ray's default name, a run would continue from the checkpoints of
    another trial that began in the same second.
    """
    if _NAME_BY_RAY.fullmatch(run_config.name):
        run_config = copy.copy(run_config)
        run_config.name += f"-{uuid.uuid4().hex[:12]}"
    return run_config
