"""A trial of `scheduler: pbt` as Ray Tune sees it: each `step` is a stage, which a lane runs in one go (Ray).

A stage begins with the last checkpoint of the trial's stage before or, after an exploit, of another trial, and ends
`perturbation_interval` epochs later with an evaluation and a checkpoint. So continue, pause, resume and exploit are the
same to a lane, a population larger than the number of lanes takes turns, and no lane waits for Tune's decision.

`save_checkpoint` only names the stage that has ended, whose weights are on storage already. The journal has a stage
before its lane does, and its end before Tune does.
"""

import time
from dataclasses import replace
from typing import Any

import ray

from trainers.config import TrainConfig
from trainers.config.overrides import override
from tune.lanes.messages import Assignment, new_ticket
from tune.report.words import shown
from tune.search.space import unwrap
from tune.sweeps.trial import LaneTrial
from tune.trials.journal import Stage

KEPT_STAGES = 3
"""Of each trial; Tune names no older one as a source."""


class PopulationTrial(LaneTrial):
    """One member of the population."""

    def setup(self, config: dict[str, Any], *, interval: float = 1.0, **sweep: Any) -> None:
        """Called by Tune once for each actor; a stage takes `interval` epochs."""
        self._interval = interval
        super().setup(config, **sweep)

    def _begin(self, config: dict[str, Any]) -> None:
        self._space_config = unwrap(config).trial
        self._trial, self._purpose, self._ticket = self.trial_name, "trial", ""
        self._record = self._journal.find(self._trial)
        self._stage = None if self._record else self._journal.newest_stage(self._trial)

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Go on from the stage that Tune names, where it is another trial's."""
        name = (checkpoint or {}).get("stage", "")
        if self._record is None and name and name.split("/")[0] != self._trial:
            source = self._journal.stage(name)
            self._submit(self._open(source))
            words = f"trial {self._trial} goes on from {source.trial} at epoch {source.curve[-1]['epoch']:g}"
            changed = {key: value for key, value in self._space_config.items() if value != source.config.get(key)}
            if changed:
                words += f" with {', '.join(f'{key} {shown(value)}' for key, value in changed.items())}"
            ray.get(self._mailbox.say.remote(words))

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """The name of the stage that has ended."""
        return {"stage": self._stage.name} if self._stage is not None and self._stage.ended else {}

    def step(self) -> dict[str, Any]:
        """Run one stage; returns its last evaluation, or the trial's end."""
        if self._record is not None:
            return self._final(self._record)
        stage = self._stage
        if stage is None or stage.ended:  # one that has not ended is a killed driver's, or an exploit's
            stage = self._open(stage)
        if not self._ticket:
            self._submit(stage)
        while (outcome := self._await_event()) is None:
            pass
        self._mailbox.forget.remote(self._ticket)
        self._ticket = ""
        result = outcome.get("result") or {}
        at_end = outcome["status"] == "stopped" and result["epochs"] > self._until_epoch - 1e-6
        if at_end or outcome["status"] == "done":
            self._stage = stage = replace(stage, curve=self._curve, ended=True)
            self._journal.write_stage(stage)
        if at_end:
            self._prune(stage)
            return self._latest()
        self._started = stage.started
        self._record = replace(self._make_record(outcome), schedule=stage.schedule, spent=None)
        self._journal.append(self._record)
        return self._final(self._record)

    def _open(self, source: Stage | None) -> Stage:
        """Open a new stage of this trial, which begins with the checkpoint of `source`."""
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
        self._curve, self._events = list(stage.curve), 0
        self._until_epoch = (self._curve[-1]["epoch"] if self._curve else 0.0) + self._interval
        self._ticket = ray.get(self._mailbox.adopt.remote(stage.name)) or ""
        if self._ticket:  # an actor that died has submitted it: it goes on, and this one hears all of it again
            return
        directory.delete("")  # a killed driver may have left a part of it, whose rows are not in the curve
        self._ticket = new_ticket(stage.name)
        assignment = Assignment(
            self._ticket,
            self._trial,
            override(TrainConfig, self._train, stage.config),
            watches=self._objective.watched,
            storage=directory,
            source=None if stage.source is None else self._journal.stage_directory(stage.source).uri,
            until_epoch=self._until_epoch,
        )
        ray.get(self._mailbox.submit.remote(assignment))

    def _prune(self, stage: Stage) -> None:
        """Delete the checkpoints of older stages, except those with which another trial begins."""
        used = ray.get(self._mailbox.sources.remote())
        for name in self._journal.population.names(self._trial):
            directory = self._journal.stage_directory(f"{self._trial}/{name}")
            if name.isdecimal() and int(name) <= stage.number - KEPT_STAGES and directory.uri not in used:
                directory.delete("")

    def cleanup(self) -> None:
        """Cancel the stage that Tune has cut off; the driver records the trial."""
        if self._ticket:
            ray.get(self._mailbox.cancel.remote(self._ticket))
