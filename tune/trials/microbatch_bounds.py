"""Which microbatches fit: learned from every trial, shared by all, kept across resumes.

Nothing here does I/O.

A key represents all settings that affect memory (`key_of`). Memory use grows
with the microbatch size. So all sizes up to the largest that fitted are taken
to fit, and all sizes from the smallest that did not fit are taken not to fit.
Sizes in between are unknown.

Trials may contradict each other: a size that a probe found to fit may run out
of memory an hour later, in a fragmented heap. The stricter observation wins,
whichever came first: a size that has run out of memory once is never tried
again, nor is a larger one, and contrary observations are forgotten. So the
order of observations does not matter.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Self

from trainers.config import TrainConfig
from trainers.config.function import FunctionConfig, build_run
from trainers.config.model import Tree
from trainers.config.sections import Positive
from trainers.storage import validated

# All of task_args counts, because only the task knows which arguments change
# the model's size. Deterministic algorithms use other workspaces.
_MEMORY_KEYS = (
    "task",
    "task_args",
    "precision",
    "compile",
    "cuda_graphs",
    "channels_last",
    "deterministic",
    "activation_checkpointing",
    "strategy",
)


def key_of(tree: Tree, device_name: str) -> str:
    """Return a digest that is equal for runs that need the same memory per microbatch.

    `tree` is the run's configuration as plain data, `device_name` the GPU's
    name and memory ("NVIDIA A10G, 22.5 GiB"). The learning rate, the seed,
    the length and the global batch size of a task's run change no tensor's
    size, so they are left out. For a training function, they are known by
    their usual names.
    """
    config = build_run(dict(tree), "trial")
    if isinstance(config, FunctionConfig):
        settings: Tree = {
            "train_func": config.train_func,
            "config": config.others,
        }
    else:
        settings = _of_task(config)
    scaling = config.scaling
    settings["device"] = device_name
    settings["workers"] = [scaling.min_workers, scaling.max_workers]
    # below 1, workers share a GPU's memory
    settings["gpus_per_worker"] = scaling.gpus_per_worker
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _of_task(config: TrainConfig) -> Tree:
    optimizer = config.optimizer
    settings: Tree = {key: getattr(config, key) for key in _MEMORY_KEYS}
    # these decide how much state each parameter has
    settings["optimizer"] = [optimizer.name, bool(optimizer.momentum)]
    settings["resident"] = config.data.resident
    # evaluation uses the same device, between steps
    settings["evaluation"] = config.evaluate.microbatch_size
    if config.ema.decay is not None:
        settings["ema"] = True  # a copy of the weights
    return settings


def fixed_size(tree: Tree) -> int | None:
    """Return the microbatch size that a trial's configuration fixes, or None.

    It is at most a worker's share of the batch. For a training function, it is
    the function's batch size.
    """
    config = build_run(dict(tree), "trial")
    if isinstance(config, FunctionConfig):
        return config.batch_size[1] if config.batch_size else None
    if config.microbatch_size == "auto":
        return None
    share = -(-config.batch_size // config.scaling.min_workers)
    return min(config.microbatch_size, share)


@dataclass(frozen=True)
class _Known:
    """What is known for one key, in the form in which it is stored."""

    fits: list[Positive]
    misfit: Positive | None


class Boundary:
    """What is known about the largest microbatch that fits, for each key."""

    def __init__(self) -> None:
        # Every size that fitted: smaller ones count again when a larger one
        # turns out not to fit.
        self._fits: dict[str, set[int]] = {}
        self._misfit: dict[str, int] = {}

    def observe(self, key: str, size: int, fits: bool) -> None:
        """Note that a microbatch of `size` did or did not fit."""
        known = self._fits.setdefault(key, set())
        if fits:
            known.add(size)
        else:
            self._misfit[key] = min(size, self._misfit.get(key, size))
        misfit = self._misfit.get(key)
        if misfit is not None:
            self._fits[key] = {other for other in known if other < misfit}

    def largest_fit(self, key: str) -> int | None:
        """Return the largest size that is known to fit, or None."""
        return max(self._fits.get(key, ()), default=None)

    def smallest_misfit(self, key: str) -> int | None:
        """Return the smallest size that is known not to fit, or None."""
        return self._misfit.get(key)

    def fits(self, key: str, size: int) -> bool | None:
        """Return whether a size fits, or None if that is not known."""
        low = self.largest_fit(key)
        high = self.smallest_misfit(key)
        if low is not None and size <= low:
            return True
        if high is not None and size >= high:
            return False
        return None

    def to_plain(self) -> Tree:
        """Return all that is known as plain data, for the sweep's directory."""
        return {
            key: {"fits": sorted(fits), "misfit": self._misfit.get(key)}
            for key, fits in sorted(self._fits.items())
        }

    @classmethod
    def from_plain(cls, tree: Tree) -> Self:
        """Return a boundary from `to_plain`'s data; CheckpointError if invalid."""
        boundary = cls()
        for key, known in validated(tree, dict[str, _Known]).items():
            for size in known.fits:
                boundary.observe(key, size, True)
            if known.misfit is not None:
                boundary.observe(key, known.misfit, False)
        return boundary
