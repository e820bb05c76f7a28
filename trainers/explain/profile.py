"""A short profile of a run's steps, and probes of what would change them, on workers of this machine."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trainers.config import TrainConfig
from trainers.config.model import build
from trainers.config.overrides import override
from trainers.context import RunContext
from trainers.errors import PacelineError
from trainers.explain.observe import observe
from trainers.explain.pairs import Pair, paired
from trainers.explain.readings import Profile, RankReadings, Readings, Span, Suspicion
from trainers.explain.stepper import Stepper, warm
from trainers.explain.suspect import WORTH, suspect
from trainers.launch.signals import end_at_once
from trainers.launch.spec import Job
from trainers.loop.build import build_replica
from trainers.measure.profiler import inspect_run
from trainers.model.precision import apply_matmul
from trainers.step.replica import Replica

logger = logging.getLogger(__name__)

_MOST_PROBES = 4
_SLICE_S = 0.1
_LEAD = 3
"""Steps that are not timed; in as many the processes of another replica have fetched two batches each."""


def changed(tree: dict[str, Any], changes: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a configuration with dotted keys set; ConfigError where they cannot be."""
    found = override(TrainConfig, tree, changes)
    build(TrainConfig, found, source)
    return found


@dataclass(frozen=True)
class ProfileJob(Job[Profile]):
    """Builds the run's model and data, and takes steps that are thrown away; writes nothing."""

    seconds: float

    def read_result(self, text: bytes) -> Profile:
        """Parse what `execute` returned on rank 0."""
        tree = json.loads(text)
        ranks = [RankReadings(**one) for one in tree["readings"].pop("ranks")]
        suspicions = [Suspicion(**{**one, "gain": Span(**one["gain"])}) for one in tree["suspicions"]]
        return Profile(Readings(ranks=ranks, **tree["readings"]), suspicions)

    def execute(self, context: RunContext) -> Profile:
        """Profile as one worker; the result is rank 0's."""
        end_at_once()
        context.storage = None
        with self.replica(self.config, context) as parts:
            readings = observe(parts, self.config, inspect_run(self._quiet(self.config), context), self.seconds)
            suspicions = parts.group.first(suspect(readings, self.config))
            probed = [self._probed(one, parts, context) if one.probe else one for one in suspicions[:_MOST_PROBES]]
            kept = [one for one in probed + suspicions[_MOST_PROBES:] if one.gain.value > WORTH]
            return Profile(readings, sorted(kept, key=lambda one: -one.own))

    def _quiet(self, config: TrainConfig) -> TrainConfig:
        return config.model_copy(update={"profile_steps": 0})

    @contextlib.contextmanager
    def replica(self, config: TrainConfig, context: RunContext) -> Iterator[Replica]:
        """A replica for a block, built under a configuration."""
        parts = build_replica(self.load_task(), config.with_global_batch(), context)
        try:
            yield parts
        finally:
            parts.close()

    def _probed(self, suspicion: Suspicion, base: Replica, context: RunContext) -> Suspicion:
        """Return the suspicion with the gain that steps of the changed configuration have shown beside the old ones."""
        try:
            config = build(TrainConfig, changed(self.tree, suspicion.changes, self.source), self.source)
            with self.replica(config, context) as parts:
                pair = side_by_side(base, parts, _SLICE_S)
        except PacelineError as error:
            logger.warning("%s was not tried: %s", suspicion.changes, error)
            return replace(suspicion, gain=Span(0.0, 0.0, 0.0))
        return replace(suspicion, gain=base.group.first(pair.gain))


def side_by_side(old: Replica, new: Replica, slice_s: float) -> Pair:
    """Time slices of steps of two replicas in turn: seconds a sample. Every rank must call it.

    A slice begins with steps that are not timed: the first ones find neither caches nor memory as they need them, and
    where loader processes prepare batches during the other's slice, those are to be used up, or made again.
    """
    steppers = Stepper(old), Stepper(new)
    ahead = [one.prepared for one in steppers]
    counts = [warm(one, slice_s, fewest=max(1, 2 * some)) for one, some in zip(steppers, ahead, strict=True)]

    def one(number: int) -> float:
        stepper = steppers[number]
        apply_matmul(stepper.parts.spec)
        for _ in range(ahead[number] or min(_LEAD, counts[number])):
            stepper.step()
        return stepper.time_s(counts[number]) / stepper.samples

    return Pair(paired(lambda: one(0), lambda: one(1)))
