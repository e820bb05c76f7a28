"""Run a changed configuration and the old one in turn, on workers, and say how much less time a sample takes."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.overrides import override
from trainers.context import RunContext
from trainers.devices.device import resolve_device
from trainers.devices.group import Group
from trainers.errors import RunFailedError
from trainers.launch.signals import end_at_once
from trainers.launch.spec import Job
from trainers.loop.fit import fit
from trainers.measure.step_times import student_t95
from trainers.storage import Storage

_ROUNDS = 4
_FEWEST = 30
"""Steps of a turn."""


@dataclass(frozen=True)
class Gain:
    """Share of a sample's time in steps that the change saves, with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(rounds: Sequence[tuple[float, float]]) -> Gain:
        """By the samples a second of both in each round, the changed one second."""
        logs = [math.log(old / new) for old, new in rounds]
        mean = statistics.fmean(logs)
        half = student_t95(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        return Gain(1 - math.exp(mean), 1 - math.exp(mean + half), 1 - math.exp(mean - half))

    def __str__(self) -> str:
        how = "less" if self.value >= 0 else "more"
        return f"{abs(self.value):.0%} {how} time a sample in steps ({self.low:.0%} to {self.high:.0%} less)"

    def to_json(self) -> str:
        """As it crosses between processes."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class CompareJob(Job[Gain]):
    """Trains with both configurations in turn, from the start each time."""

    new: dict[str, Any]
    """The changed configuration, as `tree`."""
    steps: int
    """Of one turn of the old one."""
    place: str
    """Directory for what the turns write; who has made the job deletes it, for a worker may be killed."""

    def read_result(self, text: bytes) -> Gain:
        """Parse what `execute` returned on rank 0."""
        return Gain(**json.loads(text))

    def execute(self, context: RunContext) -> Gain:
        """Measure as one worker; the result is rank 0's."""
        end_at_once()
        group = Group(context.rank, context.world_size, resolve_device(self.config.device, context.device_index))
        rounds = []
        for number in range(_ROUNDS):
            turns = [("old", self.tree), ("new", self.new)]
            speeds: dict[str, float] = {}
            for name, tree in turns if number % 2 == 0 else reversed(turns):
                speeds[name] = self._samples_per_s(tree, context, group, Storage(self.place).child(f"{number}-{name}"))
            rounds.append((speeds["old"], speeds["new"]))
        return Gain.of(rounds)

    def _samples_per_s(self, tree: dict[str, Any], context: RunContext, group: Group, place: Storage) -> float:
        whole = build(TrainConfig, tree, self.source)
        steps = max(_FEWEST, self.steps * self.config.batch_size // whole.batch_size)
        changes: dict[str, Any] = {
            "epochs": None,
            "max_steps": steps,
            "evaluate.every_epochs": None,
            "evaluate.every_steps": steps,
            "tracking": [],
            "profile_steps": 0,
        }
        short = build(TrainConfig, override(TrainConfig, tree, changes), self.source)
        torch.compiler.reset()  # each turn compiles as a run does
        worker = RunContext(
            place,
            context.launcher,
            context.rank,
            context.world_size,
            context.local_rank,
            context.local_world_size,
            context.device_index,
        )
        result = fit(replace(self, tree=tree).load_task(), short, worker)
        group.barrier()
        if context.rank == 0:
            place.delete("")
        if result.throughput is None:
            raise RunFailedError("error", f"{steps} steps gave no throughput ({result.status}: {result.message})")
        return group.first(result.throughput.samples_per_s)
