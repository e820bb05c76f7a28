"""One worker's attempt at a run: what it trains with, and how far it has come."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from trainers.checkpoint.manifest import Best
from trainers.config import TrainConfig
from trainers.config.sections import (
    CheckpointConfig,
    EarlyStoppingConfig,
    EvaluateConfig,
    check_metric,
)
from trainers.context import RunContext
from trainers.data.stream import Mark, Stream
from trainers.loop.watchdog import Watchdog
from trainers.measure.clock import StepClock
from trainers.measure.result import Pauses
from trainers.measure.run_log import RunLog
from trainers.step.train_step import Losses, Replica
from trainers.task import Task

logger = logging.getLogger(__name__)


class EarlyStopping:
    """Counts evaluations since the best one.

    Every rank has the same figures, so ranks need not agree on anything.
    """

    def __init__(self, config: EarlyStoppingConfig) -> None:
        """Without a metric a run never ends early."""
        key = "early_stopping.metric"
        self.goal = Best.of(config.metric, config.mode, key)
        self._patience = config.patience or 0
        self._best: float | None = None
        self._best_step = 0
        self._waited = 0

    @property
    def words(self) -> str | None:
        """Why the run ends; None while it continues."""
        if self.goal is None or self._waited < self._patience:
            return None
        best = "no value was finite"
        if self._best is not None:
            best = f"the best is {self._best:.6g} at step {self._best_step}"
        return f"stopped early: {self.goal.metric} has not improved in {self._waited} evaluations ({best})"

    def take(self, step: int, figures: Mapping[str, float]) -> None:
        """Take in an evaluation's figures.

        Raises ConfigError if they lack the metric.
        """
        if self.goal is None:
            return
        if self.goal.improves(figures, self._best):
            self._best = figures[self.goal.metric]
            self._best_step = step
            self._waited = 0
        else:
            self._waited += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, which is empty without early stopping."""
        if self.goal is None:
            return {}
        return {
            "metric": self.goal.metric,
            "best": self._best,
            "best_step": self._best_step,
            "waited": self._waited,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, if it is for the same metric."""
        if self.goal is not None and state.get("metric") == self.goal.metric:
            self._best = state["best"]
            self._best_step = state["best_step"]
            self._waited = state["waited"]


class Attempt:
    """One worker's training from a checkpoint to the end, a stop or an error."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        context: RunContext,
        parts: Replica,
        watchdog: Watchdog,
    ) -> None:
        self.task = task
        self.config = config
        self.context = context
        self.parts = parts
        self.watchdog = watchdog
        self.compiles = config.compile != "off" or config.cuda_graphs is True
        self.stopping = EarlyStopping(config.early_stopping)
        keep = config.checkpoint
        self._goals = (Best.of(keep.best, keep.best_mode), self.stopping.goal)
        self.clock = StepClock(parts.device)
        storage = context.storage
        self.log: RunLog | None = None
        if storage and context.rank == 0:
            is_followed = bool(config.trackers) and context.launcher != "lane"
            self.log = RunLog(storage, config.writes_events, is_followed)
        self.began = time.monotonic()
        self.step = 0
        """Number of steps done, earlier attempts included."""
        self.end = parts.total_steps
        """The step after which this attempt ends."""
        self.metrics: dict[str, float] = {}
        """The newest value of each metric."""
        self.logged_step = 0
        """The last step of the last window of the log."""
        self.evaluated_step = -1
        self.reported: list[dict[str, float]] = []
        """The evaluations reported to the launcher, if only checkpoints keep
        them.
        """
        self.cut_window: Losses = {}
        """The losses of the log's last window, if the end of the run cut it short."""
        self.weightless = 0
        """Number of steps in this attempt that trained nothing, because all
        their samples have weight zero.
        """
        self.checkpoint: str | None = None
        """Where the newest checkpoint is."""
        self.elapsed_s = 0.0
        """Age of this attempt, as last agreed by the ranks."""
        self.earlier_time_s = 0.0
        """Training time of the launches before this one."""
        self.pauses = Pauses()
        self.later: deque[tuple[int, Callable[[], None]]] = deque()
        """Deferred calls that wait for results of the device, in order, each
        with the step at which it was queued.
        """

    @property
    def epochs(self) -> float | None:
        """Epochs done, including the fraction; None for a stream of unknown length."""
        sampler = self.parts.sampler
        if not sampler.known_length:
            return None
        return sampler.batches.epochs(self.step)

    @property
    def samples(self) -> int:
        """Samples trained, in earlier attempts as well."""
        return self.parts.sampler.batches.samples(self.step)

    @property
    def open_steps(self) -> int:
        """Steps since the last window of the log."""
        return self.step - self.logged_step

    @property
    def ends_epoch(self) -> bool:
        """Whether the step that has just ended was the last one of its epoch."""
        return self.parts.sampler.batches.place(self.step).number == 0

    def check_names(self, figures: Mapping[str, float]) -> None:
        """Raise ConfigError if an evaluation lacks a configured metric."""
        for goal in self._goals:
            if goal is not None:
                check_metric(goal.key, goal.metric, figures)

    def is_due(
        self, step: int, every: EvaluateConfig | CheckpointConfig
    ) -> bool:
        """Return whether a step completes an interval of `every`."""
        if every.every_steps is not None:
            return step % every.every_steps == 0
        epoch, index = self.parts.sampler.batches.place(step)
        return index == 0 and epoch % (every.every_epochs or 1) == 0

    def settle(self, step: int) -> None:
        """Run the deferred calls that were queued at steps up to `step`."""
        while self.later and self.later[0][0] <= step:
            self.later.popleft()[1]()

    def end_early(self) -> None:
        """Make this step the last one if early stopping says so."""
        if (words := self.stopping.words) is not None:
            self.end = self.step
            if self.context.rank == 0:
                logger.info("%s", words)

    def position(self) -> dict[str, Any]:
        """Return where the run is, for logs and reports."""
        place: dict[str, Any] = {"step": self.step}
        if self.epochs is not None:
            place["epoch"] = self.epochs
        if self.config.changes_batch:  # else samples follow from steps
            place["samples"] = self.samples
        place["train_time_s"] = self.clock.train_time_s
        return place

    def tell(self, kind: str, figures: Mapping[str, Any]) -> None:
        """Pass one record of the run, from rank 0, to whoever has asked for records."""
        if self.context.take is not None and self.context.rank == 0:
            row = {"record": kind, **self.position()}
            row["wall_time_s"] = time.monotonic() - self.began
            self.context.take({**row, **figures})

    def stream_mark(self) -> Mark | None:
        """Return the mark of the stream's samples up to the first row of the last step.

        All ranks have read these samples, so the ranks' marks can be compared.
        """
        stream = self.parts.train_feed.dataset
        if self.step == 0 or not isinstance(stream, Stream):
            return None
        return stream.mark_at(
            self.parts.sampler.batches.samples(self.step - 1) + 1
        )

    def report(self, checkpoint: str | None) -> None:
        """Report the run's position and newest figures to the launcher.

        `checkpoint`, if given, is the location of a complete checkpoint.
        """
        row = {**self.position(), **self.metrics}
        if checkpoint is None and self.context.storage is None:
            self.reported.append(row)
        self.context.report(row, checkpoint, self.elapsed_s)
