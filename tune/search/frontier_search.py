"""search: frontier as Ray Tune's Searcher, over the records of the sweep; frontier.py decides (Ray, to serve)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tune.config import BATCH_KEYS, SweepConfig
from tune.search.frontier import Belief, Choice, Ended, Seen, decide
from tune.search.space import listed, trial_config
from tune.search.time_model import Place
from tune.trials.interval import Interval, samples_to_target
from tune.trials.journal import trial_id
from tune.trials.record import TrialRecord

# What changes how fast the same training runs. Anything else may change what is learned.
_SPEED = (
    "precision",
    "compile",
    "fullgraph",
    "cuda_graphs",
    "channels_last",
    "deterministic",
    "strategy",
    "device",
    "microbatch_size",
    "data",
    "ddp",
)


class Frontier:
    """The places of a sweep's space, and what its records say of them."""

    def __init__(self, config: SweepConfig, train: Mapping[str, Any]) -> None:
        self.config, self._train = config, dict(train)
        (self._key,) = [key for key in BATCH_KEYS if key in config.space]
        values = listed(config.space[self._key])
        others = {key: list(space) for key, space in config.space.items() if key != self._key and type(space) is list}
        self.trials: dict[Place, dict[str, Any]] = {}
        for rest in itertools.product(*others.values()):
            setting = dict(zip(others, rest, strict=True))
            kind = {key: value for key, value in setting.items() if key.partition(".")[0] not in _SPEED}
            for value in values:
                trial = {key: value if key == self._key else setting[key] for key in config.space}
                size = trial_config(self._train, trial).batch_size
                self.trials[Place(repr(setting), repr(kind), size)] = trial
        self.places = list(self.trials)
        self._place_of = {trial_id(trial): place for place, trial in self.trials.items()}

    def seen(self, records: Sequence[TrialRecord]) -> list[Seen]:
        """The records that the search may learn from."""
        return [one for record in records if (one := self.one(record)) is not None]

    def one(self, record: TrialRecord) -> Seen | None:
        """A record as the search sees it; None for one of another space, and for repeats, which ran alone."""
        place = self._place_of.get(trial_id(record.config))
        if place is None or record.purpose == "repeat":
            return None
        rows = [row for row in record.curve if row.get("epoch")]
        samples = max((row["step"] * place.size for row in record.curve), default=record.samples or 0.0)
        reached = [index for index, row in enumerate(record.curve) if self.config.objective.reached(row)]
        train = trial_config(self._train, self.trials[place])
        whole = None
        if train.max_steps is not None:
            whole = float(train.max_steps * place.size)
        elif rows and train.epochs is not None:
            whole = rows[-1]["step"] / rows[-1]["epoch"] * place.size * train.epochs
        elif record.samples and record.epochs and train.epochs is not None:
            whole = record.samples / record.epochs * train.epochs
        speed = None
        if record.samples_per_s and record.step_time_s:
            width = min(0.5, (record.step_time_ci95_s or 0.0) / record.step_time_s)
            speed = Interval(record.samples_per_s, *(record.samples_per_s * (1 + sign * width) for sign in (-1, 1)))
        return Seen(
            place,
            record.purpose,
            max(samples, record.samples or 0.0),
            whole,
            samples_to_target(record.curve, reached[0], place.size) if reached else None,
            speed,
            (record.noise_scale or {}).get("value"),
            record.status,
        )

    def next(self, records: Sequence[TrialRecord], running: Sequence[Choice] = ()) -> Choice | Ended | None:
        """What `decide` says to these records."""
        return decide(self.places, self.seen(records), running)

    def predictions(self, records: Sequence[TrialRecord]) -> dict[str, Interval]:
        """Time to target, s, of every configuration of the grid, by the id that its trial has or would have."""
        times = Belief(self.places, self.seen(records)).times()
        return {trial_id(self.trials[place]): time_s for place, time_s in zip(self.places, times, strict=True)}


def frontier_searcher(frontier: Frontier, records: Callable[[], list[TrialRecord]]) -> Any:
    """The Searcher for Tune. `records` reads the journal: a trial's record is there before Tune hears of its end."""
    from ray.tune.search import Searcher

    class FrontierSearcher(Searcher):
        """Asks `Frontier` each time that a lane is free."""

        def __init__(self) -> None:
            super().__init__(metric="objective", mode="min")
            self.running: dict[str, Choice] = {}
            self.ended: Ended | None = None
            self.known = records()
            self.waits = False

        def set_search_properties(
            self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any
        ) -> bool:
            return True

        def suggest(self, trial_id: str) -> Any:
            if self.waits:
                return None
            step = frontier.next(self.known, list(self.running.values()))
            if isinstance(step, Choice):
                self.running[trial_id] = step
                return {"trial": frontier.trials[step.place], "purpose": step.purpose}
            if isinstance(step, Ended):
                self.ended = step
                return Searcher.FINISHED
            self.waits = True
            return None

        def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
            self.running.pop(trial_id, None)
            self.known, self.waits = records(), False

        def save(self, checkpoint_path: str) -> None:
            """Nothing: the journal has it all."""

        def restore(self, checkpoint_path: str) -> None:
            """Nothing to restore."""

    return FrontierSearcher()
