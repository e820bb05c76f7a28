"""What is known of which microbatches fit: learned from every trial, shared by all of them, kept across resumes. Pure.

A key stands for everything that touches memory (`key_of`). Of each key two numbers are known: the largest size that
fitted and the smallest that did not; memory grows with the size, so every size up to the first fits and every size
from the second on does not. What lies between is not known. Sizes are any whole numbers.

Trials may contradict each other: a size that a probe found to fit runs out of memory an hour later, in a fragmented
heap. The stricter wins, whichever came first: a size that has once run out is never taken again, nor is a larger
one, and what was thought to fit from there on is forgotten. So it does not matter in which order observations come.
Each contradiction is reported, as the sentence that `observe` returns.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainers.config import TrainConfig
from trainers.config.model import build, plain


def memory_settings(tree: Mapping[str, Any], device_name: str) -> dict[str, Any]:
    """What touches memory in a TrainConfig's plain data, defaults filled in, on a device of one model.

    `device_name` is the GPU's model and memory ("NVIDIA A10G, 22.5 GiB"). The learning rate, the seed, the length
    and the global batch size of a run change no tensor's size, so trials that differ only in them share a key.
    The task's arguments are all taken: which of them shape the model or its input, only the task knows.
    """
    config = build(TrainConfig, dict(tree), "trial")
    optimizer = config.optimizer
    return {
        "device": device_name,
        "task": config.task,
        "task_args": config.task_args,
        "precision": config.precision,
        "compile": config.compile,
        "cuda_graphs": config.cuda_graphs,
        "channels_last": config.channels_last,
        "deterministic": config.deterministic,  # other algorithms, with other workspaces
        "strategy": config.strategy,
        "ddp": plain(config.ddp),
        "workers": [config.scaling.min_workers, config.scaling.max_workers],
        "gpus_per_worker": config.scaling.gpus_per_worker,  # below 1, workers share a GPU's memory
        "optimizer": [optimizer.name, bool(optimizer.momentum)],  # decides how much state a parameter has
        "resident": config.data.resident,
        "evaluation": config.evaluate.microbatch_size,  # it runs on the same device, between steps
    }


def key_of(tree: Mapping[str, Any], device_name: str) -> str:
    """The digest of `memory_settings`: equal for trials whose microbatches need the same memory."""
    text = json.dumps(memory_settings(tree, device_name), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fixed_size(tree: Mapping[str, Any]) -> int | None:
    """The microbatch that a trial insists on, cut to a worker's share of the batch; None for `auto`."""
    config = build(TrainConfig, dict(tree), "trial")
    if config.microbatch_size == "auto":
        return None
    return min(config.microbatch_size, -(-config.batch_size // config.scaling.min_workers))


def bisection_order(sizes: Iterable[int]) -> list[int]:
    """The same sizes, each once, the middle first, then the middles of both halves, and so on.

    n fixed sizes that are tried in this order, those left out that are known not to fit, run out of memory at most
    ceil(log2(n + 1)) times. (In rising order it is once, but the boundary is known last; in falling order up to n.)
    """
    ordered: list[int] = []
    spans = deque([sorted(set(sizes))])
    while spans:
        span = spans.popleft()
        if span:
            middle = len(span) // 2
            ordered.append(span[middle])
            spans += [span[:middle], span[middle + 1 :]]
    return ordered


@dataclass
class _Known:
    fits: set[int] = field(default_factory=set)
    """Every size that fitted: the smaller ones count again when a larger one turns out not to."""
    misfit: int | None = None
    """The smallest size that ran out of memory."""

    def settle(self) -> set[int]:
        """Forget the sizes that a misfit contradicts; returns them."""
        wrong = {size for size in self.fits if self.misfit is not None and size >= self.misfit}
        self.fits -= wrong
        return wrong


class Boundary:
    """The largest microbatch that fits, for each key, as far as it is known."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def observe(self, key: str, size: int, fits: bool) -> str | None:
        """Take in that a microbatch of `size` did or did not fit; returns the contradiction, if there is one.

        Raises ValueError for a size below 1.
        """
        if size < 1:
            raise ValueError(f"size is {size}, but must be at least 1")
        known = self._known.setdefault(key, _Known())
        if fits:
            known.fits.add(size)
        else:
            known.misfit = size if known.misfit is None else min(known.misfit, size)
        wrong = known.settle()
        if not wrong:
            return None
        fitted, missed = (size, known.misfit) if fits else (max(wrong), size)
        return f"a microbatch of {fitted} fitted, but one of {missed} ran out of memory: taken not to fit from there on"

    def largest_fit(self, key: str) -> int | None:
        """The largest size known to fit; None when none is."""
        known = self._known.get(key)
        return max(known.fits, default=None) if known else None

    def smallest_misfit(self, key: str) -> int | None:
        """The smallest size known not to fit; None when none is."""
        known = self._known.get(key)
        return known.misfit if known else None

    def fits(self, key: str, size: int) -> bool | None:
        """Whether a size fits; None when that is not known."""
        low, high = self.largest_fit(key), self.smallest_misfit(key)
        if low is not None and size <= low:
            return True
        return False if high is not None and size >= high else None

    def to_plain(self) -> dict[str, Any]:
        """All of it as plain data, for the journal."""
        return {key: {"fits": sorted(known.fits), "misfit": known.misfit} for key, known in sorted(self._known.items())}

    @staticmethod
    def from_plain(tree: Mapping[str, Any]) -> Boundary:
        """Read `to_plain` back; ValueError, TypeError or KeyError when it is something else."""
        boundary = Boundary()
        for key, known in tree.items():
            for size in known["fits"]:
                boundary.observe(key, size, True)
            if known["misfit"] is not None:
                boundary.observe(key, known["misfit"], False)
        return boundary
