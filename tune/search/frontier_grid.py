"""The grid that search frontier covers: its places from a sweep's space, and what the records say of them. Pure."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tune.config import BATCH_KEYS, SweepConfig
from tune.search.front_belief import FrontBelief
from tune.search.frontier import Belief, Choice, Ended, Seen, decide
from tune.search.history import Past
from tune.search.space import grid_values, trial_config
from tune.search.time_model import Place
from tune.trials.interval import Interval, samples_in, samples_to_target, throughput
from tune.trials.journal import trial_id
from tune.trials.record import TrialRecord

# What changes how fast the same training runs. Anything else may change what is learned.
SPEED = ("precision", "compile", "fullgraph", "cuda_graphs", "channels_last", "deterministic", "strategy",
          "device", "microbatch_size", "data", "ddp", "fsdp", "activation_checkpointing")  # fmt: skip


class Frontier:
    """The places of a sweep's space, and what its records say of them, beside what earlier sweeps have found."""

    def __init__(self, config: SweepConfig, train: Mapping[str, Any], past: Sequence[Past] = ()) -> None:
        self.config, self._train, self.past = config, dict(train), past
        (batch_key,) = [key for key in BATCH_KEYS if key in config.space]
        keys = [key for key in config.space if key != batch_key]
        self.trials: dict[Place, dict[str, Any]] = {}
        for rest in itertools.product(*(grid_values(config.space[key]) for key in keys)):
            setting = dict(zip(keys, rest, strict=True))
            kind = {key: value for key, value in setting.items() if key.partition(".")[0] not in SPEED}
            for value in grid_values(config.space[batch_key]):
                values = {**setting, batch_key: value}
                trial = {key: values[key] for key in config.space}
                size = trial_config(self._train, trial).batch_size
                self.trials[Place(repr(setting), repr(kind), size)] = trial
        self.places = list(self.trials)
        self._place_of = {trial_id(trial): place for place, trial in self.trials.items()}

    def seen(self, records: Sequence[TrialRecord]) -> list[Seen]:
        """Return the records as the search sees them, without those of another space and repeats, which ran alone."""
        return [one for record in records if record.purpose != "repeat" and (one := self._seen(record)) is not None]

    def _seen(self, record: TrialRecord) -> Seen | None:
        place = self._place_of.get(trial_id(record.config))
        if place is None:
            return None
        seconds = record.spent.total_s - record.spent.starting_s if record.spent else None
        samples = max((samples_in(row, place.size) for row in record.curve), default=0.0)
        reached = [index for index, row in enumerate(record.curve) if self.config.objective.reached(row)]
        return Seen(
            place,
            record.purpose,
            max(samples, record.samples or 0.0),
            self._whole(record, place),
            samples_to_target(record.curve, reached[0], place.size) if reached else None,
            throughput(record.samples_per_s, record.step_time_s, record.step_time_ci95_s),
            (record.noise_scale or {}).get("value"),
            record.status,
            record.peak_memory_bytes,
            record.energy_j / seconds if record.energy_j and seconds else None,
        )

    def _whole(self, record: TrialRecord, place: Place) -> float | None:
        """Return the samples of the whole training, as far as the configuration and the trial tell."""
        train = trial_config(self._train, self.trials[place])
        if train.max_steps is not None:
            return float(train.max_steps * place.size)
        if train.epochs is None:
            return None
        rows = [row for row in record.curve if row.get("epoch")]
        if rows:
            return rows[-1]["step"] / rows[-1]["epoch"] * place.size * train.epochs
        return record.samples / record.epochs * train.epochs if record.samples and record.epochs else None

    def next(self, records: Sequence[TrialRecord], running: Sequence[Choice] = ()) -> Choice | Ended | None:
        """Return what `decide` says to these records."""
        metrics = self.config.objective.metrics
        make_belief = None if metrics is None else functools.partial(FrontBelief, metrics)
        return decide(self.places, self.seen(records), running, self.past, make_belief)

    def belief(self, records: Sequence[TrialRecord]) -> Belief:
        """Return what these records say of all places."""
        return Belief(self.places, self.seen(records), past=self.past)

    def predictions(self, records: Sequence[TrialRecord]) -> dict[str, Interval]:
        """Return the time to target, s, of every configuration of the grid, by the id of its trial."""
        times = self.belief(records).times()
        return {trial_id(self.trials[place]): time_s for place, time_s in zip(self.places, times, strict=True)}
