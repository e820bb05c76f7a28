"""Run a changed configuration beside the old one, in turn, and say how much less time a sample takes.

The whole loop runs, with evaluations and checkpoints as each configuration has them; what is due seldom is counted by
what one of them takes and how often the whole run would have it, and what compiles is counted once.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.overrides import override
from trainers.config.sections import CheckpointConfig, EvaluateConfig
from trainers.context import RunContext
from trainers.devices.device import resolve_device
from trainers.devices.group import Group
from trainers.explain.pairs import Pair
from trainers.explain.readings import Span
from trainers.launch.signals import end_at_once
from trainers.launch.spec import Job
from trainers.loop.fit import fit
from trainers.measure.clock import WARMUP_STEPS
from trainers.measure.result import Pauses, RunResult
from trainers.measure.run_log import read_log
from trainers.storage import Storage

_ROUNDS, _FEWEST_ROUNDS = 4, 2
_MUCH_LONGER = 3
"""Than they were to take: then rounds end early."""
_FEWEST = 30


@dataclass(frozen=True)
class Verified:
    """The measured gain: share of a sample's time that is saved."""

    gain: Span

    def to_json(self) -> str:
        """As it crosses between processes."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class CompareJob(Job[Verified]):
    """Trains both configurations in turn, from the start each time, on the run's own storage, as whose checkpoints
    theirs take as long.
    """

    new: dict[str, Any]
    """The changed configuration, as `tree`."""
    seconds: float
    """Of one turn."""
    step_s: float
    """What a step of the old one takes."""
    place: str
    """Directory for what the turns write; who has made the job deletes it, for a worker may be killed."""

    def read_result(self, text: bytes) -> Verified:
        """Parse what `execute` returned on rank 0."""
        return Verified(Span(**json.loads(text)["gain"]))

    def execute(self, context: RunContext) -> Verified:
        """Measure as one worker; the result is rank 0's."""
        end_at_once()
        group = Group(context.rank, context.world_size, resolve_device(self.config.device, context.device_index))
        rounds, began = list[tuple[float, float]](), time.perf_counter()
        for number in range(_ROUNDS):
            took_s = group.first(time.perf_counter() - began)
            if number >= _FEWEST_ROUNDS and took_s > _MUCH_LONGER * 2 * number * self.seconds:
                break  # as of turns that compile
            found = {}
            for name in ("old", "new") if number % 2 == 0 else ("new", "old"):
                tree = self.tree if name == "old" else self.new
                found[name] = self._sample_s(tree, context, group, Storage(self.place).child(f"{number}-{name}"))
            rounds.append((found["old"], found["new"]))
        return Verified(Pair(rounds).gain)

    def _sample_s(self, tree: dict[str, Any], context: RunContext, group: Group, place: Storage) -> float:
        """Seconds that a sample takes in one turn."""
        whole = build(TrainConfig, tree, self.source)
        steps = max(_FEWEST, int(self.seconds / self.step_s * self.config.batch_size / whole.batch_size))
        changes: dict[str, Any] = {
            "epochs": None,
            "max_steps": steps,
            "log_every_steps": WARMUP_STEPS,
            "evaluate.every_epochs": None,
            "evaluate.every_steps": min(steps // 2, whole.evaluate.every_steps or steps),  # two: the first says little
            "tracking": [],
            "profile_steps": 0,
        }
        short = build(TrainConfig, override(TrainConfig, tree, changes), self.source)
        of_all, of_host = (context.rank, context.world_size), (context.local_rank, context.local_world_size)
        torch.compiler.reset()  # each turn compiles as a run does
        worker = RunContext(place, context.launcher, *of_all, *of_host, context.device_index)
        result = fit(replace(self, tree=tree).load_task(), short, worker)
        log = read_log(place)
        group.barrier()
        if context.rank == 0:
            place.delete("")
        return sample_s(result, log, whole, self.config)


def sample_s(result: RunResult, log: list[dict[str, Any]], whole: TrainConfig, old: TrainConfig) -> float:
    """Return the seconds a sample of the run that `whole` describes, by a short run of it: over as many samples as
    that of `old` has.
    """
    windows = [record for record in log if "train_loss" in record]
    first, last = windows[0], windows[-1]
    step_s: float = (last["train_time_s"] - first["train_time_s"]) / (last["step"] - first["step"])
    once_s, paused = 0.0, result.pauses or Pauses()
    if result.compile is not None and result.throughput is not None:
        step_s = result.throughput.step_time_s
        once_s = result.train_time_s - result.steps * step_s + paused.first_evaluation_s - paused.each_evaluation_s
    per_epoch = round(result.steps / result.epochs) if result.epochs else 2**31
    total = (whole.epochs or 1) * per_epoch
    if whole.max_steps:
        total = -(-whole.max_steps * old.batch_size // whole.batch_size)
    evaluate, checkpoint = whole.evaluate, whole.checkpoint

    def every(section: EvaluateConfig | CheckpointConfig) -> float:
        """Share of the steps after which one is due; the last one always is."""
        interval = section.every_steps or (section.every_epochs or 1) * per_epoch
        return -(-total // interval) / total

    evaluated_s = paused.each_evaluation_s * every(evaluate)
    each_s = paused.checkpoint_s / max(1, paused.checkpoints)
    kept_s = each_s * (step_s / checkpoint.every_s if checkpoint.every_s else every(checkpoint))
    return (step_s + once_s / total + evaluated_s + kept_s) / whole.batch_size
