"""What one sweep has found, as its file in the store holds it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from trainers.config.function import FunctionConfig, build_run, kind_of
from tune.config import SweepConfig
from tune.search.space import trial_tree
from tune.trials.interval import samples_in, throughput
from tune.trials.record import Name, Purpose, TrialRecord, UnixTime

MOST_TRIALS = 48  # of a sweep
_MOST_ROWS = 64  # of a trial's curve
_LEFT_OUT = ("name", "storage_path", "task_dir", "tracking", "launcher")
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Size = Annotated[int, Field(ge=1, lt=2**63)]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Told:
    """A trial of it."""

    config: dict[str, Any]
    """Dotted keys of the run and the trial's values."""
    size: _Size
    """Global batch size."""
    purpose: Purpose
    status: str
    samples: _Amount
    """Samples that it trained on."""
    whole: _Amount | None = None
    """Samples of the whole run, where known."""
    samples_per_s: _Rate | None = None
    width: _Amount = 0.0
    """Relative half width of the 95 % interval of `samples_per_s`."""
    noise_scale: _Rate | None = None
    curve: list[tuple[_Amount, float]] = field(default_factory=list)
    """Samples, and the metric of the target, an evaluation each."""


@dataclass(frozen=True)
class Bound:
    """Which microbatches fitted."""

    key: str
    """Digest of all that memory depends on but the device (tune/trials/microbatch_bounds.py)."""
    device: str
    """Model and memory of the device ("NVIDIA A10G, 22.5 GiB")."""
    label: str
    """In words."""
    fits: _Size | None = None
    misfit: _Size | None = None


@dataclass(frozen=True)
class Entry:
    """A sweep."""

    id: Name
    sweep: str
    """Its directory."""
    time: UnixTime
    """When it ended, Unix time, s."""
    task: str
    """Its task, or training function."""
    code: str
    """Digest of its code; empty where that could not be read."""
    train: dict[str, Any]
    """The run that it varied."""
    hardware: str
    versions: dict[str, str]
    target: dict[str, float]
    trials: list[Told] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)


def told(config: SweepConfig, train: dict[str, Any], records: Sequence[TrialRecord]) -> list[Told]:
    """Return what a sweep's records say; of a training function nothing, since its configuration is its own."""
    if kind_of(train) is FunctionConfig:
        return []
    metric = next(iter(config.objective.target or {}), "")
    own = [record for record in records if not record.schedule]
    return [_told(record, train, metric) for record in own[:: -(-len(own) // MOST_TRIALS) or 1]]


def _told(record: TrialRecord, train: dict[str, Any], metric: str) -> Told:
    run: Any = build_run(trial_tree(train, record.config), "trial")
    size, rate = run.batch_size, throughput(record.samples_per_s, record.step_time_s, record.step_time_ci95_s)
    curve = [(samples_in(row, size), row[metric]) for row in record.curve if metric in row and "step" in row]
    if len(curve) > _MOST_ROWS:  # the last is where the target was met
        curve = [curve[round(at * (len(curve) - 1) / (_MOST_ROWS - 1))] for at in range(_MOST_ROWS)]
    whole = None
    if run.max_steps is not None:
        whole = float(run.max_steps * size)
    elif run.epochs is not None and record.samples and record.epochs:
        whole = record.samples / record.epochs * run.epochs
    width = 0.0 if rate is None else (rate.high - rate.low) / 2 / rate.value
    noise = (record.noise_scale or {}).get("value")
    rows = [(samples, value) for samples, value in curve if abs(value) < float("inf")]
    args = record.config, size, record.purpose, record.status, record.samples or 0.0, whole
    return Told(*args, None if rate is None else rate.value, width, noise or None, rows)


def plain_train(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's mapping without what says where it is kept and how it is launched."""
    return {key: value for key, value in train.items() if key not in _LEFT_OUT}
