"""A trial as Ray Tune sees it: a class trainable without a model, which waits for what its lane reports (Ray)."""

from __future__ import annotations

import math
import time
import uuid
from typing import Any

import ray
from ray.tune import Trainable

from trainers.config import TrainConfig
from trainers.config.overrides import override
from trainers.errors import STATUSES, Status
from trainers.storage import Storage
from tune.config import Objective
from tune.lanes.messages import Assignment, Event
from tune.search.space import chosen, purpose_of
from tune.trials.interval import dollars
from tune.trials.journal import Journal, TrialRecord, trial_id
from tune.trials.stop_rule import Purpose, Until


def time_to_target(objective: Objective, curve: list[dict[str, float]]) -> float | None:
    """Training time, s, at the first evaluation that met the target."""
    return next((row["train_time_s"] for row in curve if objective.reached(row)), None)


def make_record(
    trial: str,
    config: dict[str, Any],
    objective: Objective,
    started: float,
    curve: list[dict[str, float]],
    outcome: dict[str, Any],
    usd_per_hour: float | None = None,
    purpose: Purpose = "trial",
    seed: int | None = None,
) -> TrialRecord:
    """The record of a trial from its evaluations and from what its lane said of its end.

    `usd_per_hour` is the price of one lane.
    """
    result = outcome.get("result") or {}
    speed = result.get("throughput") or {}
    status: Status = outcome["status"] if outcome["status"] in STATUSES else "error"
    message = outcome.get("message", "")
    metrics = {**(curve[-1] if curve else {}), **result.get("metrics", {})}
    time_s = time_to_target(objective, curve)
    if time_s is not None and usd_per_hour is not None:
        metrics["usd_to_target"] = dollars(time_s, usd_per_hour)
    known = set(metrics) | {"samples_per_s", "time_to_target", "usd_to_target", "step_time_s"}
    missing = sorted({objective.metric, *(objective.target or {})} - known)
    if status == "done" and missing:
        status = "error"
        message = f"objective: the task reports no {missing[0]}, only {', '.join(sorted(known))}"
    return TrialRecord(
        id=trial,
        config=config,
        status=status,
        start_time=started,
        end_time=time.time(),
        samples_per_s=speed.get("samples_per_s"),
        step_time_s=speed.get("step_time_s"),
        peak_memory_bytes=result.get("peak_memory_bytes"),
        metrics=metrics,
        curve=curve,
        time_to_target_s=time_s,
        lane=outcome.get("lane"),
        purpose=purpose,
        seed=seed,
        samples=result["steps"] * result["global_batch_size"] if result else None,
        epochs=result.get("epochs"),
        step_time_ci95_s=speed.get("step_time_ci95_s"),
        noise_scale=result.get("noise_scale"),
        cpu_pressure=outcome.get("cpu_pressure"),
        message=message,
        traceback=outcome.get("traceback", ""),
    )


def watched(tree: dict[str, Any], objective: Objective, purpose: Purpose) -> tuple[dict[str, Any], Until]:
    """A trial of a search that learns from what it sees: its TrainConfig, and when it has seen enough."""
    extra: dict[str, Any] = {"noise_scale": True}
    if purpose == "probe":
        extra["log_every_steps"] = min(10, tree.get("log_every_steps", 10))
    (target,) = (objective.target or {}).items()
    return override(TrainConfig, tree, extra), Until(target, purpose == "probe")


class LaneTrial(Trainable):
    """Submits its configuration to the mailbox; `step` gives one evaluation at a time; the actor is reused.

    The record of a trial is in the journal before Tune hears of its end. A trial whose record is there already (a
    resumed sweep) ends at once, from the record.
    """

    def setup(
        self,
        config: dict[str, Any],
        *,
        mailbox: Any = None,
        uri: str = "",
        train: dict[str, Any] | None = None,
        objective: dict[str, Any] | None = None,
        usd_per_hour: float | None = None,
    ) -> None:
        """Called by Tune once an actor; the keyword arguments are the sweep's."""
        self._mailbox, self._train, self._usd_per_hour = mailbox, train or {}, usd_per_hour
        self._journal = Journal(Storage(uri))
        self._objective = Objective.model_validate(objective)
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The next trial in the same actor."""
        self._leave()
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        self._space_config = chosen(config)
        self._purpose = purpose_of(config)
        self._trial = trial_id(self._space_config, self._purpose)
        self._ticket = f"{self._trial}/{uuid.uuid4().hex[:8]}"
        self._events = 0
        self._curve: list[dict[str, float]] = []
        self._started = time.time()
        self._record = self._journal.find(self._trial)
        if self._record is None:
            tree, until = override(TrainConfig, self._train, self._space_config), Until()
            if "purpose" in config:
                tree, until = watched(tree, self._objective, self._purpose)
            ray.get(self._mailbox.submit.remote(Assignment(self._ticket, self._trial, tree, until=until)))

    def step(self) -> dict[str, Any]:
        """The next evaluation, or the end."""
        if self._record is not None:
            return self._final(self._record)
        event: Event = ray.get(self._mailbox.next_event.remote(self._ticket, self._events))
        self._events += 1
        if event.outcome is not None:
            self._record = make_record(
                self._trial,
                self._space_config,
                self._objective,
                self._started,
                self._curve,
                event.outcome,
                self._usd_per_hour,
                self._purpose,
            )
            self._journal.append(self._record)
            self._mailbox.forget.remote(self._ticket)
            return self._final(self._record)
        row = {name: float(value) for name, value in event.metrics.items()}
        self._curve.append(row)
        return {**row, "objective": self._value(row), "trial": self._trial}

    def _value(self, row: dict[str, float]) -> float:
        """The objective so far, for a scheduler; the worst value where it is not defined yet."""
        worst = math.inf if self._objective.direction == "min" else -math.inf
        if self._objective.metric in ("time_to_target", "usd_to_target"):
            reached_s = time_to_target(self._objective, self._curve)
            if reached_s is not None and self._objective.metric == "usd_to_target":
                return dollars(reached_s, self._usd_per_hour or 0.0)
            return worst if reached_s is None else reached_s
        value = row.get(self._objective.metric, worst)
        return worst if math.isnan(value) else value

    def _final(self, record: TrialRecord) -> dict[str, Any]:
        self._curve = record.curve
        row = {**record.metrics, "samples_per_s": record.samples_per_s or 0.0, "step_time_s": record.step_time_s or 0.0}
        return {**row, "objective": self._value(row), "trial": record.id, "status": record.status, "done": True}

    def _leave(self) -> None:
        """The search may have stopped the trial before its end; the driver records that."""
        if self._record is None:
            ray.get(self._mailbox.cancel.remote(self._ticket))

    def cleanup(self) -> None:
        """The actor ends."""
        self._leave()

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Nothing: without this method Tune would not reuse the actor."""
        return {}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Nothing to load."""
