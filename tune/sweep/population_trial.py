"""A trial of `scheduler: pbt` as Ray Tune sees it: each `step` is a stage, in one go on a lane (Ray).

A stage begins with the last checkpoint of the trial's stage before, or, after an exploit, of another trial's, and ends
`perturbation_interval` epochs later with an evaluation and a checkpoint. So continue, pause, resume and exploit are one
thing to a lane, trials of a population larger than the lanes take turns, and no lane waits for Tune's decision.

`save_checkpoint` only names the stage that has ended: its weights lie on storage already, and are not copied. A stage's
line is in the journal before its lane knows of it, and its end before Tune does.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import Any

import ray

from trainers.config import TrainConfig
from trainers.config.overrides import override
from tune.lanes.messages import Assignment, Event
from tune.search.space import chosen
from tune.sweep.trial import LaneTrial, make_record
from tune.trials.journal import Stage

KEPT_STAGES = 3
"""Of each trial: what Tune may still name as a source is not older."""


class PopulationTrial(LaneTrial):
    """One member of the population."""

    def setup(self, config: dict[str, Any], *, interval: float = 1.0, **sweep: Any) -> None:
        """Called by Tune once an actor; a stage takes `interval` epochs."""
        self._interval = interval
        super().setup(config, **sweep)

    def _begin(self, config: dict[str, Any]) -> None:
        self._space_config = chosen(config)
        self._trial, self._ticket = self.trial_name, ""
        self._record = self._journal.find(self._trial)
        self._stage = None if self._record else self._journal.newest_stage(self._trial)

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Where Tune names a stage of another trial, that is what this one goes on from."""
        name = (checkpoint or {}).get("stage", "")
        if self._record is None and name and name.split("/")[0] != self._trial:
            source = self._journal.stage(name)
            self._submit(self._open(source))
            epoch, changed = source.curve[-1]["epoch"], _changes(source.config, self._space_config)
            words = f"trial {self._trial} goes on from {source.trial} at epoch {epoch:g}{changed}"
            ray.get(self._mailbox.note.remote(words))

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """The name of the stage that has ended."""
        return {"stage": self._stage.name} if self._stage is not None and self._stage.ended else {}

    def step(self) -> dict[str, Any]:
        """One stage: the last evaluation of it, or the trial's end."""
        if self._record is not None:
            return self._final(self._record)
        if not self._ticket:
            again = self._stage is not None and not self._stage.ended  # a killed driver's
            self._submit(self._stage if self._stage is not None and again else self._open(self._stage))
        stage = self._stage
        assert stage is not None
        outcome = self._follow()
        self._mailbox.forget.remote(self._ticket)
        self._ticket = ""
        result = outcome.get("result") or {}
        at_end = outcome["status"] == "stopped" and result["epochs"] > self._until_epoch - 1e-6
        if at_end or outcome["status"] == "done":
            self._stage = stage = replace(stage, curve=self._curve, ended=True)
            self._journal.write_stage(stage)
        if at_end:
            self._prune(stage)
            row = self._curve[-1]
            return {**row, "objective": self._value(row), "trial": self._trial}
        record = make_record(
            self._trial,
            self._space_config,
            self._objective,
            stage.started,
            self._curve,
            outcome,
            self._usd_per_hour,
        )
        self._record = replace(record, schedule=stage.schedule)
        self._journal.append(self._record)
        return self._final(self._record)

    def _open(self, source: Stage | None) -> Stage:
        """A new stage of this trial, which begins with the checkpoint of another."""
        last = self._stage
        schedule = list(source.schedule) if source is not None else []
        if not schedule or schedule[-1]["trial"] != self._trial or schedule[-1]["config"] != self._space_config:
            begin = source.curve[-1] if source is not None else {"step": 0, "epoch": 0.0}
            here = {"trial": self._trial, "step": int(begin["step"]), "epoch": begin["epoch"]}
            schedule.append({**here, "config": self._space_config})
        self._stage = Stage(
            trial=self._trial,
            number=0 if last is None else last.number + 1,
            config=self._space_config,
            started=time.time() if last is None else last.started,
            source=None if source is None else source.name,
            schedule=schedule,
            curve=list(source.curve) if source is not None else [],
        )
        self._journal.write_stage(self._stage)
        return self._stage

    def _submit(self, stage: Stage) -> None:
        """Queue a stage for the lanes."""
        directory = self._journal.stage_directory(stage.name)
        directory.delete("")  # what a killed driver has left of it has no rows in the curve
        self._curve = list(stage.curve)
        begin = self._curve[-1]["epoch"] if self._curve else 0.0
        self._until_epoch = begin + self._interval
        self._ticket = f"{stage.name}/{uuid.uuid4().hex[:8]}"
        assignment = Assignment(
            self._ticket,
            self._trial,
            override(TrainConfig, self._train, stage.config),
            storage=directory.uri,
            source=None if stage.source is None else self._journal.stage_directory(stage.source).uri,
            until_epoch=self._until_epoch,
        )
        ray.get(self._mailbox.submit.remote(assignment))

    def _follow(self) -> dict[str, Any]:
        """Add the evaluations of the stage to the curve, as they come; its outcome."""
        number = 0
        while True:
            event: Event = ray.get(self._mailbox.next_event.remote(self._ticket, number))
            if event.outcome is not None:
                return event.outcome
            self._curve.append({name: float(value) for name, value in event.metrics.items()})
            number += 1

    def _prune(self, stage: Stage) -> None:
        """Delete what older stages have kept, but for those that some other trial begins with."""
        used = ray.get(self._mailbox.sources.remote())
        for name in self._journal.population.names(self._trial):
            if name.isdecimal() and int(name) <= stage.number - KEPT_STAGES:
                directory = self._journal.stage_directory(f"{self._trial}/{name}")
                if directory.uri not in used:
                    directory.delete("")

    def _leave(self) -> None:
        """Tune may have given the actor to another trial in mid-stage; the driver records that."""
        if self._ticket:
            ray.get(self._mailbox.cancel.remote(self._ticket))


def _changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What is not as before, in words."""
    changed = {key: value for key, value in after.items() if value != before.get(key)}
    words = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in changed.items()]
    return f" with {', '.join(words)}" if words else ""
